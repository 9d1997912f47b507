package executor_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/internal/pgscript"
	"github.com/bounceproof/bounceproof/prepare"
	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
	"github.com/bounceproof/bounceproof/testenv/place"
)

// TestAFailedTransactionTakesNoNameAway has one process use a statement in a transaction that has failed, in each of the ways there are, and
// another one that goes on using it.
func TestAFailedTransactionTakesNoNameAway(t *testing.T) {
	t.Parallel()
	const shared = "select $1::int + 100"
	ways := map[string]func(ctx context.Context, tx executor.Tx) error{
		"Exec": func(ctx context.Context, tx executor.Tx) error {
			_, err := tx.Exec(ctx, shared, prepare.Stable, 1)
			return err
		},
		"Query": func(ctx context.Context, tx executor.Tx) error {
			var n int
			return tx.QueryRow(ctx, shared, prepare.Stable, 1).Scan(&n)
		},
		"SendBatch": func(ctx context.Context, tx executor.Tx) error {
			var b pgx.Batch
			b.Queue(shared, prepare.Stable, 1)
			b.Queue(shared, prepare.Stable, 2)
			return tx.SendBatch(ctx, &b).Close()
		},
		"Queue": func(ctx context.Context, tx executor.Tx) error {
			tx.Queue(shared, prepare.Stable, 1)
			return tx.Commit(ctx)
		},
		"savepoint": func(ctx context.Context, tx executor.Tx) error {
			nested, err := tx.Begin(ctx)
			if err != nil {
				return err
			}
			_, err = nested.Exec(ctx, shared, prepare.Stable, 1)
			return err
		},
	}
	for _, version := range []string{"1.15", "1.18", "1.26"} {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			st := place.New(place.TransactionRaw, version, "").Start(t, func(o *pgbouncer.Options) { o.PoolSize = 1 })
			one := newExecutor(t, newPool(t, st.URL), executor.Config{PreparedStatements: executor.Shared})
			// inside uses the statement as the second one of a transaction that nobody can run again.
			inside := func() error {
				tx, err := one.Begin(t.Context())
				if err != nil {
					return err
				}
				defer func() { _ = tx.Rollback(context.Background()) }()
				if _, err := tx.Exec(t.Context(), "select $1::int", prepare.Stable, 1); err != nil {
					return err
				}
				var n int
				if err := tx.QueryRow(t.Context(), shared, prepare.Stable, 1).Scan(&n); err != nil || n != 101 {
					return fmt.Errorf("got %d, %w", n, err)
				}
				return tx.Commit(t.Context())
			}
			for name, way := range ways {
				for range 2 { // the second time the name is believed to be there
					if err := inside(); err != nil {
						t.Fatal(err)
					}
				}
				two := newExecutor(t, newPool(t, st.URL), executor.Config{PreparedStatements: executor.Shared})
				if _, err := two.Exec(t.Context(), shared, prepare.Stable, 1); err != nil { // it has learnt the text, and not where it is
					t.Fatal(err)
				}
				tx, err := two.Begin(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				if _, err := tx.Exec(t.Context(), "select $1::int", prepare.Stable, 1); err != nil {
					t.Fatal(err)
				}
				if _, err := tx.Exec(t.Context(), "select 1 / $1::int", 0); err == nil {
					t.Fatal("nothing failed")
				}
				err = way(t.Context(), tx.(executor.Tx))
				var pgErr *pgconn.PgError
				if !errors.As(err, &pgErr) || pgErr.Code != "25P02" {
					if name != "Queue" || !errors.Is(err, pgx.ErrTxCommitRollback) {
						t.Errorf("%s: want 25P02, got %v", name, err)
					}
				}
				_ = tx.Rollback(t.Context())
				if err := inside(); err != nil {
					t.Errorf("%s in a failed transaction took the name away: %v", name, err)
				}
			}
		})
	}
}

