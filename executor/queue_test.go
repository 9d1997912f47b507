package executor_test

import (
	"context"
	"database/sql/driver"
	"errors"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/prepare"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

func TestAnEndedTransactionTakesNothingIntoItsQueue(t *testing.T) {
	t.Parallel()
	db := postgres.Start(t, postgres.Options{}).NewDatabase(t)
	ex := newExecutor(t, newPool(t, db.URL), executor.Config{})
	for _, nested := range []bool{false, true} {
		outer, err := ex.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		ended := outer
		if nested {
			if ended, err = outer.Begin(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		if err := ended.(executor.Tx).Queue("select 1", prepare.Stable); err != nil {
			t.Fatalf("nested %v: an open transaction's queue: %v", nested, err)
		}
		if err := ended.Commit(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := ended.(executor.Tx).Queue("select 1", prepare.Stable); !errors.Is(err, pgx.ErrTxClosed) {
			t.Errorf("nested %v: an ended transaction's queue: %v", nested, err)
		}
		_ = outer.Rollback(t.Context())
	}
}

// What is queued runs in front of a text that cuts the transaction just as it would have run with COMMIT: in every mode, and traced.
func TestTheQueueInFrontOfACut(t *testing.T) {
	t.Parallel()
	db := postgres.Start(t, postgres.Options{}).NewDatabase(t)
	admin := connect(t, db.URL)
	mustExec(t, admin, "create table t (v int)")
	var told events
	ex := newExecutor(t, newPool(t, db.URL, maxConns(1), func(cfg *pgxpool.Config) { cfg.ConnConfig.Tracer = &told }), executor.Config{})
	for _, args := range [][]any{
		{1},
		{prepare.Stable, 1},
		{pgx.QueryExecModeCacheDescribe, 1},
		{pgx.QueryExecModeExec, 1},
		{pgx.QueryExecModeSimpleProtocol, 1},
		{pgx.NamedArgs{"v": 1}},
	} {
		insert := "insert into t values ($1)"
		if _, named := args[0].(pgx.NamedArgs); named {
			insert = "insert into t values (@v)"
		}
		var lines [2][]string
		for i, cut := range []string{"", "savepoint a"} {
			before := one(t, admin, "select count(*) from t")
			err := ex.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
				if _, err := tx.Exec(ctx, "set local work_mem = '1MB'"); err != nil {
					return err
				}
				if err := tx.Queue(insert, args...); err != nil || cut == "" {
					return err
				}
				_, err := tx.Exec(ctx, cut)
				return err
			})
			if got := one(t, admin, "select count(*) from t"); err != nil || got != plus(t, before, 1) {
				t.Errorf("%v, %q: %v, %s rows became %s", args, cut, err, before, got)
			}
			lines[i], _, _ = told.take()
			lines[i] = slices.DeleteFunc(lines[i], func(line string) bool { return line[:5] != "start" || line == "start query "+cut+" []" })
		}
		if diff := cmp.Diff(lines[0], lines[1]); diff != "" {
			t.Errorf("%v: traced with COMMIT (-), and in front of a savepoint (+):\n%s", args, diff)
		}
	}
}

// A text that a rewriter has left without arguments is a simple query too, and may cut the transaction in its middle.
func TestTheQueueInFrontOfARewrittenScript(t *testing.T) {
	t.Parallel()
	db := postgres.Start(t, postgres.Options{}).NewDatabase(t)
	admin := connect(t, db.URL)
	mustExec(t, admin, "create table t (v int)")
	ex := newExecutor(t, newPool(t, db.URL), executor.Config{})
	for _, args := range [][]any{nil, {pgx.NamedArgs{}}} {
		mustExec(t, admin, "truncate t")
		err := ex.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
			if err := tx.Queue("insert into t values (1)"); err != nil {
				return err
			}
			_, err := tx.Exec(ctx, "select 1; savepoint a; insert into t select count(*) from t; release a", args...)
			return err
		})
		if got := one(t, admin, "select string_agg(v::text, ' ' order by v) from t"); err != nil || got != "1 1" {
			t.Errorf("%v: %v, the table has %s", args, err, got)
		}
	}
}

// intruder runs something of the caller's where the executor calls back: in a rewriter, an encoder, a tracer.
type intruder struct {
	at  string
	run func()
}

func (i *intruder) come(at string) {
	if run := i.run; i.at == at && run != nil {
		i.run = nil
		run()
	}
}

func (i *intruder) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	i.come("query start")
	return ctx
}

func (i *intruder) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {
	i.come("query end")
}

func (i *intruder) TracePrepareStart(ctx context.Context, _ *pgx.Conn, _ pgx.TracePrepareStartData) context.Context {
	i.come("prepare start")
	return ctx
}

func (i *intruder) TracePrepareEnd(context.Context, *pgx.Conn, pgx.TracePrepareEndData) {
	i.come("prepare end")
}

