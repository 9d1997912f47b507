package outbox

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// Handler is what a dispatcher calls: [HandlerFunc], [BatchHandlerFunc], [TxHandlerFunc] or [BatchTxHandlerFunc].
//
// The first two may get an event more than once: the process may die, or lose its lease, after the handler returned and before
// that was recorded. They must be idempotent; Delivery.Seq identifies the event. The last two get a transaction that also records
// the delivery, so what they do in it happens once.
//
// An error, or a panic, means that the event was not handled: it comes again after a backoff, until DispatcherConfig.MaxAttempts.
// [Discard] and [RetryAfter] say otherwise. ctx is done when the lane was lost to another dispatcher, or when the time that Run grants
// at its end is over; an attempt that ends with an error then does not count.
type Handler interface {
	handler()
}

// HandlerFunc handles one event. Calls for one key are serial and in order; calls for different keys, and for events without a
// key, run side by side, at most DispatcherConfig.Concurrency of them.
type HandlerFunc func(ctx context.Context, d Delivery) error

// BatchHandlerFunc handles a page of a lane's events, in order of their numbers; pages of different lanes run side by side. If it fails,
// the page's events are handed to it again, one at a time, and only those that fail alone count an attempt.
type BatchHandlerFunc func(ctx context.Context, ds []Delivery) error

// TxHandlerFunc handles one event in a transaction that commits together with the record of the delivery. Events of a lane
// are handled one after another, lanes side by side; each lane at work uses a connection of the pool. The transaction is an
// executor.Tx, READ COMMITTED; the handler must not end it.
type TxHandlerFunc func(ctx context.Context, tx pgx.Tx, d Delivery) error

// BatchTxHandlerFunc handles a page of a lane's events in one transaction, as [TxHandlerFunc] does one, and is called again one event at
// a time like [BatchHandlerFunc] if it fails.
type BatchTxHandlerFunc func(ctx context.Context, tx pgx.Tx, ds []Delivery) error

func (HandlerFunc) handler()        {}
func (BatchHandlerFunc) handler()   {}
func (TxHandlerFunc) handler()      {}
func (BatchTxHandlerFunc) handler() {}

// guard runs f and turns a panic into an error, so that one event cannot take the others down.
func guard(f func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("outbox: handler: panic: %v", p)
		}
	}()
	return f()
}
