package executor_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/internal/await"
	"github.com/bounceproof/bounceproof/prepare"
	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
	"github.com/bounceproof/bounceproof/testenv/place"
)

// waits are the ways in which a request comes to wait for a server of the pooler's. Each writes one row.
var waits = map[string]func(ctx context.Context, ex *executor.Executor) error{
	"Exec, stable": func(ctx context.Context, ex *executor.Executor) error {
		_, err := ex.Exec(ctx, "insert into waited values ($1)", prepare.Stable, 1)
		return err
	},
	"Exec, unknown": func(ctx context.Context, ex *executor.Executor) error {
		_, err := ex.Exec(ctx, "insert into waited values ($1) -- never seen before", 1)
		return err
	},
	"Exec, text": func(ctx context.Context, ex *executor.Executor) error {
		_, err := ex.Exec(ctx, "insert into waited values (1)")
		return err
	},
	"Query": func(ctx context.Context, ex *executor.Executor) error {
		rows, err := ex.Query(ctx, "insert into waited values ($1) returning n", prepare.Stable, 1)
		if err != nil {
			return err
		}
		rows.Close()
		return rows.Err()
	},
	"Query, simple": func(ctx context.Context, ex *executor.Executor) error {
		rows, err := ex.Query(ctx, "insert into waited values ($1) returning n", pgx.QueryExecModeSimpleProtocol, 1)
		if err != nil {
			return err
		}
		rows.Close()
		return rows.Err()
	},
	"QueryRow": func(ctx context.Context, ex *executor.Executor) error {
		var n int
		return ex.QueryRow(ctx, "insert into waited values ($1) returning n", prepare.Stable, 1).Scan(&n)
	},
	"QueryRow, exec": func(ctx context.Context, ex *executor.Executor) error {
		var n int
		return ex.QueryRow(ctx, "insert into waited values ($1) returning n", pgx.QueryExecModeExec, 1).Scan(&n)
	},
	"transaction": func(ctx context.Context, ex *executor.Executor) error {
		return ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
			_, err := tx.Exec(ctx, "insert into waited values ($1)", prepare.Stable, 1)
			return err
		})
	},
	"transaction, text": func(ctx context.Context, ex *executor.Executor) error {
		return ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
			_, err := tx.Exec(ctx, "insert into waited values (1)")
			return err
		})
	},
	"transaction with a query of its own": func(ctx context.Context, ex *executor.Executor) error {
		return ex.InTx(ctx, pgx.TxOptions{BeginQuery: "begin read write"}, func(ctx context.Context, tx executor.Tx) error {
			_, err := tx.Exec(ctx, "insert into waited values ($1)", prepare.Stable, 1)
			return err
		})
	},
	"nested": func(ctx context.Context, ex *executor.Executor) error {
		return ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
			return pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
				_, err := tx.Exec(ctx, "insert into waited values ($1)", prepare.Stable, 1)
				return err
			})
		})
	},
	"prepare in a transaction": func(ctx context.Context, ex *executor.Executor) error {
		return ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
			if _, err := tx.Prepare(ctx, "ins", "insert into waited values ($1) -- by name"); err != nil {
				return err
			}
			_, err := tx.Exec(ctx, "ins", 1)
			return err
		})
	},
	"queue": func(ctx context.Context, ex *executor.Executor) error {
		return ex.InTx(ctx, pgx.TxOptions{}, func(_ context.Context, tx executor.Tx) error {
			return tx.Queue("insert into waited values ($1)", prepare.Stable, 1)
		})
	},
	"queue with BEGIN": func(ctx context.Context, ex *executor.Executor) error {
		return ex.InTx(ctx, pgx.TxOptions{IsoLevel: pgx.Serializable}, func(_ context.Context, tx executor.Tx) error {
			return tx.Queue("insert into waited values ($1)", prepare.Stable, 1)
		})
	},
	"batch": func(ctx context.Context, ex *executor.Executor) error { return ex.SendBatch(ctx, oneInsert()).Close() },
	"batch, read": func(ctx context.Context, ex *executor.Executor) error {
		br := ex.SendBatch(ctx, oneInsert())
		_, err := br.Exec()
		return errors.Join(err, br.Close())
	},
	"batch in a transaction": func(ctx context.Context, ex *executor.Executor) error {
		return ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error { return tx.SendBatch(ctx, oneInsert()).Close() })
	},
	"copy": func(ctx context.Context, ex *executor.Executor) error {
		_, err := ex.CopyFrom(ctx, pgx.Identifier{"waited"}, []string{"n"}, pgx.CopyFromRows([][]any{{1}}))
		return err
	},
	"copy in a transaction": func(ctx context.Context, ex *executor.Executor) error {
		return ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
			_, err := tx.CopyFrom(ctx, pgx.Identifier{"waited"}, []string{"n"}, pgx.CopyFromRows([][]any{{1}}))
			return err
		})
	},
}

// simple are those that go by the simple protocol.
var simple = map[string]bool{"Exec, text": true, "Query, simple": true, "transaction with a query of its own": true}

