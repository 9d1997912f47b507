package outbox

import (
	"context"
	"fmt"
)

// Handler is what a dispatcher calls: [HandlerFunc].
//
// A delivery may come more than once: the process may die, or lose its lease, after the handler returned and before that was
// recorded. A handler must therefore be idempotent; Delivery.Seq identifies the event.
type Handler interface {
	handler()
}

// HandlerFunc handles one event. Calls for one key are serial and in order; calls for different keys, and for events without a
// key, run side by side, at most DispatcherConfig.Concurrency of them. An error, or a panic, means that the event was not handled:
// it comes again.
//
// ctx is done when the lane was lost to another dispatcher, or when the time that Run grants at its end is over.
type HandlerFunc func(ctx context.Context, d Delivery) error

func (HandlerFunc) handler() {}

// call runs f and turns a panic into an error, so that one event cannot take the others down.
func (f HandlerFunc) call(ctx context.Context, d Delivery) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("outbox: handler: panic: %v", p)
		}
	}()
	return f(ctx, d)
}
