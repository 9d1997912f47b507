package outbox

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// BatchTxHandlerFunc is a [BatchTxHandler] of one function.
type BatchTxHandlerFunc func(ctx context.Context, tx pgx.Tx, ds []Delivery) error

// Handle implements [Handler]. It returns an error: there is no transaction.
func (f BatchTxHandlerFunc) Handle(context.Context, Delivery) error { return errNeedsTx }

// HandleBatchTx implements [BatchTxHandler].
func (f BatchTxHandlerFunc) HandleBatchTx(ctx context.Context, tx pgx.Tx, ds []Delivery) error {
	return f(ctx, tx, ds)
}

// batchTxKind hands over a page in one transaction, and one event at a time, each in its own, if that fails.
type batchTxKind struct{ h BatchTxHandler }

func (k batchTxKind) transactional() bool { return true }

func (k batchTxKind) work(j *job) {
	all := func(tx pgx.Tx, ds []Delivery) error {
		return guard(func() error {
			return j.r.d.through(j.ctx, ds, func(ctx context.Context) error { return k.h.HandleBatchTx(ctx, tx, ds) })
		})
	}
	if !j.suspect() && j.pageInTx(all) {
		return
	}
	j.stepByStep(inTx(func(tx pgx.Tx, it *item) error { return all(tx, []Delivery{it.Delivery}) }))
}
