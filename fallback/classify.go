package fallback

import (
	"context"
	"errors"
	"os"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
)

// Phase is where in a transaction the failed request stood.
type Phase uint8

const (
	// PhaseAlone is a request that was a transaction of its own: one Sync group, or a group with both BEGIN and COMMIT.
	PhaseAlone Phase = iota
	// PhaseConnect is a connection attempt. No statement was sent.
	PhaseConnect
	// PhaseBegin is the first group of an explicit transaction: it carried BEGIN, so nothing of the transaction was sent before it.
	PhaseBegin
	// PhaseInside is a later group of an explicit transaction, without COMMIT.
	PhaseInside
	// PhaseCommit is a group that carried the COMMIT of a transaction begun by an earlier group.
	PhaseCommit
)

var phaseTexts = [...]string{
	PhaseAlone: "alone", PhaseConnect: "connect", PhaseBegin: "begin", PhaseInside: "inside", PhaseCommit: "commit",
}

// String names the phase in a word.
func (p Phase) String() string { return textOf(phaseTexts[:], p) }

// Context is what the caller knows about the failed request. The zero value is the cautious one: nothing is known, nothing is repeated
// that might have run.
type Context struct {
	// Strategy is how the statement was sent.
	Strategy Strategy
	// Name is the statement's server-side name; "" if it had none.
	Name string
	// Text is the statement's text. A prepared statement that the text itself names, as EXECUTE does, is the caller's own.
	Text string
	// Topology is what the probe found; the zero value is none.
	Topology Topology
	// Phase is where the request stood.
	Phase Phase
	// Alive says that the connection was still open after the reader had been closed: !PgConn.IsClosed().
	Alive bool
	// CtxErr is the Err of the call's context, read after the failure.
	CtxErr error
	// Learnt says that the request was encoded by a description from an earlier call, which a migration may have overtaken.
	Learnt bool
	// ParamOIDs are the parameter types of that description, and Columns is the number of its result columns.
	ParamOIDs []uint32
	Columns   int
}

// named reports whether the request bound a name of its own.
func (c *Context) named() bool {
	return (c.Strategy == Named || c.Strategy == Shared) && c.Name != ""
}

// rerun returns a where the failed request alone can be run again, RerunTx where the transaction it belonged to is what has to be run
// again.
func (c *Context) rerun(a Action) Action {
	if c.Phase == PhaseInside || c.Phase == PhaseCommit {
		return RerunTx
	}
	return a
}

// Classify says what err means for a request of which the caller knows c. It is pure and safe for concurrent use. A nil error gives the
// zero Verdict with Connection [Alive]. PgBouncer 1.15 sends an ERROR and closes the socket, whereupon some of pgconn's paths report only
// the closed socket: a caller that has kept what OnPgError saw hands in errors.Join(err, seen).
//
// The rule behind it: an error without a Routine field was made by a pooler (PgBouncer fills severity, code and message only, proto.c;
// Odyssey, PgCat and Supavisor no more than that), one with a Routine by PostgreSQL. A SQLSTATE alone proves nothing: PgBouncer's own is
// 08P01 for everything, and PL/pgSQL can raise any. A server's message may be translated, so for those the code, the routine and the
// statement's name decide, never the words.
func Classify(err error, c Context) Verdict {
	if err == nil {
		return Verdict{Connection: Alive}
	}
	v := Verdict{Name: c.Name}
	var connectErr *pgconn.ConnectError
	if errors.As(err, &connectErr) {
		c.Phase = PhaseConnect
	}
	c.Alive = c.Alive && c.Phase != PhaseConnect
	if c.Alive {
		v.Connection = Alive
	}
	var disorder *AnswerError
	if errors.As(err, &disorder) && !pgconn.SafeToRetry(err) {
		return c.outOfOrder(v, disorder)
	}
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) {
		return c.withoutAnswer(v, err)
	}
	v.PgError = pgErr
	if fatal(pgErr) {
		v.Connection = Dead
	}
	if c.CtxErr != nil && (isContextError(err) || pgErr.Code == "57014") {
		v.Reason, v.Executed = ReasonCancelled, c.afterError(v)
		return v
	}
	if pgErr.Routine == "" {
		v.PoolerMade = true
		return c.fromPooler(v)
	}
	return c.fromServer(v)
}

