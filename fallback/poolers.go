package fallback

import "strings"

// poolerTexts are the errors poolers make, by the beginning of their text. The first match counts. Texts with no entry are
// ReasonUnknown: "query timeout", "server conn crashed?", "database removed", "admin forced disconnect", "suspend_timeout" and whatever
// else there is tell nothing about what became of the request.
var poolerTexts = []struct {
	prefix string
	reason Reason
}{
	// PgBouncer ≥ 1.21, prepare.c; Odyssey, xplan.c; PgCat and Supavisor with other severities and codes. Order matters little, but
	// these must be found before any pooler's own variation of "…".
	{"prepared statement ", ReasonPoolerPrepared},

	{"query_wait_timeout", ReasonPoolerBusy},
	{"query_timeout", ReasonPoolerBusy}, // with the underscore: a queued client. "query timeout" is a running query.
	{"server login has been failing", ReasonPoolerBusy},
	{"pgbouncer cannot connect to server", ReasonPoolerBusy},
	{"no more connections allowed", ReasonPoolerBusy},
	{"client connections exceeded", ReasonPoolerBusy},
	{"client_login_timeout", ReasonPoolerBusy},
	{"server shutting down", ReasonPoolerBusy},
	{"pooler is shutting down", ReasonPoolerBusy},
	{"could not get connection from the pool", ReasonPoolerBusy}, // PgCat
	{"Max client connections reached", ReasonPoolerBusy},         // Supavisor
	{"max clients reached", ReasonPoolerBusy},                    // Supavisor, with a code in parentheses before it

	{"transaction blocks not allowed in statement pooling mode", ReasonStatementMode},

	{"unsupported startup parameter", ReasonConfig},
	{"unsupported options startup parameter", ReasonConfig},
	{"invalid server parameter", ReasonConfig},
	{"no such database", ReasonConfig},
	{"no such user", ReasonConfig},
	{"database does not allow connections", ReasonConfig}, // 1.15
	{"database \"", ReasonConfig},                         // database "x" is disabled
	{"login rejected", ReasonConfig},
	{"SASL authentication failed", ReasonConfig},
	{"password authentication failed", ReasonConfig},
	{"bouncer config error", ReasonConfig},
	{"PQexec disallowed", ReasonConfig},
	{"extended query protocol not supported by admin console", ReasonConfig},
	{"unsupported pkt type", ReasonConfig}, // the admin console of PgBouncer ≤ 1.16
	{"bad packet", ReasonConfig},           // what follows it

	{"idle transaction timeout", ReasonTxLost},
	{"transaction timeout", ReasonTxLost},
	{"client_idle_timeout", ReasonNotSent}, // janitor.c: only clients without a server connection
}

// What there is to say to people about a busy pooler, by the beginning of its text.
var busyTexts = []struct {
	prefix, advice string
}{
	{"query_wait_timeout", waitedInVain},
	{"query_timeout", waitedInVain},
	{"could not get connection from the pool", waitedInVain},
	{"server login has been failing", serverUnreachable},
	{"pgbouncer cannot connect to server", serverUnreachable},
	{"no more connections allowed", tooManyClients},
	{"client connections exceeded", tooManyClients},
	{"Max client connections reached", tooManyClients},
	{"max clients reached", tooManyClients},
	{"server shutting down", shuttingDown},
	{"pooler is shutting down", shuttingDown},
}

const (
	waitedInVain = "the request waited in the pooler's queue and got no server connection " +
		"(hold transactions for less long, or raise the pooler's pool size or its query_wait_timeout)"
	serverUnreachable = "the pooler answers and its server does not"
	tooManyClients    = "the pooler takes no more clients (lower the pool's MaxConns, or raise the pooler's max_client_conn)"
	shuttingDown      = "the pooler is shutting down"
	busyAdvice        = "the pooler had no server connection to give"
)

// Advice says for people what kept a pooler from serving a request, and what to do about it; "" for every verdict but those with
// [ReasonPoolerBusy].
func (v Verdict) Advice() string {
	if v.Reason != ReasonPoolerBusy || v.PgError == nil {
		return ""
	}
	message := withoutTag(v.PgError.Message)
	for _, t := range busyTexts {
		if strings.HasPrefix(message, t.prefix) {
			return t.advice
		}
	}
	return busyAdvice
}

// withoutTag leaves out what Supavisor from 2 on puts in front of a text: "(EMAXCONNSESSION) max clients reached …".
func withoutTag(message string) string {
	if strings.HasPrefix(message, "(") {
		if _, rest, ok := strings.Cut(message, ") "); ok {
			return rest
		}
	}
	return message
}

// fromPooler judges an error that a pooler made.
func (c *Context) fromPooler(v Verdict) Verdict {
	e := v.PgError
	message := withoutTag(e.Message)
	v.Reason = ReasonUnknown
	for _, t := range poolerTexts {
		if strings.HasPrefix(message, t.prefix) {
			v.Reason = t.reason
			break
		}
	}
	if v.Reason == ReasonUnknown && (e.Code == "26000" || e.Code == "42P05") {
		v.Reason = ReasonPoolerPrepared
	}
	if v.Reason == ReasonUnknown && (strings.HasPrefix(e.Code, "28") || e.Code == "3D000") {
		v.Reason = ReasonConfig // the server refused the pooler's login, which the waiting client is told (server.c, ≥ 1.24 with its code)
	}
	switch v.Reason {
	case ReasonPoolerPrepared:
		// In the message it may be any client's statement; it is ours if we bound a name.
		v.Evidence = c.named()
		return c.refused(v, v.Reason, c.rerun(RunUnprepared))
	case ReasonPoolerBusy:
		v = c.refused(v, v.Reason, RunLater)
		if c.Phase == PhaseInside || c.Phase == PhaseCommit {
			v.Action = Return
		}
	case ReasonStatementMode:
		v = c.refused(v, v.Reason, Return)
		v.Evidence = true
	case ReasonConfig:
		v = c.refused(v, v.Reason, Return)
	case ReasonTxLost:
		if c.Phase != PhaseCommit && c.Phase != PhaseAlone || strings.HasPrefix(message, "idle") {
			v.Executed = No
		}
	case ReasonNotSent:
		if c.Phase == PhaseInside || c.Phase == PhaseCommit {
			v.Reason = ReasonUnknown
			break
		}
		v = c.refused(v, v.Reason, c.rerun(RunElsewhere))
	default:
		switch {
		case c.Phase == PhaseConnect:
			v = c.refused(v, ReasonNotSent, RunLater)
		case v.Connection == Alive:
			// An error and a connection that goes on: no pooler's unknown end, but a server that does not fill Routine.
			v.Reason, v.PoolerMade, v.Executed = ReasonNone, false, c.afterError(v)
		}
	}
	// A pooler where the probe saw none: the address has come to mean something else, and rows must be described from now on.
	if c.Topology.Mode == ModeDirect && v.PoolerMade && v.Reason != ReasonUnknown && v.Reason != ReasonConfig {
		v.Evidence = true
	}
	return v
}
