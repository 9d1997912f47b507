package executor_test

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/prepare"
)

// several are ways to send n different statements in one request.
var several = map[string]func(ctx context.Context, ex *executor.Executor, n int) error{
	"batch": func(ctx context.Context, ex *executor.Executor, n int) error {
		var b pgx.Batch
		for i := range n {
			b.Queue(fmt.Sprintf("insert into t%d values ($1)", i), prepare.Stable, i)
		}
		return ex.SendBatch(ctx, &b).Close()
	},
	"queue": func(ctx context.Context, ex *executor.Executor, n int) error {
		return ex.InTx(ctx, pgx.TxOptions{}, func(_ context.Context, tx executor.Tx) error { return queueSeveral(tx, n) })
	},
	"queue with BEGIN": func(ctx context.Context, ex *executor.Executor, n int) error {
		return ex.InTx(ctx, pgx.TxOptions{AccessMode: pgx.ReadWrite}, func(_ context.Context, tx executor.Tx) error { return queueSeveral(tx, n) })
	},
}

func queueSeveral(tx executor.Tx, n int) error {
	for i := range n {
		if err := tx.Queue(fmt.Sprintf("insert into t%d values ($1)", i), prepare.Stable, i); err != nil {
			return err
		}
	}
	return nil
}

// Several statements that are new are learnt in one round trip, and so are those whose descriptions have become old.
func TestWireSeveralStatementsAreLearntTogether(t *testing.T) {
	t.Parallel()
	for _, sc := range scenes {
		for name, send := range several {
			synctest.Test(t, func(t *testing.T) {
				o := sc.o
				o.Servers = 1
				s, end := newScripted(t, o, executor.Config{PreparedStatements: sc.policy, ReprobeAfter: time.Hour}, maxConns(1), func(cfg *pgxpool.Config) {
					cfg.ShouldPing = func(context.Context, pgxpool.ShouldPingParams) bool { return false }
				})
				defer end()
				if err := s.pool.Ping(t.Context()); err != nil {
					t.Fatal(err)
				}
				const n = 30
				for i, want := range []int{2, 1, 1, 2, 1} {
					if i == 3 {
						time.Sleep(6 * time.Minute)
					}
					s.b.Reset()
					if err := send(t.Context(), s.ex, n); err != nil {
						t.Fatal(sc.name, err)
					}
					if got := s.b.RoundTrips(); got != want || s.b.Writes() != want {
						t.Errorf("%s, %s %d: %d round trips, %d writes, want %d", sc.name, name, i+1, got, s.b.Writes(), want)
					}
					for k := range n {
						if got := s.b.Committed(fmt.Sprintf("insert into t%d values ($1)", k)); got != 1 {
							t.Errorf("%s, %s %d: statement %d committed %d times", sc.name, name, i+1, k, got)
						}
					}
				}
				if got := s.ex.Stats().Learns; got != 2*n {
					t.Errorf("%s, %s: %d learnt", sc.name, name, got)
				}
			})
		}
	}
}
