package executor_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/internal/await"
	"github.com/bounceproof/bounceproof/prepare"
	"github.com/bounceproof/bounceproof/testenv/place"
)

// Faults that were found by breaking the executor on purpose. Each has been seen to fail before it was mended.

// numbers returns an executor with a small pool on a direct connection, where there is an empty table t (v int).
func numbers(t *testing.T, conns int32, cfg executor.Config) (*place.Running, *executor.Executor, *pgx.Conn) {
	t.Helper()
	s := place.New(place.Direct, "", "15").Start(t)
	c := connect(t, s.DB.URL)
	mustExec(t, c, "create table t (v int)")
	return s, newExecutor(t, newPool(t, s.URL, maxConns(conns)), cfg), c
}

// rowsIn counts the rows of t.
func rowsIn(t *testing.T, c *pgx.Conn) (n int) {
	t.Helper()
	if err := c.QueryRow(context.Background(), "select count(*) from t").Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

const insertNumber = "insert into t values ($1)"

func TestCommitReportsAQueuedArgumentThatCannotBeEncoded(t *testing.T) {
	t.Parallel()
	_, ex, c := numbers(t, 2, executor.Config{})
	if _, err := ex.Exec(t.Context(), insertNumber, prepare.Stable, 0); err != nil {
		t.Fatal(err)
	}
	ran := false
	err := ex.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
		tx.OnCommit(func() { ran = true })
		if _, err := tx.Exec(ctx, insertNumber, prepare.Stable, 1); err != nil {
			return err
		}
		return tx.Queue(insertNumber, prepare.Stable, 3_000_000_000)
	})
	if err == nil || ran || rowsIn(t, c) != 1 {
		t.Errorf("error %v, OnCommit ran %v, %d rows; want an error, false, 1", err, ran, rowsIn(t, c))
	}
}

func TestATransactionBegunByABatchIsNotRedone(t *testing.T) {
	t.Parallel()
	_, ex, c := numbers(t, 1, executor.Config{})
	for range 2 {
		rows, _ := ex.Query(t.Context(), "select * from t", prepare.Stable)
		rows.Close()
	}
	var b pgx.Batch
	b.BeginTx(pgx.TxOptions{})
	b.Queue("alter table t add w int")
	b.Queue("insert into t (v) values ($1)", 42)
	br := ex.SendBatch(t.Context(), &b)
	if err := br.Close(); err != nil {
		t.Fatal(err)
	}
	tx := br.Tx()
	rows, _ := tx.Query(t.Context(), "select * from t", prepare.Stable)
	rows.Close()
	failed := rows.Err()
	err := tx.Commit(t.Context())
	// The plan is stale, so the query may fail, and then the commit has to say so.
	if (err == nil) != (rowsIn(t, c) == 1) || (failed == nil) != (err == nil) {
		t.Errorf("query %v, commit %v, %d rows", failed, err, rowsIn(t, c))
	}
}

