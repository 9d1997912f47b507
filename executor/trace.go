package executor

import (
	"time"

	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/internal/selector"
)

// Trace is a set of functions that an executor calls at its own events, in the manner of httptrace.ClientTrace: any may be nil, and
// fields may be added. They are called on the goroutine that caused the event, must be fast, and must be safe for concurrent use. None
// gets SQL or arguments. pgx's own tracers on the pool keep working beside it.
type Trace struct {
	// Probed is called after each look at the pooler.
	Probed func(top fallback.Topology, took time.Duration, err error)
	// Changed is called when the executor goes from one way of sending to another, the first decision included: its From is
	// fallback.Undecided.
	Changed func(change Change)
	// Retried is called when a statement, a batch or the function of InTx is about to be run again, unseen by the caller. name is the lost
	// statement's, "" if it had none.
	Retried func(reason fallback.Reason, name string)
}

func (t *Trace) probed(top fallback.Topology, took time.Duration, err error) {
	if t.Probed != nil {
		t.Probed(top, took, err)
	}
}

// Change is an executor's move from one way of sending stable statements to another. It holds no text of an error, for a server's message or
// detail can quote values.
type Change struct {
	// From and To are the strategies. They differ.
	From, To fallback.Strategy
	// Topology is what the new strategy is for.
	Topology fallback.Topology
	// Reason is the evidence that caused the change; fallback.ReasonNone when a probe did.
	Reason fallback.Reason
	// SQLState is the code of the error that was the evidence; "" if there was none.
	SQLState string
	// Statement is the name of the statement that was lost, or that another one stood in place of; "" if there was none.
	Statement string
	// Number counts an executor's decisions, of which the undecided beginning is 1: callbacks of several changes may arrive out of order.
	Number int64
}

func (t *Trace) changed(c selector.Change) {
	if t.Changed == nil {
		return
	}
	change := Change{
		From: c.From, To: c.To, Topology: c.Topology, Reason: c.Verdict.Reason, Number: c.Number,
	}
	if isLost(c.Verdict) || c.Verdict.Reason == fallback.ReasonStaleShape {
		change.Statement = c.Verdict.Name // and not that of a statement which was only there when a pooler answered
	}
	if c.Verdict.PgError != nil {
		change.SQLState = c.Verdict.PgError.Code
	}
	t.Changed(change)
}

func (t *Trace) retried(reason fallback.Reason, name string) {
	if t.Retried != nil {
		t.Retried(reason, name)
	}
}