func oneInsert() *pgx.Batch {
	b := &pgx.Batch{}
	b.Queue("insert into waited values ($1)", prepare.Stable, 1)
	return b
}

// busy reports whether err is what a caller is to get of a pooler that had no server to give.
func busy(err error) bool {
	var b *executor.PoolerBusyError
	var pgErr *pgconn.PgError
	return errors.As(err, &b) && errors.As(err, &pgErr) && pgErr.Routine == "" &&
		strings.Contains(err.Error(), "nothing was executed") && strings.Contains(err.Error(), "safe to try again")
}

// impatient gives a pooler one server, for which nobody waits long.
func impatient(o *pgbouncer.Options) {
	o.PoolSize = 1
	o.Settings = map[string]string{"query_wait_timeout": "1"}
}

func TestAFullQueueOfThePoolerIsATypedError(t *testing.T) {
	t.Parallel()
	for _, p := range everyVersion() {
		t.Run(p.String(), func(t *testing.T) {
			t.Parallel()
			r := p.Start(t, impatient)
			admin := connect(t, r.DB.URL)
			mustExec(t, admin, "create table waited (n int)")
			ex := newExecutor(t, newPool(t, r.URL, maxConns(30)), executor.Config{})
			for name, way := range waits {
				if err := way(t.Context(), ex); err != nil {
					t.Fatalf("%s: while there is a server: %v", name, err)
				}
			}
			if n := one(t, admin, "select count(*) from waited"); n != "19" {
				t.Fatal(n, "rows of 19")
			}
			release := pinned(t, r)
			var all sync.WaitGroup
			for name, way := range waits {
				all.Go(func() {
					err := way(t.Context(), ex)
					if simple[name] && p.Bouncer == "1.15" {
						// It closes the socket behind an ERROR, and pgconn's simple protocol then reports the socket alone.
						if err == nil {
							t.Errorf("%s: no error", name)
						}
						return
					}
					if !busy(err) {
						t.Errorf("%s: %T %v", name, err, err)
					}
				})
			}
			all.Wait()
			release()
			if n := one(t, admin, "select count(*) from waited"); n != "19" {
				t.Error(n, "rows: something was executed")
			}
			for name, way := range waits {
				if err := way(t.Context(), ex); err != nil {
					t.Errorf("%s: when there is a server again: %v", name, err)
				}
			}
		})
	}
}

// pinned takes the only server of the pooler away until release is called.
func pinned(t *testing.T, r *place.Running) (release func()) {
	t.Helper()
	release, err := r.Bouncer.Pin(t.Context(), r.URL)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(release)
	return release
}

// A guarded pool hands out pgx's own errors, so what there is to say is in the server's error itself.
func TestAFullQueueOfThePoolerBehindAGuard(t *testing.T) {
	t.Parallel()
	for _, p := range everyVersion() {
		t.Run(p.String(), func(t *testing.T) {
			t.Parallel()
			r := p.Start(t, impatient)
			cfg, err := pgxpool.ParseConfig(r.URL)
			if err != nil {
				t.Fatal(err)
			}
			if err := executor.Guard(cfg, executor.Config{}); err != nil {
				t.Fatal(err)
			}
			pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
			if err != nil {
				t.Fatal(err)
			}
			defer pool.Close()
			if err := pool.Ping(t.Context()); err != nil {
				t.Fatal(err)
			}
			var n int
			if err := pool.QueryRow(t.Context(), "select $1::int", 1).Scan(&n); err != nil {
				t.Fatal(err)
			}
			defer pinned(t, r)()
			for _, call := range []func() error{
				func() error { var n int; return pool.QueryRow(t.Context(), "select $1::int", 1).Scan(&n) },
				func() error { _, err := pool.Exec(t.Context(), "select $1::int", 1); return err },
			} {
				err := call()
				var pgErr *pgconn.PgError
				if !errors.As(err, &pgErr) || !strings.Contains(pgErr.Hint, "safe to try again") || !strings.HasPrefix(pgErr.Message, "query_wait_timeout") {
					t.Errorf("%T %v", err, err)
				}
			}
		})
	}
}

// What ends a connection before it stands is typed too.
func TestAPoolerThatTakesNobodyIsATypedError(t *testing.T) {
	t.Parallel()
	for _, p := range everyVersion() {
		t.Run(p.String(), func(t *testing.T) {
			t.Parallel()
			r := p.Start(t, func(o *pgbouncer.Options) { o.Settings = map[string]string{"max_client_conn": "3"} })
			ex := newExecutor(t, newPool(t, r.URL), executor.Config{PreparedStatements: executor.Off})
			holders := []*pgx.Conn{connect(t, r.URL), connect(t, r.URL), connect(t, r.URL)}
			for name, way := range waits {
				if err := way(t.Context(), ex); !busy(err) {
					t.Errorf("%s: %T %v", name, err, err)
				}
			}
			for _, c := range holders {
				_ = c.Close(t.Context())
			}
			await.True(t, "clients are taken again", func() bool { return ex.Pool().Ping(t.Context()) == nil })
		})
	}
}
