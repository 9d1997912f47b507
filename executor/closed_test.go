package executor_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/puddle/v2"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/internal/await"
	"github.com/bounceproof/bounceproof/internal/pgscript"
	"github.com/bounceproof/bounceproof/notify"
	"github.com/bounceproof/bounceproof/prepare"
	"github.com/bounceproof/bounceproof/testenv/place"
)

// TestClosed: every method of a closed executor says so, and so it is when the pool was closed under it.
func TestClosed(t *testing.T) {
	t.Parallel()
	st := place.New(place.Direct, "", "15").Start(t)
	calls := map[string]func(ctx context.Context, ex *executor.Executor) error{
		"Exec": func(ctx context.Context, ex *executor.Executor) error {
			_, err := ex.Exec(ctx, "select 1")
			return err
		},
		"Query": func(ctx context.Context, ex *executor.Executor) error {
			rows, err := ex.Query(ctx, "select $1::int", 1)
			if rows.Next() || !errors.Is(rows.Err(), executor.ErrClosed) {
				return fmt.Errorf("rows: %w", rows.Err())
			}
			rows.Close()
			return err
		},
		"QueryRow": func(ctx context.Context, ex *executor.Executor) error {
			var n int
			return ex.QueryRow(ctx, "select $1::int", prepare.Stable, 1).Scan(&n)
		},
		"SendBatch": func(ctx context.Context, ex *executor.Executor) error {
			var b pgx.Batch
			b.Queue("select 1")
			results := ex.SendBatch(ctx, &b)
			if _, err := results.Exec(); !errors.Is(err, executor.ErrClosed) {
				return err
			}
			return results.Close()
		},
		"SendBatch that begins": func(ctx context.Context, ex *executor.Executor) error {
			var b pgx.Batch
			b.BeginTx(pgx.TxOptions{})
			results := ex.SendBatch(ctx, &b)
			if err := results.Tx().Rollback(ctx); !errors.Is(err, pgx.ErrTxClosed) {
				return err
			}
			return results.Close()
		},
		"CopyFrom": func(ctx context.Context, ex *executor.Executor) error {
			_, err := ex.CopyFrom(ctx, pgx.Identifier{"t"}, []string{"n"}, pgx.CopyFromRows(nil))
			return err
		},
		"Begin": func(ctx context.Context, ex *executor.Executor) error {
			tx, err := ex.Begin(ctx)
			if tx != nil {
				return errors.New("a transaction")
			}
			return err
		},
		"InTx": func(ctx context.Context, ex *executor.Executor) error {
			return ex.InTx(ctx, pgx.TxOptions{}, func(context.Context, executor.Tx) error { return errors.New("it ran") })
		},
	}
	for name, call := range calls {
		t.Run(name, func(t *testing.T) {
			ex := newExecutor(t, newPool(t, st.URL, maxConns(1)), executor.Config{})
			for range 2 {
				if err := ex.Close(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			if err := call(t.Context(), ex); !errors.Is(err, executor.ErrClosed) || errors.Is(err, puddle.ErrClosedPool) {
				t.Errorf("closed executor: %v", err)
			}
			if err := ex.Pool().Ping(t.Context()); err != nil {
				t.Errorf("the pool is the caller's: %v", err)
			}
			pool := newPool(t, st.URL, maxConns(1))
			ex = newExecutor(t, pool, executor.Config{})
			pool.Close()
			if err := call(t.Context(), ex); !errors.Is(err, executor.ErrClosed) || !errors.Is(err, puddle.ErrClosedPool) {
				t.Errorf("closed pool: %v", err)
			}
		})
	}
	ex := newExecutor(t, newPool(t, st.URL, maxConns(1)), executor.Config{})
	_ = ex.Close(t.Context())
	if _, err := ex.Topology(t.Context()); !errors.Is(err, executor.ErrClosed) {
		t.Errorf("Topology: %v", err)
	}
	if err := ex.Notify("c", "p"); !errors.Is(err, executor.ErrClosed) {
		t.Errorf("Notify: %v", err)
	}
}

// What New refuses leaves nothing that could be used by mistake.
func TestNewReturnsNothingBesideAnError(t *testing.T) {
	t.Parallel()
	pool := newPool(t, pgscript.URL)
	for field, cfg := range map[string]executor.Config{
		"Config.PreparedStatements": {PreparedStatements: 99},
		"Config.StatementCapacity":  {StatementCapacity: -1},
		"Config.Sender":             {Sender: notify.SenderConfig{MaxPending: -1}},
	} {
		ex, err := executor.New(pool, cfg)
		if ex != nil || err == nil || !strings.Contains(err.Error(), field) {
			t.Errorf("%s: %v, %v", field, ex, err)
		}
	}
}

// TestCopyFreesItsServer: after a COPY the pooler has its server back. With bare pgx PgBouncer 1.26 does not, if the copy is small.
func TestCopyFreesItsServer(t *testing.T) {
	for _, p := range append(place.Suites(place.TransactionRaw), place.New(place.TransactionTracked, "1.24", "17"), place.New(place.TransactionTracked, "1.26", "18")) {
		t.Run(p.String(), func(t *testing.T) {
			t.Parallel()
			st := p.Start(t)
			mustExec(t, connect(t, st.DB.URL), "create table c (n int)")
			busy := func() int {
				servers, err := st.Bouncer.Admin("show servers")
				if err != nil {
					t.Fatal(err)
				}
				n := 0
				for _, s := range servers {
					if s["database"] == st.DB.Name && s["state"] == "active" {
						n++
					}
				}
				return n
			}
			ctx := t.Context()
			ex := newExecutor(t, newPool(t, st.URL, maxConns(2)), executor.Config{})
			for i := range 20 {
				var err error
				if i%2 == 0 {
					_, err = ex.CopyFrom(ctx, pgx.Identifier{"c"}, []string{"n"}, pgx.CopyFromRows([][]any{{i}}))
				} else {
					err = ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
						_, err := tx.CopyFrom(ctx, pgx.Identifier{"c"}, []string{"n"}, pgx.CopyFromRows([][]any{{i}}))
						return err
					})
				}
				if err != nil {
					t.Fatal(err)
				}
				await.True(t, "the server is free", func() bool { return busy() == 0 })
			}
			// The source fails at once, before the server can have answered: CopyFail is an end too.
			own := errors.New("own")
			_, err := ex.CopyFrom(ctx, pgx.Identifier{"c"}, []string{"n"}, pgx.CopyFromFunc(func() ([]any, error) { return nil, own }))
			if err == nil {
				t.Error("the source's error is lost")
			}
			await.True(t, "the server is free", func() bool { return busy() == 0 })
			if p.Bouncer == "1.26" {
				bare, err := pgconn.Connect(ctx, st.URL)
				if err != nil {
					t.Fatal(err)
				}
				defer func() { _ = bare.Close(context.Background()) }()
				kept := false
				for deadline := time.Now().Add(await.Deadline); !kept && time.Now().Before(deadline); {
					if _, err := bare.CopyFrom(ctx, strings.NewReader("1\n"), "copy c from stdin"); err != nil {
						t.Fatal(err)
					}
					kept = busy() > 0
				}
				if !kept {
					t.Error("control: bare pgx's copies leave the servers free too: if PgBouncer is mended, copyGate has become needless")
				}
			}
		})
	}
}
