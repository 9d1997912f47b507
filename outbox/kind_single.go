package outbox

import (
	"context"
	"sync"
	"sync/atomic"
)

// HandlerFunc is a [Handler] of one function.
type HandlerFunc func(ctx context.Context, d Delivery) error

// Handle implements [Handler].
func (f HandlerFunc) Handle(ctx context.Context, d Delivery) error { return f(ctx, d) }

// singleKind hands over events one at a time, keys side by side.
type singleKind struct{ h Handler }

func (k singleKind) transactional() bool { return false }

func (k singleKind) work(j *job) {
	one := func(it *item) error { return k.call(j, it) }
	if j.suspect() {
		j.stepByStep(singly(func(it *item) error { return guard(func() error { return one(it) }) }))
		return
	}
	j.untilNoOutage(func() { j.sideBySide(one) })
}

func (k singleKind) call(j *job, it *item) error {
	if len(j.r.d.cfg.Middleware) == 0 { // spares an allocation for each event
		return k.h.Handle(j.ctx, it.Delivery)
	}
	return j.r.d.through(j.ctx, []Delivery{it.Delivery}, func(ctx context.Context) error { return k.h.Handle(ctx, it.Delivery) })
}

// sideBySide calls the handler for runs concurrently, each in order up to its first failure. The handler runs on the goroutines that take
// the runs, because one for each event would cost more than the rest of its way through here.
func (j *job) sideBySide(one func(*item) error) {
	var next atomic.Int64
	var wg sync.WaitGroup
	var take func()
	take = func() {
		var with *item // the event that is with the handler
		defer func() {
			if with != nil { // the handler has called runtime.Goexit, so another goroutine takes the place of this one
				j.free()
				j.note(with, errGoexit)
				wg.Go(take)
			}
		}()
		call := func(it *item) error {
			with = it
			err := recovered(func() error { return one(it) })
			with = nil
			return err
		}
		for {
			i := int(next.Add(1)) - 1
			if i >= len(j.runs) {
				return
			}
			j.inOrder(j.runs[i], call)
		}
	}
	for range min(len(j.runs), cap(j.r.slots)) {
		wg.Go(take)
	}
	wg.Wait()
}
