package bench

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/prepare"
	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
)

type batcher interface {
	SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults
}

// batchArm sends a batch of ten selects by key, of two texts that take turns.
func batchArm(name string, q batcher, options ...any) arm {
	texts := []string{byKey, byKey + " and true"}
	return arm{name, func(ctx context.Context) error {
		var b pgx.Batch
		for i := range 10 {
			b.Queue(texts[i%2], append(append(make([]any, 0, 2), options...), int64(77+i))...)
		}
		br := q.SendBatch(ctx, &b)
		for range 10 {
			var id, balance int64
			var account string
			var at pgtype.Timestamptz
			if err := br.QueryRow().Scan(&id, &account, &balance, &at); err != nil {
				return err
			}
		}
		return br.Close()
	}}
}

// queueArm is a transaction that is only a queue of ten of them.
func queueArm(name string, ex *executor.Executor) arm {
	return arm{name, func(ctx context.Context) error {
		return ex.InTx(ctx, pgx.TxOptions{}, func(_ context.Context, tx executor.Tx) error {
			for i := range 10 {
				if err := tx.Queue(byKey, prepare.Stable, int64(77+i)); err != nil {
					return err
				}
			}
			return nil
		})
	}}
}

func benchmarkBatch(b *testing.B, url string) {
	bare, wrapped := pool(b, url, 1), pool(b, url, 1)
	ex := newExecutor(b, wrapped, executor.Config{})
	arms := []arm{batchArm("executor", ex, prepare.Stable), queueArm("queue", ex), batchArm("pgx", bare)}
	paired(b, 1, 1000, arms...)
	allocations(b, arms...)
}

func BenchmarkDirectBatch(b *testing.B) {
	_, db := server(b, "", false)
	benchmarkBatch(b, db.URL)
}

func BenchmarkTrackedBatch(b *testing.B) {
	s, db := server(b, "17", false)
	benchmarkBatch(b, pgbouncer.Start(b, s, pgbouncer.Options{Version: "1.24", PoolSize: 8}).URL(db.Name))
}