// outOfOrder judges an answer that cannot be. What else came with it proves nothing, an error of the server's included. That a name was bound is
// evidence where names are kept by connections: what is between answers for the server there.
func (c *Context) outOfOrder(v Verdict, e *AnswerError) Verdict {
	v.Reason, v.Connection = ReasonDisorder, Dead
	v.Evidence = c.Strategy == Named && c.Name != ""
	if e.Executes {
		return v
	}
	v.Executed = No
	if v.Action = c.rerun(RunElsewhere); v.Action == RerunTx {
		v.Action = Return // the connection, and with it the caller's own transaction, is gone
	}
	return v
}

// withoutAnswer judges an error that the server has no part in.
func (c *Context) withoutAnswer(v Verdict, err error) Verdict {
	safe := pgconn.SafeToRetry(err) || c.Phase == PhaseConnect
	if safe {
		v.Executed = No
	}
	switch {
	case c.CtxErr != nil && isContextError(err):
		v.Reason = ReasonCancelled
	case c.Phase == PhaseConnect:
		v.Reason, v.Action = ReasonNotSent, RunLater
	case safe:
		v.Reason = ReasonNotSent
		v.Action = c.rerun(RunElsewhere)
		if v.Action == RerunTx {
			v.Action = Return // a lost connection, not a lost statement: the caller's own transaction is gone
		}
	case c.Alive:
		v.Reason = ReasonNone // the caller's own: an argument that cannot be encoded, a value that cannot be scanned
	default:
		v.Reason = ReasonUnknown
	}
	return v
}

// afterError is the fate of a request that PostgreSQL answered with an error of level ERROR: rolled back with its transaction. Alone, a
// CALL may have committed before it failed. An ERROR is an answer; a FATAL or a lost connection is none.
func (c *Context) afterError(v Verdict) Executed {
	if v.Connection == Dead && (v.PgError == nil || fatal(v.PgError)) || c.Phase == PhaseAlone {
		return Maybe
	}
	return No
}

// refused completes a verdict on a request of which no part ran.
func (c *Context) refused(v Verdict, r Reason, a Action) Verdict {
	v.Reason, v.Executed, v.Action = r, No, a
	return v
}

// fromServer judges an error that PostgreSQL made.
func (c *Context) fromServer(v Verdict) Verdict {
	e := v.PgError
	switch e.Code {
	case "57P01", "57P02", "57P03", "53300": // admin_shutdown, crash_shutdown, cannot_connect_now, too_many_connections
		if !fatal(e) {
			break
		}
		v.Reason = ReasonServer
		if c.Phase == PhaseConnect {
			v.Executed, v.Action = No, RunLater
		}
		return v
	case "57P05": // idle_session_timeout: fires only while the backend waits for a command (postgres.c)
		if fatal(e) && (c.Phase == PhaseAlone || c.Phase == PhaseBegin) {
			return c.refused(v, ReasonNotSent, c.rerun(RunElsewhere))
		}
	case "25P03", "25P04": // idle_in_transaction_session_timeout, transaction_timeout
		if fatal(e) {
			v.Reason = ReasonTxLost
			if c.Phase == PhaseInside || c.Phase == PhaseBegin || e.Code == "25P03" {
				v.Executed = No
			}
			return v
		}
	case "25P02":
		if e.Where == "" {
			return c.refused(v, ReasonTxAborted, Return)
		}
	}
	if c.Phase == PhaseConnect {
		if class := e.Code[:min(2, len(e.Code))]; class == "28" || e.Code == "3D000" || e.Code == "42501" || class == "22" || class == "42" {
			return c.refused(v, ReasonConfig, Return)
		}
		return c.refused(v, ReasonServer, RunLater)
	}
	if !fatal(e) {
		if done, ok := c.fromParseOrBind(v); ok {
			return done
		}
	} else {
		v.Reason = ReasonUnknown
		return v
	}
	v.Executed = c.afterError(v)
	return v
}