func TestAQueueBelongsToItsOwnTransaction(t *testing.T) {
	t.Parallel()
	for _, failing := range []bool{false, true} {
		_, ex, c := numbers(t, 2, executor.Config{})
		tx, err := ex.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if err := tx.(executor.Tx).Queue(insertNumber, 1); err != nil {
			t.Fatal(err)
		}
		sp, err := tx.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if failing {
			_, _ = sp.Exec(t.Context(), "select 1/$1::int", 0)
		}
		var x int
		// The END of a CASE is no end of a transaction, and the parent's queue is none of this one's business.
		_ = sp.QueryRow(t.Context(), "select case when $1::int > 0 then 1 end", 1).Scan(&x)
		_, _ = sp.Exec(t.Context(), "do $$ begin perform 1; end $$; savepoint a; release a")
		if err := sp.Rollback(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := tx.Commit(t.Context()); err != nil || rowsIn(t, c) != 1 {
			t.Errorf("failing %v: commit %v, %d rows, want 1", failing, err, rowsIn(t, c))
		}
	}
	// And the other way round: what is queued within a raw savepoint of a nested transaction ends with it.
	_, ex, c := numbers(t, 2, executor.Config{})
	tx, err := ex.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	sp, err := tx.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	_, e1 := sp.Exec(t.Context(), "savepoint a")
	e2 := sp.(executor.Tx).Queue(insertNumber, 1)
	_, e3 := sp.Exec(t.Context(), "rollback to savepoint a")
	if err := errors.Join(e1, e2, e3, sp.Commit(t.Context()), tx.Commit(t.Context())); err != nil || rowsIn(t, c) != 0 {
		t.Errorf("%v, %d rows, want none", err, rowsIn(t, c))
	}
}

func TestInTxRunsAgainOnlyForALossThatStands(t *testing.T) {
	t.Parallel()
	business := errors.New("business")
	for _, end := range []error{nil, business} {
		_, ex, c := numbers(t, 1, executor.Config{})
		mustExec(t, c, "create function kill() returns trigger language plpgsql as $$ begin perform pg_terminate_backend(pg_backend_pid()); return null; end $$")
		mustExec(t, c, "create constraint trigger k after insert on t deferrable initially deferred for each row execute function kill()")
		runs := 0
		err := ex.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
			runs++
			var x int
			if err := tx.QueryRow(ctx, "select 1 + $1::int", prepare.Stable, 1).Scan(&x); err != nil {
				return err
			}
			sp, err := tx.Begin(ctx)
			if err != nil {
				return err
			}
			// Unseen by the executor, which watches for it at the front of a text.
			if _, err := sp.Exec(ctx, "select 1; deallocate all"); err != nil {
				return err
			}
			_ = sp.QueryRow(ctx, "select 1 + $1::int", prepare.Stable, 1).Scan(&x) // lost
			if err := sp.Rollback(ctx); err != nil {
				return err
			}
			if end == nil {
				_, err = tx.Exec(ctx, insertNumber, 1)
				return err
			}
			return end
		})
		if want := end; runs != 1 || (end == nil && !errors.Is(err, executor.ErrCommitUnknown)) || !errors.Is(err, want) && end != nil {
			t.Errorf("%d runs, %v", runs, err)
		}
	}
}

func TestCopyIsRightAfterAMigration(t *testing.T) {
	t.Parallel()
	_, ex, c := numbers(t, 1, executor.Config{})
	for _, typ := range []string{"int8", "float8", "int4", "float4"} {
		mustExec(t, c, "truncate t; alter table t alter v type "+typ)
		n, err := ex.CopyFrom(t.Context(), pgx.Identifier{"t"}, []string{"v"}, pgx.CopyFromRows([][]any{{5}}))
		if err != nil || n != 1 {
			t.Fatalf("%s: %d, %v", typ, n, err)
		}
		var got string
		if err := c.QueryRow(t.Context(), "select v::text from t").Scan(&got); err != nil || got != "5" {
			t.Errorf("%s: stored %q, %v", typ, got, err)
		}
	}
}

func TestRowsOfATypeUnknownToPgxAreNeverGarbage(t *testing.T) {
	t.Parallel()
	for _, p := range []place.Place{place.New(place.Direct, "", "15"), place.New(place.TransactionRaw, "1.18", "15"), place.New(place.TransactionTracked, "1.24", "17")} {
		for _, policy := range []executor.PreparedStatements{executor.Auto, executor.Off} {
			s := p.Start(t)
			c := connect(t, s.DB.URL)
			mustExec(t, c, "create table t (a int, b int); insert into t values (1, 2)")
			ex := newExecutor(t, newPool(t, s.URL, maxConns(1)), executor.Config{PreparedStatements: policy})
			get := func() (string, error) {
				rows, err := ex.Query(t.Context(), "select * from t where a = $1", prepare.Stable, 1)
				if err != nil {
					return "", err
				}
				return pgx.CollectExactlyOneRow(rows, func(row pgx.CollectableRow) (string, error) {
					values, err := row.Values()
					return fmt.Sprint(values), err
				})
			}
			for _, step := range []struct{ ddl, want string }{
				{"select 1", "[1 2]"},
				{"alter table t add c money default 12.5", "[1 2 $12.50]"},
				{"alter table t drop c; alter table t alter b type money", "[1 $2.00]"},
			} {
				mustExec(t, c, step.ddl)
				got, err := get()
				if err != nil { // said once, when the statement had run already
					got, err = get()
				}
				if err != nil || got != step.want {
					t.Errorf("%v, %v, %s: %q, %v; want %q", p, policy, step.ddl, got, err, step.want)
				}
			}
		}
	}
}

