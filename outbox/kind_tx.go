package outbox

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// TxHandlerFunc is a [TxHandler] of one function.
type TxHandlerFunc func(ctx context.Context, tx pgx.Tx, d Delivery) error

// Handle implements [Handler]. It returns an error: there is no transaction.
func (f TxHandlerFunc) Handle(context.Context, Delivery) error { return errNeedsTx }

// HandleTx implements [TxHandler].
func (f TxHandlerFunc) HandleTx(ctx context.Context, tx pgx.Tx, d Delivery) error {
	return f(ctx, tx, d)
}

// txKind hands over one event at a time, each in a transaction of its own.
type txKind struct{ h TxHandler }

func (k txKind) transactional() bool { return true }

func (k txKind) work(j *job) {
	j.stepByStep(inTx(func(tx pgx.Tx, it *item) error {
		return guard(func() error {
			return j.r.d.through(j.ctx, []Delivery{it.Delivery}, func(ctx context.Context) error {
				return k.h.HandleTx(ctx, tx, it.Delivery)
			})
		})
	}))
}
