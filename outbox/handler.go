package outbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// Handler handles events one at a time. It may implement one of the optional interfaces as well; then that one's method is called instead,
// and which one that is, if there are several, is decided in this order: [BatchTxHandler], [TxHandler], [BatchHandler], Handler. What wraps
// a handler hides its optional interfaces; a [Middleware] does not.
//
// Calls for one key are serial and in order; calls for different keys, and for events without a key, run side by side, at most
// DispatcherConfig.Concurrency of them. So a handler must be safe for concurrent use.
//
// A Handler and a [BatchHandler] may get an event more than once: the process may die, or lose its lease, after the handler returned and
// before that was recorded. They must be idempotent; Delivery.Seq identifies the event. A [TxHandler] and a [BatchTxHandler] get a
// transaction that also records the delivery, so what they do in it happens once.
//
// An error, a panic, or a call of runtime.Goexit means that the event was not handled: it comes again after a backoff, until
// DispatcherConfig.MaxAttempts. [Discard] and [RetryAfter] say otherwise. ctx is done when the lane was lost to another dispatcher, or when
// the time that Run grants at its end is over; an attempt that ends with an error then does not count.
type Handler interface {
	Handle(ctx context.Context, d Delivery) error
}

// BatchHandler handles a page of a lane's events, in order of their numbers; pages of different lanes run side by side. If it fails, the
// page's events are handed to it again, one at a time, and only those that fail alone count an attempt. Handle is not called.
type BatchHandler interface {
	Handler
	HandleBatch(ctx context.Context, ds []Delivery) error
}

// TxHandler handles one event in a transaction that commits together with the record of the delivery. Events of a lane are handled one
// after another, lanes side by side; each lane at work uses a connection of the pool. The transaction is an executor.Tx, READ COMMITTED;
// the handler must not end it, nor let it idle for longer than DispatcherConfig.LeaseDuration and two seconds (the server ends it then, so that
// the lanes of a host that vanished go on; it may set idle_in_transaction_session_timeout for itself, with SET LOCAL): an attempt that did counts as failed, with [ErrTransactionEnded]. Handle is not called.
type TxHandler interface {
	Handler
	HandleTx(ctx context.Context, tx pgx.Tx, d Delivery) error
}

// BatchTxHandler handles a page of a lane's events in one transaction, as [TxHandler] does one, and is called again one event at a time,
// like [BatchHandler], if it fails. Handle is not called.
type BatchTxHandler interface {
	Handler
	HandleBatchTx(ctx context.Context, tx pgx.Tx, ds []Delivery) error
}

// errNeedsTx is what Handle of the adapters for functions with a transaction returns. No dispatcher calls it.
var errNeedsTx = errors.New("outbox: handler: it can be called only with a transaction")

// kind is one way in which the events of a job reach the handler. Each has a file of its own, named kind_…, and one line in kindOf.
type kind interface {
	// work calls the handler for the job's events. It returns when all calls have.
	work(j *job)
	// transactional reports whether it needs transactions, which a pooler in statement mode has none of.
	transactional() bool
}

// kindOf chooses the most specific kind that the handler implements.
func kindOf(h Handler) kind {
	switch h := h.(type) {
	case BatchTxHandler:
		return batchTxKind{h}
	case TxHandler:
		return txKind{h}
	case BatchHandler:
		return batchKind{h}
	default:
		return singleKind{h}
	}
}

// Middleware is called around every call of a dispatcher's handler, of whatever kind: to log, trace, measure, recover or refuse. ds are the
// events of the call, a single one except for [BatchHandler] and [BatchTxHandler]; they must not be changed. next calls the next
// middleware and in the end the handler, which gets the context that is passed to it; it is to be called at most once, and before the
// middleware returns. What the middleware returns counts as the handler's error: nil without a call of next means handled. A panic of the
// handler passes through. For handlers with a transaction it runs inside the transaction, before the commit. Like a handler it must be safe
// for concurrent use.
type Middleware func(ctx context.Context, ds []Delivery, next func(ctx context.Context) error) error

// through calls handle through the middleware.
func (d *Dispatcher) through(ctx context.Context, ds []Delivery, handle func(ctx context.Context) error) error {
	return d.throughFrom(0, ctx, ds, handle)
}

//nolint:revive // the position stands in front of what through takes
func (d *Dispatcher) throughFrom(i int, ctx context.Context, ds []Delivery, handle func(ctx context.Context) error) error {
	if i == len(d.cfg.Middleware) {
		return handle(ctx)
	}
	return d.cfg.Middleware[i](ctx, ds, func(ctx context.Context) error { return d.throughFrom(i+1, ctx, ds, handle) })
}

// errGoexit stands for a handler that ended its goroutine, for instance by FailNow of a test.
var errGoexit = errors.New("outbox: handler: it called runtime.Goexit")

// recovered runs f and turns a panic into an error, so that one event cannot take the others down.
func recovered(f func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("outbox: handler: panic: %v", p)
		}
	}()
	return f()
}

// guard is recovered for callers whose goroutine must go on: f runs on one of its own, which it may end.
func guard(f func() error) error {
	err := errGoexit
	done := make(chan struct{})
	go func() {
		defer close(done)
		err = recovered(f)
	}()
	<-done
	return err
}

// discarded and postponed are what a handler's error may say beyond "again".
type discarded struct{ err error }

func (e *discarded) Error() string { return "discarded: " + e.err.Error() }
func (e *discarded) Unwrap() error { return e.err }

// Discard marks a handler's error as final and the event as not worth keeping: it counts as handled, and events behind it go
// on. A nil err is allowed.
func Discard(err error) error {
	if err == nil {
		err = errors.New("discarded")
	}
	return &discarded{err}
}

type postponed struct {
	after time.Duration
	err   error
}

func (e *postponed) Error() string {
	return fmt.Sprintf("retry after %v: %v", e.after, e.err)
}
func (e *postponed) Unwrap() error { return e.err }

// RetryAfter marks a handler's error so that the next attempt comes after d rather than after the usual backoff. The attempt
// counts all the same. A nil err is allowed.
func RetryAfter(d time.Duration, err error) error {
	if err == nil {
		err = errors.New("retry asked for")
	}
	return &postponed{max(d, 0), err}
}
