package executor_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/prepare"
	"github.com/bounceproof/bounceproof/testenv/place"
)

// parsesOf runs f n times and returns how many statements were parsed for it.
func parsesOf(t *testing.T, ex *executor.Executor, n int, f func() error) int64 {
	t.Helper()
	if err := f(); err != nil {
		t.Fatal(err)
	}
	before := ex.Stats().Parses
	for range n {
		if err := f(); err != nil {
			t.Fatal(err)
		}
	}
	return ex.Stats().Parses - before
}

func TestSharedTransactionsParseOnceAServer(t *testing.T) {
	t.Parallel()
	r := place.New(place.TransactionRaw, "1.18", "15").Start(t, fewServers)
	freshTable(t, r.DB.URL)
	ex := newExecutor(t, newPool(t, r.URL), executor.Config{PreparedStatements: executor.Shared})
	const n, servers, texts = 50, 3, 2
	got := parsesOf(t, ex, n, func() error {
		return ex.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
			tx.Queue("update t set b = b + 1 where id = $1", prepare.Stable, 1)
			_, err := tx.Exec(ctx, "update t set a = a + 1 where id = $1", prepare.Stable, 1)
			return err
		})
	})
	if got > servers*texts {
		t.Errorf("%d transactions parsed %d statements, want at most %d", n, got, servers*texts)
	}
}

func TestBatchesBehindATrackingPoolerParseOnceAConnection(t *testing.T) {
	t.Parallel()
	r := place.New(place.TransactionTracked, "1.24", "17").Start(t, fewServers)
	freshTable(t, r.DB.URL)
	ex := newExecutor(t, newPool(t, r.URL, maxConns(1)), executor.Config{})
	for name, batch := range map[string]func(*pgx.Batch){
		"plain": func(b *pgx.Batch) {},
		"with transaction control": func(b *pgx.Batch) {
			b.Queue("begin isolation level read committed")
		},
	} {
		t.Run(name, func(t *testing.T) {
			const n, texts = 50, 2
			got := parsesOf(t, ex, n, func() error {
				var b pgx.Batch
				batch(&b)
				before := b.Len()
				b.Queue("update t set a = a + 1 where id = $1", prepare.Stable, 1)
				b.Queue("select a from t where id = $1", prepare.Stable, 1)
				if before > 0 {
					b.Queue("commit")
				}
				return ex.SendBatch(t.Context(), &b).Close()
			})
			// Transaction control itself is parsed unnamed, and not counted: it is no statement of the caller's.
			if got > texts {
				t.Errorf("%d batches parsed %d statements, want at most %d", n, got, texts)
			}
		})
	}
}
