package executor

import (
	"time"

	"github.com/bounceproof/bounceproof/fallback"
)

// Trace is a set of functions that an executor calls at its own events, in the manner of httptrace.ClientTrace: any may be nil, and
// fields may be added. They are called on the goroutine that caused the event, must be fast, and must be safe for concurrent use. None
// gets SQL or arguments. pgx's own tracers on the pool keep working beside it.
type Trace struct {
	// Probed is called after each look at the pooler.
	Probed func(top fallback.Topology, took time.Duration, err error)
	// Changed is called when the executor goes from one way of sending to another.
	Changed func(change fallback.Change)
	// Retried is called when a statement is about to be run a second time, unseen by the caller.
	Retried func(reason fallback.Reason, name string)
}

func (t *Trace) probed(top fallback.Topology, took time.Duration, err error) {
	if t.Probed != nil {
		t.Probed(top, took, err)
	}
}

func (t *Trace) changed(change fallback.Change) {
	if t.Changed != nil {
		t.Changed(change)
	}
}

func (t *Trace) retried(reason fallback.Reason, name string) {
	if t.Retried != nil {
		t.Retried(reason, name)
	}
}
