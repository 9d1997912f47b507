package fallback

import (
	"log/slog"

	"github.com/jackc/pgx/v5/pgconn"
)

// Reason is what an error means.
type Reason uint8

const (
	// ReasonNone is the caller's own error: a constraint, a syntax error, a serialization failure, an encoding error. Nothing of it
	// is this module's business.
	ReasonNone Reason = iota
	// ReasonCancelled is the caller's context: it was done, and the error says so.
	ReasonCancelled
	// ReasonNotSent is a failure before the first byte reached the server, or an idle connection closed by the other side.
	ReasonNotSent
	// ReasonUnknown is a connection lost with a request in flight, or a pooler's error that does not say what became of it.
	ReasonUnknown
	// ReasonPoolerPrepared is a pooler that does not know a prepared statement, or knows it too well. It ends the connection, and with
	// it any transaction.
	ReasonPoolerPrepared
	// ReasonPoolerBusy is a pooler that had no server connection to give.
	ReasonPoolerBusy
	// ReasonStatementMode is a pooler that refuses transactions.
	ReasonStatementMode
	// ReasonConfig is a connection that can never work as configured: database, user, password, startup parameter.
	ReasonConfig
	// ReasonTxLost is an open transaction ended by a time limit of the pooler or the server.
	ReasonTxLost
	// ReasonPreparedLost is a server that does not have our prepared statement, has another one by that name, or has it already.
	ReasonPreparedLost
	// ReasonStalePlan is a plan whose result changed under it: 0A000, cached plan must not change result type.
	ReasonStalePlan
	// ReasonStaleShape is a request encoded by a description that a migration has overtaken.
	ReasonStaleShape
	// ReasonSplitBatch is a pooler that sent the parts of one request to different servers.
	ReasonSplitBatch
	// ReasonTxAborted is a statement in a transaction that had already failed: 25P02.
	ReasonTxAborted
	// ReasonServer is a server that shuts down, starts up or has no free connection.
	ReasonServer
	// ReasonDisorder is an answer that cannot be, an [AnswerError]: the connection's answers are not those to what was sent.
	ReasonDisorder
)

var reasonTexts = [...]string{
	ReasonNone: "none", ReasonCancelled: "cancelled", ReasonNotSent: "not sent", ReasonUnknown: "unknown",
	ReasonPoolerPrepared: "pooler lost prepared statement", ReasonPoolerBusy: "pooler busy", ReasonStatementMode: "statement pooling",
	ReasonConfig: "configuration", ReasonTxLost: "transaction lost", ReasonPreparedLost: "prepared statement lost",
	ReasonStalePlan: "stale plan", ReasonStaleShape: "stale description", ReasonSplitBatch: "split request",
	ReasonTxAborted: "transaction aborted", ReasonServer: "server unavailable",
	ReasonDisorder: "answer out of order",
}

// String names the reason in one to four words.
func (r Reason) String() string { return textOf(reasonTexts[:], r) }

// Executed says whether anything of the failed request may stand.
type Executed uint8

const (
	// Maybe is the zero value: the request, or a part of it, may have been executed, and its effects may stand.
	Maybe Executed = iota
	// No is proof: every part of the request was refused before it ran, or the transaction it belonged to was rolled back.
	No
)

// String returns "maybe" or "no".
func (e Executed) String() string {
	if e == No {
		return "no"
	}
	return "maybe"
}

// Connection says whether the connection can be used after the error.
type Connection uint8

const (
	// Dead is the zero value: close it.
	Dead Connection = iota
	// Alive connections answer, after the reader was closed. A transaction on them is in the failed state.
	Alive
)

// String returns "dead" or "alive".
func (c Connection) String() string {
	if c == Alive {
		return "alive"
	}
	return "dead"
}

// Action is what to do next. All but [Return] stand only in verdicts with Executed == [No], are meant to be taken once per call, and use
// the same connection where it is [Alive] and another one where it is [Dead]. Where the failed group carried BEGIN ([PhaseBegin]) and the
// connection is alive, ROLLBACK comes first.
type Action uint8

const (
	// Return hands the error to the caller.
	Return Action = iota
	// RunUnprepared runs the statement once more without a name. The name is no longer known on this connection. After [ReasonStalePlan] the
	// description is learnt again first, and behind a pooler that tracks statements the text has to change, by a comment for instance, before it
	// is sent by name again: such a pooler keeps the stale plan under whatever name the same text is parsed (PgBouncer, src/prepare.c; seen on
	// 1.24 and 1.26).
	RunUnprepared
	// Reparse runs it once more as Close, Parse, Bind, Describe, Execute in one group. Only for [Shared], where a miss is no surprise.
	Reparse
	// Relearn forgets the description, learns it again and runs the statement once more by the new one.
	Relearn
	// RunElsewhere runs it once more, the same way, on another connection.
	RunElsewhere
	// RunLater may be run again as it is, but not at once: the pooler or the server is out of something. A caller that does not back
	// off treats it as [Return].
	RunLater
	// RerunTx may run the whole transaction once more from its BEGIN, if the caller has it as a closure; else it is [Return].
	RerunTx
)

var actionTexts = [...]string{
	Return: "return", RunUnprepared: "run unprepared", Reparse: "reparse", Relearn: "relearn",
	RunElsewhere: "run elsewhere", RunLater: "run later", RerunTx: "rerun transaction",
}

// String names the action in one to three words.
func (a Action) String() string { return textOf(actionTexts[:], a) }

func textOf[T ~uint8](texts []string, v T) string {
	if int(v) < len(texts) {
		return texts[v]
	}
	return "invalid"
}

// Verdict is what [Classify] makes of an error.
type Verdict struct {
	// Reason is what happened.
	Reason Reason
	// Executed is whether anything of the request may stand.
	Executed Executed
	// Connection is whether the connection can be used further.
	Connection Connection
	// Action is what to do.
	Action Action
	// Evidence is true when the error says that named statements cannot be used the way they were.
	Evidence bool
	// PoolerMade is true when a pooler made the error, not PostgreSQL.
	PoolerMade bool
	// Name is the server-side name of the statement in question, as the error or the caller gave it; "" if there was none.
	Name string
	// PgError is the error's protocol form, also when the error value had lost it; nil if there was none.
	PgError *pgconn.PgError
}

// OutcomeUnknown reports that no answer says what became of the request: the connection, or the wait for it, was lost while it was in
// flight. For a request that carried COMMIT it means that nobody knows whether the transaction was committed.
func (v Verdict) OutcomeUnknown() bool {
	if v.Executed == No {
		return false
	}
	switch v.Reason {
	case ReasonCancelled, ReasonUnknown, ReasonServer, ReasonTxLost, ReasonDisorder:
		return true
	default:
		return false
	}
}

// String describes the verdict in one line for people, without the error's own text.
func (v Verdict) String() string {
	return v.Reason.String() + ": executed " + v.Executed.String() + ", connection " + v.Connection.String() + ", " + v.Action.String()
}

// LogValue makes a verdict a group of "reason", "sqlstate", "statement", "executed", "connection" and "action". The error's message is
// left out, because a server's message can quote values.
func (v Verdict) LogValue() slog.Value {
	attrs := []slog.Attr{slog.String("reason", v.Reason.String())}
	if v.PgError != nil {
		attrs = append(attrs, slog.String("sqlstate", v.PgError.Code))
	}
	if v.Name != "" {
		attrs = append(attrs, slog.String("statement", v.Name))
	}
	return slog.GroupValue(append(attrs,
		slog.String("executed", v.Executed.String()),
		slog.String("connection", v.Connection.String()),
		slog.String("action", v.Action.String()),
	)...)
}