func TestAPoolerThatAppearsIsNoticed(t *testing.T) {
	t.Parallel()
	s := place.New(place.TransactionTracked, "1.24", "17").Start(t)
	c := connect(t, s.DB.URL)
	mustExec(t, c, "create table t (v int8); insert into t values (11)")
	behind, err := pgx.ParseConfig(s.URL)
	if err != nil {
		t.Fatal(err)
	}
	pooled := false
	pool := newPool(t, s.DB.URL, maxConns(1), func(cfg *pgxpool.Config) {
		cfg.BeforeConnect = func(_ context.Context, cc *pgx.ConnConfig) error {
			if pooled {
				cc.Host, cc.Port = behind.Host, behind.Port
			}
			return nil
		}
	})
	ex := newExecutor(t, pool, executor.Config{})
	get := func() any {
		rows, err := ex.Query(t.Context(), "select * from t", prepare.Stable)
		if err != nil {
			t.Fatal(err)
		}
		defer rows.Close()
		rows.Next()
		values, err := rows.Values()
		if err != nil {
			t.Fatal(err)
		}
		return values[0]
	}
	get()
	pooled = true
	pool.Reset()
	for range 3 {
		get()
	}
	if top, err := ex.Topology(t.Context()); err != nil || !top.Pooled() {
		t.Errorf("topology %v, %v", top, err)
	}
	mustExec(t, c, "alter table t alter v type float8")
	if _, err := s.Bouncer.Admin("RECONNECT"); err != nil {
		t.Fatal(err)
	}
	if got := get(); got != 11.0 {
		t.Errorf("read %v (%T), want 11.0", got, got)
	}
}

func TestABusyTransactionIsNotRedone(t *testing.T) {
	t.Parallel()
	_, ex, c := numbers(t, 1, executor.Config{})
	tx, err := ex.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var b pgx.Batch
	b.Queue(insertNumber, 1)
	b.Queue(insertNumber, 2)
	br := tx.SendBatch(t.Context(), &b)
	if _, err := tx.Exec(t.Context(), "select $1::int", 1); err == nil {
		t.Error("a statement ran in the middle of a batch")
	}
	if err := errors.Join(br.Close(), tx.Commit(t.Context())); err != nil || rowsIn(t, c) != 2 {
		t.Errorf("%v, %d rows, want 2", err, rowsIn(t, c))
	}
}

func TestOnCommitFindsTheConnectionFree(t *testing.T) {
	t.Parallel()
	_, ex, _ := numbers(t, 1, executor.Config{})
	ctx, cancel := context.WithTimeout(t.Context(), await.Deadline)
	defer cancel()
	var own, inside error
	err := ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
		tx.OnCommit(func() {
			_, own = ex.Exec(ctx, "select 1")
			_, inside = tx.Exec(ctx, "select 1")
		})
		_, err := tx.Exec(ctx, "select 1")
		return err
	})
	if err != nil || own != nil || !errors.Is(inside, pgx.ErrTxClosed) {
		t.Errorf("commit %v; on the pool %v, in the transaction %v", err, own, inside)
	}
}
