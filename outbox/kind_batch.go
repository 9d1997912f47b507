package outbox

import (
	"context"
	"errors"
)

// BatchHandlerFunc is a [BatchHandler] of one function.
type BatchHandlerFunc func(ctx context.Context, ds []Delivery) error

// Handle implements [Handler]: a batch of one event.
func (f BatchHandlerFunc) Handle(ctx context.Context, d Delivery) error { return f(ctx, []Delivery{d}) }

// HandleBatch implements [BatchHandler].
func (f BatchHandlerFunc) HandleBatch(ctx context.Context, ds []Delivery) error { return f(ctx, ds) }

// batchKind hands over a page at once, and one event at a time if that fails.
type batchKind struct{ h BatchHandler }

func (k batchKind) transactional() bool { return false }

func (k batchKind) work(j *job) {
	all := func(ds []Delivery) error {
		return guard(func() error {
			return j.r.d.through(j.ctx, ds, func(ctx context.Context) error { return k.h.HandleBatch(ctx, ds) })
		})
	}
	one := func(it *item) error { return all([]Delivery{it.Delivery}) }
	if j.suspect() {
		j.stepByStep(singly(one))
		return
	}
	if !j.atOnce(all) {
		j.untilNoOutage(func() { j.oneByOne(one) })
	}
}

// atOnce calls the handler once for all events of the log; retries stay for later. It reports whether all is done.
func (j *job) atOnce(all func([]Delivery) error) bool {
	items := j.fresh()
	if len(items) == 0 {
		return false
	}
	if !j.slot() {
		return true
	}
	err := all(deliveries(items))
	j.free()
	if err != nil && j.ctx.Err() != nil {
		return true
	}
	if _, ok := errors.AsType[*discarded](err); err != nil && !ok {
		return false
	}
	for _, it := range items {
		j.note(it, err)
	}
	return len(items) == j.size()
}

// oneByOne calls the handler for one event at a time.
func (j *job) oneByOne(one func(*item) error) {
	for _, run := range j.runs {
		j.inOrder(run, one)
	}
}
