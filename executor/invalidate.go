package executor

import (
	"context"

	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/internal/statement"
)

// invalidate takes back what an error proved wrong: about the name on this connection, or about the text for everybody.
func (ex *Executor) invalidate(ctx context.Context, c *statement.Conn, a *attempt, v fallback.Verdict) {
	if a.strategy == fallback.Shared && a.parse && a.stage == stageSent {
		ex.shared.doubt(a.d.Name()) // its Close has been obeyed, and its Parse perhaps not
	}
	switch v.Reason { //nolint:exhaustive // the others prove nothing about a statement
	case fallback.ReasonPreparedLost, fallback.ReasonPoolerPrepared:
		c.Forget(a.d.Name())
		if a.strategy == fallback.Shared && !a.parse {
			ex.counters.misses.Add(1)
			ex.selector.CountShared(ctx, a.decision, true)
		}
	case fallback.ReasonStalePlan:
		a.forgetStale(c, a.decision.Pooled) // else Close and Parse cure it
	case fallback.ReasonStaleShape:
		a.forgetStale(c, false)
	case fallback.ReasonNone:
		// PostgreSQL 13 does not say of a value it cannot read that it is an argument's, so the statement may have run and is not run
		// again. If it was the description that is stale, the caller's next try learns a new one.
		if v.PgError != nil && mayBeStale(v.PgError.Code) {
			a.st.Forget(a.d)
		}
	}
}

// invalidateBeside takes back what is known of a statement that stood beside the failed one in a request, if that one was overtaken: a migration
// is seldom about one statement alone, and how often a request is sent does not grow with its statements. What has been handed out of a
// batch cannot be taken back either, so a name that is left here would be found stale too late the next time.
func (ex *Executor) invalidateBeside(c *statement.Conn, a, failed *attempt) {
	if a == failed || a.d == nil {
		return
	}
	switch failed.verdict.Reason { //nolint:exhaustive // the others are about one statement
	case fallback.ReasonStalePlan:
		a.forgetStale(c, a.strategy == fallback.Named && a.decision.Pooled)
	case fallback.ReasonStaleShape:
		a.forgetStale(c, false)
	}
}

// forgetStale forgets the name on this connection and the description everywhere, so that the text is learnt again; under another name if
// renamed is set, because a pooler may keep what was parsed under this one.
func (a *attempt) forgetStale(c *statement.Conn, renamed bool) {
	c.Forget(a.d.Name())
	if renamed {
		a.st.NextGeneration(a.d)
	} else {
		a.st.Forget(a.d)
	}
}

// mayBeStale reports whether an error that proves nothing may come from a description that a migration has overtaken: a value that is none of
// the type it was learnt with, or a result type that has no binary form.
func mayBeStale(code string) bool {
	switch code {
	case "22P02", "22P03", "22003", "22007", "22008", "22023", "42883":
		return true
	}
	return false
}

// succeeded counts an execution and remembers what it proves.
func (ex *Executor) succeeded(ctx context.Context, a *attempt) {
	switch a.strategy {
	case fallback.Undecided, fallback.Unprepared:
		ex.counters.unprepared.Add(1)
	case fallback.Named:
		ex.counters.named.Add(1)
	case fallback.Shared:
		ex.counters.shared.Add(1)
		ex.shared.used(a.d.Name())
		if !a.parse {
			ex.selector.CountShared(ctx, a.decision, false)
		}
	}
}

// countMessages takes over what the connection counted.
func (ex *Executor) countMessages(c *statement.Conn) {
	if c.Parses > 0 {
		ex.counters.parses.Add(c.Parses)
		c.Parses = 0
	}
	if c.Learns > 0 {
		ex.counters.learns.Add(c.Learns)
		c.Learns = 0
	}
}