func (i *intruder) RewriteQuery(_ context.Context, _ *pgx.Conn, sql string, args []any) (string, []any, error) {
	i.come("rewrite")
	return sql, args, nil
}

// intrudingValue is an argument. It is a type of its own, since a rewriter among the arguments is none.
type intrudingValue struct{ i *intruder }

func (v intrudingValue) Value() (driver.Value, error) {
	v.i.come("encode")
	return int64(1), nil
}

// A queue alone is sent without BEGIN and COMMIT. When something of the caller's has used the transaction meanwhile, BEGIN has gone out, and
// the queue must not be left without COMMIT.
func TestTheQueueIsCommittedWhateverRunsMeanwhile(t *testing.T) {
	t.Parallel()
	db := postgres.Start(t, postgres.Options{}).NewDatabase(t)
	admin := connect(t, db.URL)
	mustExec(t, admin, "create table t (v int)")
	for _, at := range []string{"query start", "query end", "prepare start", "prepare end", "rewrite", "encode"} {
		i := &intruder{at: at}
		pool := newPool(t, db.URL, maxConns(1), func(cfg *pgxpool.Config) { cfg.ConnConfig.Tracer = i })
		ex := newExecutor(t, pool, executor.Config{})
		mustExec(t, admin, "truncate t")
		ran := false
		err := ex.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
			i.run = func() {
				ran = true
				if _, err := tx.Exec(ctx, "insert into t values ($1 + 1)", 1); err != nil {
					t.Error(at, err)
				}
			}
			return tx.Queue("insert into t values ($1)", prepare.Stable, i, intrudingValue{i})
		})
		if got := one(t, admin, "select string_agg(v::text, ' ' order by v) from t"); err != nil || !ran || got != "1 2" {
			t.Errorf("%s: %v, ran: %t, the table has %s", at, err, ran, got)
		}
	}
}

// A name that Prepare gave stands for its text in the queue too, and for a text that cuts the transaction in a batch.
func TestTheQueueAndNamesOfPrepare(t *testing.T) {
	t.Parallel()
	db := postgres.Start(t, postgres.Options{}).NewDatabase(t)
	admin := connect(t, db.URL)
	mustExec(t, admin, "create table t (v int)")
	ex := newExecutor(t, newPool(t, db.URL), executor.Config{})
	for _, nested := range []bool{false, true} {
		mustExec(t, admin, "truncate t")
		err := ex.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
			inner := tx
			if nested {
				n, err := tx.Begin(ctx)
				if err != nil {
					return err
				}
				defer func() { _ = n.Commit(ctx) }()
				inner = n.(executor.Tx)
			}
			_, err := inner.Prepare(ctx, "put", "insert into t values ($1)")
			_, cutErr := inner.Prepare(ctx, "cut", "savepoint a")
			if err := errors.Join(err, cutErr, inner.Queue("put", 5)); err != nil {
				return err
			}
			var b pgx.Batch
			b.Queue("cut")
			b.Queue("insert into t select 10 + count(*) from t")
			return errors.Join(inner.SendBatch(ctx, &b).Close(), inner.Queue("put", 6))
		})
		if got := one(t, admin, "select string_agg(v::text, ' ' order by v) from t"); err != nil || got != "5 6 11" {
			t.Errorf("nested %t: %v, the table has %s", nested, err, got)
		}
	}
}

// A text that could not be sent leaves the transaction as it was, and so it leaves its queue.
func TestTheQueueOutlivesACutThatWasNotSent(t *testing.T) {
	t.Parallel()
	for _, nested := range []bool{false, true} {
		for _, busy := range []bool{false, true} {
			_, ex, c := numbers(t, 1, executor.Config{})
			err := ex.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, outer executor.Tx) error {
				in := pgx.Tx(outer)
				if nested {
					var err error
					if in, err = outer.Begin(ctx); err != nil {
						return err
					}
				}
				if _, err := in.Exec(ctx, insertNumber, 1); err != nil {
					return err
				}
				for i := range 2 {
					if err := in.(executor.Tx).Queue(insertNumber, i); err != nil {
						return err
					}
				}
				done, cancel := context.WithCancel(ctx)
				defer cancel()
				if busy {
					rows, err := in.Query(ctx, "select generate_series(1, 3)")
					if err != nil {
						return err
					}
					defer rows.Close()
				} else {
					cancel()
				}
				if _, err := in.Exec(done, "savepoint a"); err == nil {
					t.Error("it could be sent")
				}
				if !nested {
					return nil
				}
				if busy {
					return nil // left to the outer one: rows are open
				}
				return in.Commit(ctx)
			})
			if n := rowsIn(t, c); err != nil || n != 3 {
				t.Errorf("nested %v, busy %v: %d rows of 3, %v", nested, busy, n, err)
			}
		}
	}
}
