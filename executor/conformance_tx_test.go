package executor_test

import (
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/prepare"
)

func conformBegin(ctx context.Context, t *testing.T, c *cell, i int) error {
	before := c.count(t)
	err := func() error {
		tx, err := c.ex.Begin(ctx)
		if err != nil {
			return err
		}
		defer func() { _ = tx.Rollback(ctx) }()
		if _, err := tx.Exec(ctx, "insert into "+c.table+" values ($1, $2)", prepare.Stable, i, 1); err != nil {
			return err
		}
		nested, err := tx.Begin(ctx)
		if err != nil {
			return err
		}
		if _, err := nested.Exec(ctx, "update "+c.table+" set n = $2 where id = $1", i, 1000); err != nil {
			return err
		}
		if err := nested.Rollback(ctx); err != nil {
			return err
		}
		var n int
		if err := tx.QueryRow(ctx, "select n from "+c.table+" where id = $1", prepare.Stable, i).Scan(&n); err != nil {
			return err
		}
		if n != 1 {
			t.Fatalf("after ROLLBACK TO SAVEPOINT n is %d", n)
		}
		if c.count(t) != before {
			t.Fatal("a transaction that is still open is visible")
		}
		return tx.Commit(ctx)
	}()
	if err != nil {
		if c.count(t) != before {
			t.Fatalf("a transaction that failed has left rows: %v", err)
		}
		return err
	}
	if got := one(t, c.plain, "select n from "+c.table+" where id = $1", i); got != "1" {
		t.Fatalf("n is %s", got)
	}
	// And one that is rolled back.
	tx, err := c.ex.Begin(ctx)
	if err != nil {
		return err
	}
	if _, err := tx.Exec(ctx, "delete from "+c.table); err != nil {
		return err
	}
	if err := tx.Rollback(ctx); err != nil {
		return err
	}
	if err := tx.Commit(ctx); !errors.Is(err, pgx.ErrTxClosed) {
		t.Fatalf("Commit after Rollback: %v", err)
	}
	if got := one(t, c.plain, "select n from "+c.table+" where id = $1", i); got != "1" {
		t.Fatalf("after a rollback n is %s", got)
	}
	return nil
}

func conformInTx(ctx context.Context, t *testing.T, c *cell, i int) error {
	before := c.count(t)
	committed := 0
	var backend, again int
	err := c.ex.InTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead}, func(ctx context.Context, tx executor.Tx) error {
		tx.Queue("update "+c.table+" set n = n + 1 where id = $1", prepare.Stable, i)
		tx.OnCommit(func() { committed++ })
		var level string
		if err := tx.QueryRow(ctx, "select current_setting('transaction_isolation'), pg_backend_pid()", prepare.Stable).Scan(&level, &backend); err != nil {
			return err
		}
		if level != "repeatable read" {
			t.Fatalf("isolation level %q", level)
		}
		if _, err := tx.Exec(ctx, "insert into "+c.table+" values ($1, $2)", prepare.Stable, i, 1); err != nil {
			return err
		}
		rows, err := tx.Query(ctx, "select pg_backend_pid() from generate_series(1, $1)", 2)
		if err != nil {
			return err
		}
		pids, err := pgx.CollectRows(rows, pgx.RowTo[int])
		if err != nil {
			return err
		}
		if again = pids[1]; again != backend {
			t.Fatalf("one transaction ran on two servers: %d and %d", backend, again)
		}
		return nil
	})
	if err != nil {
		if c.count(t) != before || committed != 0 {
			t.Fatalf("a transaction that failed has left rows, or ran OnCommit %d times: %v", committed, err)
		}
		return err
	}
	if committed != 1 {
		t.Fatalf("OnCommit ran %d times", committed)
	}
	if got := one(t, c.plain, "select n from "+c.table+" where id = $1", i); got != "2" {
		t.Fatalf("n is %s, the queued update did not run once", got)
	}
	// The caller's own error rolls back and comes back as it is.
	own := errors.New("own")
	err = c.ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
		if _, err := tx.Exec(ctx, "delete from "+c.table, prepare.Stable); err != nil {
			return err
		}
		return own
	})
	if err != own { //nolint:errorlint // not wrapped
		return err
	}
	if got := one(t, c.plain, "select n from "+c.table+" where id = $1", i); got != "2" {
		t.Fatalf("after a rollback n is %s", got)
	}
	return nil
}

func conformQueueOnly(ctx context.Context, t *testing.T, c *cell, i int) error {
	before := c.count(t)
	committed := false
	err := c.ex.InTx(ctx, pgx.TxOptions{}, func(_ context.Context, tx executor.Tx) error {
		tx.Queue("insert into "+c.table+" values ($1, $2)", prepare.Stable, 2*i, 1)
		tx.Queue("insert into "+c.table+" values (@id, @n)", pgx.NamedArgs{"id": 2*i + 1, "n": 1}, prepare.Stable)
		tx.Queue("update "+c.table+" set n = n + $1 where id >= $2", 1, 2*i)
		tx.OnCommit(func() { committed = true })
		return nil
	})
	if err != nil {
		if c.count(t) != before || committed {
			t.Fatalf("a transaction that failed has left rows, or ran OnCommit: %v", err)
		}
		return err
	}
	if got := one(t, c.plain, "select count(*) || '/' || sum(n) from "+c.table+" where id >= $1", 2*i); got != "2/4" || !committed {
		t.Fatalf("rows/sum %s, OnCommit ran: %v", got, committed)
	}
	// One that fails at its second statement leaves nothing.
	before, committed = c.count(t), false
	err = c.ex.InTx(ctx, pgx.TxOptions{}, func(_ context.Context, tx executor.Tx) error {
		tx.Queue("insert into "+c.table+" values ($1, $2)", prepare.Stable, -1, 1)
		tx.Queue("insert into "+c.table+" values ($1, $2)", prepare.Stable, 2*i, 1)
		tx.OnCommit(func() { committed = true })
		return nil
	})
	err = duplicate(t, err)
	if c.count(t) != before || committed {
		t.Fatalf("a queue that failed has left rows, or ran OnCommit: %v", err)
	}
	return err
}