// fromParseOrBind recognises the errors that PostgreSQL raises before a statement runs and that are about how it was prepared or encoded.
func (c *Context) fromParseOrBind(v Verdict) (Verdict, bool) {
	e := v.PgError
	if e.InternalQuery != "" {
		return v, false
	}
	if e.Where != "" && !fromBindParameter(e) {
		return v, false // raised inside a function: the caller's own, whatever its code says
	}
	switch e.Code {
	case "26000", "42P05":
		switch e.Routine {
		case "FetchPreparedStatement", "StorePreparedStatement":
			name, ours := c.lostName(e.Message)
			if !ours {
				return v, false
			}
			v.Name, v.Evidence = name, true
			if c.Strategy == Shared && e.Code == "26000" && name == c.Name {
				// A miss is the ordinary case of shared names. Only many are evidence, and only the caller can count them.
				v.Evidence = false
				return c.refused(v, ReasonPreparedLost, c.rerun(Reparse)), true
			}
			return c.refused(v, ReasonPreparedLost, c.rerun(RunUnprepared)), true
		case "exec_bind_message", "exec_describe_statement_message":
			// The unnamed statement went to another server than its Bind. Names are not to blame, so it is no evidence.
			return c.refused(v, ReasonPreparedLost, c.rerun(RunUnprepared)), true
		}
	case "0A000":
		if e.Routine != "RevalidateCachedQuery" || !c.named() {
			return v, false
		}
		if c.Strategy == Shared {
			return c.refused(v, ReasonStalePlan, c.rerun(Reparse)), true
		}
		// Without a name, and not by another one: behind a pooler that tracks statements any text that was parsed before the migration may be
		// stale too, such as the one that another client has moved on to.
		return c.refused(v, ReasonStalePlan, c.rerun(RunUnprepared)), true
	case "08P01":
		return c.fromBind(v)
	case "22P03":
		if c.Learnt {
			return c.refused(v, ReasonStaleShape, c.rerun(Relearn)), true
		}
	case "XX000":
		// "cache lookup failed for type 16390", never translated: a type that was dropped, and perhaps made anew under another oid.
		if n := numbers(e.Message); c.Learnt && len(n) == 1 && slices.Contains(c.ParamOIDs, uint32(n[0])) { // not negative
			return c.refused(v, ReasonStaleShape, c.rerun(Relearn)), true
		}
	case "42804", "42846", "42883", "42704", "42725":
		// Types that fitted when the statement was learnt. A position in the caller's own text is given by parse analysis only.
		if c.Learnt && e.Position > 0 {
			return c.refused(v, ReasonStaleShape, c.rerun(Relearn)), true
		}
	case "34000":
		if e.Routine == "exec_execute_message" || e.Routine == "exec_describe_portal_message" {
			return c.refused(v, ReasonSplitBatch, Return), true
		}
	default:
		// An argument that is no value of the type the statement was learnt with. It may be one of the type the column has now.
		if dataException(e) && c.Learnt && e.Where != "" {
			return c.refused(v, ReasonStaleShape, c.rerun(Relearn)), true
		}
	}
	return v, false
}

