package executor_test

import (
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/internal/pgscript"
	"github.com/bounceproof/bounceproof/prepare"
	"github.com/bounceproof/bounceproof/testenv/place"
)

// The Conn's own methods run in the transaction that is open on it, although its BEGIN is sent late.
func TestAConnsMethodsRunInItsTransaction(t *testing.T) {
	t.Parallel()
	for _, p := range place.OneOfEachKind() {
		t.Run(p.String(), func(t *testing.T) {
			t.Parallel()
			st := p.Start(t)
			plain := connect(t, st.DB.URL)
			mustExec(t, plain, "create table numbers (n int)")
			ex := newExecutor(t, newPool(t, st.URL, maxConns(2)), executor.Config{})
			calls := map[string]func(ctx context.Context, c *executor.Conn) error{
				"Exec": func(ctx context.Context, c *executor.Conn) error {
					_, err := c.Exec(ctx, "insert into numbers values ($1)", prepare.Stable, 1)
					return err
				},
				"Query": func(ctx context.Context, c *executor.Conn) error {
					rows, _ := c.Query(ctx, "insert into numbers values ($1) returning n", prepare.Stable, 1)
					_, err := pgx.CollectRows(rows, pgx.RowTo[int])
					return err
				},
				"QueryRow": func(ctx context.Context, c *executor.Conn) error {
					var n int
					return c.QueryRow(ctx, "insert into numbers values ($1) returning n", prepare.Stable, 1).Scan(&n)
				},
				"SendBatch": func(ctx context.Context, c *executor.Conn) error {
					var b pgx.Batch
					b.Queue("insert into numbers values ($1)", prepare.Stable, 1)
					return c.SendBatch(ctx, &b).Close()
				},
				"CopyFrom": func(ctx context.Context, c *executor.Conn) error {
					_, err := c.CopyFrom(ctx, pgx.Identifier{"numbers"}, []string{"n"}, pgx.CopyFromRows([][]any{{1}}))
					return err
				},
				"Conn": func(ctx context.Context, c *executor.Conn) error {
					_, err := c.Conn().Exec(ctx, "insert into numbers values (1)")
					return err
				},
			}
			count := func() string { return one(t, plain, "select count(*) from numbers") }
			for name, call := range calls {
				c := acquire(t, ex)
				tx, err := c.Begin(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				if err := call(t.Context(), c); err != nil {
					t.Errorf("%s: %v", name, err)
				}
				if n := count(); n != "0" {
					t.Errorf("%s: it ran outside the transaction", name)
				}
				if err := tx.Rollback(t.Context()); err != nil || count() != "0" {
					t.Errorf("%s: rolled back: %v, %s rows", name, err, count())
				}
				// The control: the same call without a transaction stays.
				if err := call(t.Context(), c); err != nil || count() != "1" {
					t.Errorf("%s: alone: %v, %s rows", name, err, count())
				}
				c.Release()
				mustExec(t, plain, "truncate numbers")
			}
		})
	}
}

// A second transaction on the same connection would share the first one's fate, as with pgx it does, behind a warning of the server's.
func TestAConnHasOneTransaction(t *testing.T) {
	t.Parallel()
	s, _ := newScripted(t, pgscript.Options{}, executor.Config{}, maxConns(2))
	ctx := t.Context()
	for name, begin := range map[string]func(c *executor.Conn) error{
		"Begin": func(c *executor.Conn) error { _, err := c.Begin(ctx); return err },
		"BEGIN": func(c *executor.Conn) error { _, err := c.Exec(ctx, "begin"); return err },
		"batch": func(c *executor.Conn) error {
			var b pgx.Batch
			b.BeginTx(pgx.TxOptions{})
			b.Queue("select 1")
			return c.SendBatch(ctx, &b).Close()
		},
	} {
		c := acquire(t, s.ex)
		if err := begin(c); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		s.b.Reset()
		var b pgx.Batch
		b.BeginTx(pgx.TxOptions{})
		_, errBegin := c.Begin(ctx)
		errInTx := c.InTx(ctx, pgx.TxOptions{}, func(context.Context, executor.Tx) error { return nil })
		for what, err := range map[string]error{"Begin": errBegin, "InTx": errInTx} {
			if !errors.Is(err, executor.ErrTxOpen) {
				t.Errorf("%s, then %s: %v", name, what, err)
			}
		}
		if err := c.SendBatch(ctx, &b).Close(); err == nil {
			t.Errorf("%s, then a batch that begins: no error", name)
		}
		if sent := s.b.Sent(); len(sent) > 0 {
			t.Errorf("%s: sent %v", name, sent)
		}
		c.Release()
	}
	if err := givenBack(s.pool); err != nil {
		t.Error(err)
	}
}

// A transaction that is open at Release is not committed, and does not run on a connection that is somebody else's by then.
func TestReleaseEndsTheTransaction(t *testing.T) {
	t.Parallel()
	for _, used := range []bool{false, true} {
		s, _ := newScripted(t, pgscript.Options{}, executor.Config{}, maxConns(1))
		ctx := t.Context()
		c := acquire(t, s.ex)
		begun, err := c.Begin(ctx)
		if err != nil {
			t.Fatal(err)
		}
		tx, ok := executor.TxOf(begun)
		if !ok {
			t.Fatal("this is no transaction of an executor")
		}
		if used {
			if _, err := tx.Exec(ctx, insertA, prepare.Stable, 1); err != nil {
				t.Fatal(err)
			}
		}
		nested, err := tx.Begin(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if err := tx.Queue(insertA, prepare.Stable, 2); err != nil {
			t.Fatal(err)
		}
		tx.OnCommit(func() { t.Error("OnCommit ran") })
		c.Release()
		if err := givenBack(s.pool); err != nil {
			t.Fatal(err)
		}
		s.b.Reset()
		_, errExec := tx.Exec(ctx, insertA, prepare.Stable, 3)
		_, errNested := nested.Exec(ctx, insertA, prepare.Stable, 3)
		for what, err := range map[string]error{
			"Exec": errExec, "nested Exec": errNested, "Queue": tx.Queue(insertA), "nested Commit": nested.Commit(ctx), "Commit": tx.Commit(ctx),
			"Rollback": tx.Rollback(ctx),
		} {
			if !errors.Is(err, pgx.ErrTxClosed) {
				t.Errorf("used %t, %s: %v", used, what, err)
			}
		}
		if sent := s.b.Sent(); len(sent) > 0 {
			t.Errorf("used %t: sent %v", used, sent)
		}
		if s.b.Committed(insertA) != 0 {
			t.Errorf("used %t: committed", used)
		}
		if err := s.sane(ctx); err != nil {
			t.Errorf("used %t: %v", used, err)
		}
	}
}