// TestANameThatParsingDoesNotBringBackIsDoneWithout is a server that misses the name once more right after it was parsed.
func TestANameThatParsingDoesNotBringBackIsDoneWithout(t *testing.T) {
	t.Parallel()
	const sel = "select $1"
	missing := pgscript.ServerError("26000", fmt.Sprintf("prepared statement %q does not exist", prepare.Name(sel, []uint32{23}, "")), "FetchPreparedStatement")
	for name, do := range map[string]func(ctx context.Context, ex *executor.Executor) (int, error){
		"alone": func(ctx context.Context, ex *executor.Executor) (n int, err error) {
			return n, ex.QueryRow(ctx, sel, prepare.Stable, 5).Scan(&n)
		},
		"first of a transaction": func(ctx context.Context, ex *executor.Executor) (n int, err error) {
			tx, err := ex.Begin(ctx)
			if err != nil {
				return 0, err
			}
			defer func() { _ = tx.Rollback(ctx) }()
			if err := tx.QueryRow(ctx, sel, prepare.Stable, 5).Scan(&n); err != nil {
				return 0, err
			}
			return n, tx.Commit(ctx)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, _ := newScripted(t, pgscript.Options{Kind: pgscript.Raw, Servers: 1}, executor.Config{PreparedStatements: executor.Shared})
			left := 0 // failures
			s.b.Define(sel, pgscript.Statement{
				Params: []uint32{23}, Columns: []pgscript.Column{{Name: "n", OID: 23}}, Tag: "SELECT 1",
				Rows: func(args []string) [][]string { return [][]string{{args[0]}} },
				Fail: func(at pgscript.Step) *pgproto3.ErrorResponse {
					if at != pgscript.Bind || left == 0 {
						return nil
					}
					left--
					return missing
				},
			})
			if n, err := do(t.Context(), s.ex); err != nil || n != 5 {
				t.Fatalf("got %d, %v", n, err)
			}
			left = 2
			if n, err := do(t.Context(), s.ex); err != nil || n != 5 {
				t.Fatalf("got %d, %v", n, err)
			}
			if stats := s.ex.Stats(); stats.Unprepared != 1 {
				t.Errorf("want one run without a name, got %+v", stats)
			}
		})
	}
}

// TestStatementCapacityBoundsTheNamesOnServers uses forty times as many statements as may be kept, by every way to send them.
func TestStatementCapacityBoundsTheNamesOnServers(t *testing.T) {
	t.Parallel()
	const texts, capacity = 800, 20
	ways := map[string]func(ctx context.Context, ex *executor.Executor, sql []string) error{
		"alone": func(ctx context.Context, ex *executor.Executor, sql []string) error {
			for _, s := range sql {
				if _, err := ex.Exec(ctx, s, prepare.Stable, 1); err != nil {
					return err
				}
			}
			return nil
		},
		"in transactions": func(ctx context.Context, ex *executor.Executor, sql []string) error {
			tx, err := ex.Begin(ctx)
			if err != nil {
				return err
			}
			defer func() { _ = tx.Rollback(ctx) }()
			for _, s := range sql {
				if _, err := tx.Exec(ctx, s, prepare.Stable, 1); err != nil {
					return err
				}
			}
			return tx.Commit(ctx)
		},
		"batches": func(ctx context.Context, ex *executor.Executor, sql []string) error {
			var b pgx.Batch
			for _, s := range sql {
				b.Queue(s, prepare.Stable, 1)
			}
			return ex.SendBatch(ctx, &b).Close()
		},
		"queues": func(ctx context.Context, ex *executor.Executor, sql []string) error {
			return ex.InTx(ctx, pgx.TxOptions{}, func(_ context.Context, tx executor.Tx) error {
				for _, s := range sql {
					if err := tx.Queue(s, prepare.Stable, 1); err != nil {
						return err
					}
				}
				return nil
			})
		},
	}
	for name, way := range ways {
		for _, servers := range []int{1, 3} {
			t.Run(fmt.Sprint(name, " ", servers), func(t *testing.T) {
				t.Parallel()
				st := place.New(place.TransactionRaw, "1.18", "").Start(t, func(o *pgbouncer.Options) { o.PoolSize = servers })
				openServers(t, st, servers)
				ex := newExecutor(t, newPool(t, st.URL, maxConns(1)), executor.Config{PreparedStatements: executor.Shared, StatementCapacity: capacity})
				var sql []string
				for i := range texts {
					if sql = append(sql, fmt.Sprintf("select $1::int + %d", i)); len(sql) == 8 {
						if err := way(t.Context(), ex, sql); err != nil {
							t.Fatal(err)
						}
						sql = sql[:0]
					}
				}
				most := 0
				for _, n := range st.OnServers(t, servers, "(select count(*) from pg_prepared_statements where name like 'bp%')") {
					var count int
					if _, err := fmt.Sscan(n, &count); err != nil {
						t.Fatal(err)
					}
					most = max(most, count)
				}
				stats := ex.Stats()
				t.Logf("at most %d names on a server connection; %+v", most, stats)
				if limit := capacity + 64*servers; most > limit || stats.Shared == 0 {
					t.Errorf("%d names on a server connection, want at most %d; %+v", most, limit, stats)
				}
			})
		}
	}
}
