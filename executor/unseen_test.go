package executor_test

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/internal/logrec"
	"github.com/bounceproof/bounceproof/prepare"
	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
	"github.com/bounceproof/bounceproof/testenv/place"
)

// takeAway throws all statements of the server connection away without the pooler noticing.
const takeAway = "do $$ begin execute 'deallocate all'; end $$"

// logged is an executor with what it has logged.
func logged(t testing.TB, pool *pgxpool.Pool, policy executor.PreparedStatements) (*executor.Executor, *logrec.Recorder) {
	t.Helper()
	said := &logrec.Recorder{}
	return newExecutor(t, pool, executor.Config{PreparedStatements: policy, Logger: said.Logger()}), said
}

// TestStatementsTakenAwayUnseenFailNobody is a tracking pooler whose neighbour throws the server's statements away inside a DO block: the pooler
// goes on believing that the server has them, also the one that an earlier look at the pooler has parsed.
func TestStatementsTakenAwayUnseenFailNobody(t *testing.T) {
	t.Parallel()
	for _, version := range []string{"1.24", "1.26"} {
		for _, policy := range []executor.PreparedStatements{executor.Auto, executor.Shared} {
			t.Run(fmt.Sprint(version, " ", policy), func(t *testing.T) {
				t.Parallel()
				st := place.New(place.TransactionTracked, version, "").Start(t, func(o *pgbouncer.Options) { o.PoolSize = 1 })
				neighbour := connect(t, st.URL)
				before, _ := logged(t, newPool(t, st.URL), policy)
				use := func(ex *executor.Executor) error {
					var n int
					if err := ex.QueryRow(t.Context(), "select $1::int", prepare.Stable, 7).Scan(&n); err != nil || n != 7 {
						return fmt.Errorf("%d, %w", n, err)
					}
					return nil
				}
				if err := use(before); err != nil {
					t.Fatal(err)
				}
				mustExec(t, neighbour, takeAway)
				ex, said := logged(t, newPool(t, st.URL), policy)
				for i := range 50 {
					if err := use(ex); err != nil {
						t.Fatalf("call %d: %v\n%s", i, err, said.All())
					}
					mustExec(t, neighbour, takeAway)
				}
				top, err := ex.Topology(t.Context())
				if err != nil || top.Tracking() != fallback.TrackingYes {
					t.Errorf("taken for %v, %v: %q", top, err, top.Evidence)
				}
				warnings := said.At(slog.LevelWarn)
				if len(warnings) != 1 || strings.Contains(said.All(), "set max_prepared_statements") || !strings.Contains(said.All(), "find the client") {
					t.Errorf("want one warning, about the neighbour, got\n%s", said.All())
				}
			})
		}
	}
}

// TestUnknownIsNotTakenForNoInStatementMode begins with what statement mode refuses.
func TestUnknownIsNotTakenForNoInStatementMode(t *testing.T) {
	t.Parallel()
	for _, version := range []string{"1.24", "1.26"} {
		for name, first := range map[string]func(ctx context.Context, ex *executor.Executor) error{
			"InTx": func(ctx context.Context, ex *executor.Executor) error {
				return ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
					_, err := tx.Exec(ctx, "select 1")
					return err
				})
			},
			"stable in InTx": func(ctx context.Context, ex *executor.Executor) error {
				return ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
					_, err := tx.Exec(ctx, "select $1::int", prepare.Stable, 1)
					return err
				})
			},
			"Begin": func(ctx context.Context, ex *executor.Executor) error {
				tx, err := ex.Begin(ctx)
				if err != nil {
					return err
				}
				defer func() { _ = tx.Rollback(ctx) }()
				_, err = tx.Exec(ctx, "select $1::int", 1)
				return err
			},
			"BeginQuery": func(ctx context.Context, ex *executor.Executor) error {
				tx, err := ex.BeginTx(ctx, pgx.TxOptions{BeginQuery: "begin read only"})
				if err == nil {
					_ = tx.Rollback(ctx)
				}
				return err
			},
			"Batch": func(ctx context.Context, ex *executor.Executor) error {
				var b pgx.Batch
				b.Queue("begin")
				b.Queue("select $1::int", prepare.Stable, 1)
				b.Queue("commit")
				return ex.SendBatch(ctx, &b).Close()
			},
		} {
			t.Run(version+" "+name, func(t *testing.T) {
				t.Parallel()
				st := place.New(place.StatementTracked, version, "").Start(t)
				ex, said := logged(t, newPool(t, st.URL), executor.Auto)
				if err := first(t.Context(), ex); err == nil && name != "Batch" {
					t.Fatal("statement mode let a transaction pass")
				}
				for range 3 {
					var n int
					if err := ex.QueryRow(t.Context(), "select $1::int", prepare.Stable, 3).Scan(&n); err != nil || n != 3 {
						t.Fatalf("%d, %v", n, err)
					}
				}
				top, err := ex.Topology(t.Context())
				if err != nil || top.Tracking() != fallback.TrackingYes || ex.Stats().Named == 0 {
					t.Errorf("%+v; %v, %v: %q", ex.Stats(), top, err, top.Evidence)
				}
				if strings.Contains(said.All(), "max_prepared_statements") {
					t.Errorf("advised what is set already:\n%s", said.All())
				}
			})
		}
	}
}

// TestSharedFailsNobodyWhenThePoolerBeginsToTrack turns tracking on under an executor that has found out that names are forwarded, with a neighbour
// that throws statements away unseen: what is parsed anew is missing all the same, and a third way has to be found.
func TestSharedFailsNobodyWhenThePoolerBeginsToTrack(t *testing.T) {
	t.Parallel()
	for _, version := range []string{"1.24", "1.26"} {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			st := place.New(place.TransactionRaw, version, "").Start(t, func(o *pgbouncer.Options) { o.PoolSize = 1 })
			ex, said := logged(t, newPool(t, st.URL, maxConns(2)), executor.Shared)
			neighbour := connect(t, st.URL)
			use := func(ex *executor.Executor, what string) {
				t.Helper()
				var n int
				if err := ex.QueryRow(t.Context(), "select $1::int", prepare.Stable, 9).Scan(&n); err != nil || n != 9 {
					t.Fatalf("%s: %d, %v\n%s", what, n, err, said.All())
				}
			}
			use(ex, "before")
			use(ex, "before")
			st.Bouncer.Set(t, "max_prepared_statements", "200")
			// Somebody has the pooler know the text, and the server lose it.
			other, _ := logged(t, newPool(t, st.URL), executor.Auto)
			use(other, "the other")
			mustExec(t, neighbour, takeAway)
			for range 20 {
				use(ex, "after")
				mustExec(t, neighbour, takeAway)
			}
			if top, err := ex.Topology(t.Context()); err != nil || !top.Tracks || ex.Stats().Shared == 0 {
				t.Errorf("%v, %v, %+v", top, err, ex.Stats())
			}
		})
	}
}