// fromBind judges PostgreSQL's own 08P01.
func (c *Context) fromBind(v Verdict) (Verdict, bool) {
	e := v.PgError
	counts := numbers(e.Message)
	switch {
	case e.Routine == "exec_bind_message" && len(counts) == 2 && c.Learnt && counts[0] == len(c.ParamOIDs):
		// We sent what our description asks for, so another statement stands where ours should.
		v.Evidence = c.named()
		return c.refused(v, ReasonStaleShape, c.rerun(RunUnprepared)), true
	case e.Routine == "PortalSetResultFormat" && len(counts) == 2 && c.Learnt && counts[0] == c.Columns:
		return c.refused(v, ReasonStaleShape, c.rerun(Relearn)), true
	case strings.HasPrefix(e.Routine, "pq_") && c.Learnt: // insufficient data left in message
		return c.refused(v, ReasonStaleShape, c.rerun(Relearn)), true
	}
	return v, false
}

// lostName finds the statement that a 26000 or 42P05 is about, and whether it is ours: by its own name, or, for a request that bound a
// name, by the name a pooler gave it. On a direct connection nobody gives names, and one that looks so is of the caller's own PREPARE.
func (c *Context) lostName(message string) (string, bool) {
	if c.Name != "" && strings.Contains(message, c.Name) {
		return c.Name, true
	}
	for word := range strings.FieldsFuncSeq(message, func(r rune) bool { return !isNameRune(r) }) {
		if c.named() && c.Topology.Mode != ModeDirect && renamedBy(word) != PoolerUnknown && !strings.Contains(c.Text, word) {
			return word, true
		}
	}
	return "", false
}

func isNameRune(r rune) bool {
	return r == '_' || r >= '0' && r <= '9' || r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r == '+' || r == '/' || r == '=' || r == '-'
}

// fromBindParameter reports whether the error's context is the one that PostgreSQL (15 and newer; 13 has none) gives to the conversion of
// a bound parameter, which happens before anything runs: "unnamed portal parameter $1", with " = '…'" behind it for a text
// (bind_param_error_callback in postgres.c). It may be translated, so the parameter's number decides, and that nothing is quoted before
// it: COPY and SPI quote what they are at.
func fromBindParameter(e *pgconn.PgError) bool {
	if !dataException(e) && e.Code != "08P01" && e.Code != "XX000" || e.Routine == "exec_stmt_raise" {
		return false
	}
	where, _, _ := strings.Cut(e.Where, " = ")
	before, after, ok := strings.Cut(where, "$")
	if !ok || strings.ContainsAny(where, "\"\n(") || isWordByte(before, len(before)-1) {
		return false
	}
	digits := 0
	for digits < len(after) && after[digits] >= '0' && after[digits] <= '9' {
		digits++
	}
	return digits > 0 && !isWordByte(after, digits)
}

// dataException reports whether the error is of class 22: text or bytes that are no value of the type.
func dataException(e *pgconn.PgError) bool { return strings.HasPrefix(e.Code, "22") }

// fatal reports whether the server closes the connection after this error. Severity is translated before PostgreSQL 9.6 only; poolers
// leave the untranslated field out.
func fatal(e *pgconn.PgError) bool {
	s := e.SeverityUnlocalized
	if s == "" {
		s = e.Severity
	}
	return s == "FATAL" || s == "PANIC"
}

func isContextError(err error) bool {
	return errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, os.ErrDeadlineExceeded)
}

// numbers returns the decimal numbers of a message that stand alone, in order: neither digits of a name nor of a hash.
func numbers(message string) []int {
	var out []int
	for i := 0; i < len(message); {
		start := i
		n := 0
		for i < len(message) && message[i] >= '0' && message[i] <= '9' && i-start < 10 {
			n = n*10 + int(message[i]-'0')
			i++
		}
		if i == start {
			i++
			continue
		}
		if !isWordByte(message, start-1) && !isWordByte(message, i) {
			out = append(out, n)
		}
		for isWordByte(message, i) {
			i++
		}
	}
	return out
}

func isWordByte(s string, i int) bool {
	return i >= 0 && i < len(s) && (s[i] == '_' || s[i] >= '0' && s[i] <= '9' || s[i]|0x20 >= 'a' && s[i]|0x20 <= 'z')
}
