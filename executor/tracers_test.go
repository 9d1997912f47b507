package executor_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/prepare"
	"github.com/bounceproof/bounceproof/testenv/place"
)

// events is a tracer of every kind that writes down what it is told, and checks that an end belongs to its start.
type events struct {
	mu    sync.Mutex
	lines []string
	open  map[int]string
	next  int
}

type eventKey struct{}

func (e *events) start(ctx context.Context, conn *pgx.Conn, what string) context.Context {
	e.mu.Lock()
	defer e.mu.Unlock()
	if conn == nil {
		what += " (no connection)"
	}
	e.lines = append(e.lines, "start "+what)
	if e.open == nil {
		e.open = map[int]string{}
	}
	e.next++
	e.open[e.next] = what
	return context.WithValue(ctx, eventKey{}, e.next)
}

func (e *events) end(ctx context.Context, conn *pgx.Conn, what string, tag pgconn.CommandTag, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	id, ok := ctx.Value(eventKey{}).(int)
	if !ok || e.open[id] == "" || conn == nil {
		what += " (without a start, or twice)"
	}
	if what != "batch query" {
		delete(e.open, id)
	}
	var pgErr *pgconn.PgError
	outcome := "ok"
	switch {
	case errors.As(err, &pgErr):
		outcome = pgErr.Code
	case err != nil:
		outcome = "error"
	}
	e.lines = append(e.lines, fmt.Sprintf("end %s: %q, %s", what, tag, outcome))
}

func (e *events) TraceQueryStart(ctx context.Context, conn *pgx.Conn, d pgx.TraceQueryStartData) context.Context {
	return e.start(ctx, conn, fmt.Sprintf("query %s %v", d.SQL, d.Args))
}

func (e *events) TraceQueryEnd(ctx context.Context, conn *pgx.Conn, d pgx.TraceQueryEndData) {
	e.end(ctx, conn, "query", d.CommandTag, d.Err)
}

func (e *events) TraceBatchStart(ctx context.Context, conn *pgx.Conn, d pgx.TraceBatchStartData) context.Context {
	return e.start(ctx, conn, fmt.Sprintf("batch of %d", d.Batch.Len()))
}

func (e *events) TraceBatchQuery(ctx context.Context, conn *pgx.Conn, d pgx.TraceBatchQueryData) {
	e.end(ctx, conn, "batch query", d.CommandTag, d.Err)
	e.lines[len(e.lines)-1] += fmt.Sprintf(" %s %v", d.SQL, d.Args)
}

func (e *events) TraceBatchEnd(ctx context.Context, conn *pgx.Conn, d pgx.TraceBatchEndData) {
	e.end(ctx, conn, "batch", pgconn.CommandTag{}, d.Err)
}

func (e *events) TraceCopyFromStart(ctx context.Context, conn *pgx.Conn, d pgx.TraceCopyFromStartData) context.Context {
	return e.start(ctx, conn, fmt.Sprintf("copy %v %v", d.TableName, d.ColumnNames))
}

func (e *events) TraceCopyFromEnd(ctx context.Context, conn *pgx.Conn, d pgx.TraceCopyFromEndData) {
	e.end(ctx, conn, "copy", d.CommandTag, d.Err)
}

func (e *events) TracePrepareStart(ctx context.Context, conn *pgx.Conn, d pgx.TracePrepareStartData) context.Context {
	return e.start(ctx, conn, "prepare "+d.SQL)
}

func (e *events) TracePrepareEnd(ctx context.Context, conn *pgx.Conn, d pgx.TracePrepareEndData) {
	e.end(ctx, conn, "prepare", pgconn.CommandTag{}, d.Err)
}

// take returns what was written down, and starts anew. Preparations stand apart: when a text is learnt is each library's own affair.
func (e *events) take() (lines []string, prepared int, left map[int]string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, line := range e.lines {
		if strings.HasPrefix(line, "start prepare ") {
			prepared++
		}
		if !strings.Contains(line, " prepare") {
			lines = append(lines, line)
		}
	}
	left = e.open
	e.lines, e.open = nil, nil
	return lines, prepared, left
}

var errTracer = errors.New("no")

var traced = []struct {
	name string
	do   func(ctx context.Context, db starter)
}{
	{"Exec", func(ctx context.Context, db starter) {
		_, _ = db.Exec(ctx, insertH, 1, 1)
		_, _ = db.Exec(ctx, insertH, prepare.Stable, 1, 1)
		_, _ = db.Exec(ctx, "select 1; select 2")
		_, _ = db.Exec(ctx, "selec", 1)
		_, _ = db.Exec(ctx, "select $1::int", 1, 2)
		_, _ = db.Exec(ctx, "select @a::int", pgx.NamedArgs{"a": 1})
		_, _ = db.Exec(ctx, "select 1", rewriter{errTracer}, 1)
		_, _ = db.Exec(ctx, "select $1", pgx.QueryExecModeSimpleProtocol, 1)
		_, _ = db.Exec(ctx, "select @a::int", pgx.QueryExecModeExec, pgx.NamedArgs{"a": 1})
	}},
	{"Query", func(ctx context.Context, db starter) {
		for _, args := range [][]any{{2}, {prepare.Stable, 2}, {pgx.QueryResultFormats{pgx.TextFormatCode}, 2}, {pgx.QueryExecModeExec, 2}, {}, {"x"}, {1, 2}} {
			rows, err := db.Query(ctx, "select g from generate_series(1, $1::int) g", args...)
			if err == nil {
				for rows.Next() {
				}
			}
		}
		rows, err := db.Query(ctx, "select 1 / (g - 2) from generate_series(1, $1) g", 5)
		if err == nil {
			rows.Next()
			rows.Next()
			rows.Close()
		}
		rows, err = db.Query(ctx, "select g from generate_series(1, $1) g", 3)
		if err == nil {
			rows.Close()
		}
	}},
	{"QueryRow", func(ctx context.Context, db starter) {
		var n int
		_ = db.QueryRow(ctx, "select $1::int", 1).Scan(&n)
		_ = db.QueryRow(ctx, "select $1::int", prepare.Stable, 1).Scan(&n)
		_ = db.QueryRow(ctx, "select 1 where $1", false).Scan(&n)
		_ = db.QueryRow(ctx, "select $1::text", "not a number").Scan(&n)
		_ = db.QueryRow(ctx, "").Scan(&n)
	}},
	{"SendBatch", func(ctx context.Context, db starter) {
		_ = db.SendBatch(ctx, &pgx.Batch{}).Close()
		for _, k := range []int{1, 0} {
			var b pgx.Batch
			b.Queue("delete from h where id = $1", 1) // without Stable: pgx shows what the rewriters left
			b.Queue("select 1 / $1::int", k)
			b.Queue("select g from generate_series(1, $1) g", 2)
			_ = db.SendBatch(ctx, &b).Close()
			results := db.SendBatch(ctx, &b)
			var n int
			_, _ = results.Exec()
			_ = results.QueryRow().Scan(&n)
			if rows, err := results.Query(); err == nil {
				for rows.Next() {
				}
			}
			_ = results.Close()
			results = db.SendBatch(ctx, &b)
			_, _ = results.Exec()
			_ = results.Close()
		}
	}},
	{"CopyFrom", func(ctx context.Context, db starter) {
		_, _ = db.Exec(ctx, "delete from h")
		for range 2 {
			_, _ = db.CopyFrom(ctx, pgx.Identifier{"h"}, []string{"id", "n"}, pgx.CopyFromRows([][]any{{8, 8}, {9, 9}}))
		}
	}},
	{"Begin", func(ctx context.Context, db starter) {
		tx, err := db.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.Serializable})
		if err != nil {
			return
		}
		_, _ = tx.Exec(ctx, "delete from h where id < $1", prepare.Stable, 100)
		var n int
		_ = tx.QueryRow(ctx, "select $1::int", 1).Scan(&n)
		_, _ = tx.Exec(ctx, "select 1; select 2")
		_, _ = tx.CopyFrom(ctx, pgx.Identifier{"h"}, []string{"id"}, pgx.CopyFromRows([][]any{{1}}))
		var b pgx.Batch
		b.Queue(insertH, 2, 2)
		_ = tx.SendBatch(ctx, &b).Close()
		_ = tx.Commit(ctx)
		_ = tx.Rollback(ctx)
		tx, err = db.Begin(ctx)
		if err != nil {
			return
		}
		_, _ = tx.Exec(ctx, insertH, prepare.Stable, 1, 1)
		_, _ = tx.Exec(ctx, insertH, prepare.Stable, 3, 1)
		_ = tx.Rollback(ctx)
		tx, err = db.Begin(ctx)
		if err != nil {
			return
		}
		_, _ = tx.Exec(ctx, insertH, 1, 1)
		_ = tx.Commit(ctx)
	}},
	{"nested", func(ctx context.Context, db starter) {
		_ = pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
			_, _ = tx.Exec(ctx, "delete from h where id < $1", 100)
			return errors.Join(pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
				_, err := tx.Exec(ctx, insertH, prepare.Stable, 1, 1)
				return err
			}), func() error {
				nested, err := tx.Begin(ctx)
				if err != nil {
					return err
				}
				_, _ = nested.Exec(ctx, insertH, prepare.Stable, 1, 1)
				return nested.Rollback(ctx)
			}())
		})
	}},
}

// TestTracers compares what pgx's tracers are told on a bare pool and on an executor: the same starts and ends, in the same order, with the
// same text, arguments, tag and error.
func TestTracers(t *testing.T) {
	for _, p := range place.OneOfEachKind() {
		t.Run(p.String(), func(t *testing.T) {
			t.Parallel()
			st := p.Start(t)
			plain := connect(t, st.DB.URL)
			var bareEvents events
			bare := newPool(t, st.DB.URL, maxConns(1), func(cfg *pgxpool.Config) {
				cfg.ConnConfig.Tracer, cfg.ConnConfig.DefaultQueryExecMode = &bareEvents, pgx.QueryExecModeCacheDescribe
			})
			for _, policy := range []executor.PreparedStatements{executor.Auto, executor.Shared} {
				var exEvents events
				pool := newPool(t, st.URL, maxConns(1), func(cfg *pgxpool.Config) { cfg.ConnConfig.Tracer = &exEvents })
				ex := newExecutor(t, pool, executor.Config{PreparedStatements: policy})
				if _, err := ex.Topology(t.Context()); err != nil {
					t.Fatal(err)
				}
				prepared := 0
				for _, op := range traced {
					t.Run(policy.String()+"/"+op.name, func(t *testing.T) {
						for run := range 3 {
							mustExec(t, plain, "drop table if exists h; create table h (id int primary key, n int)")
							op.do(t.Context(), bare)
							want, _, _ := bareEvents.take()
							mustExec(t, plain, "drop table if exists h; create table h (id int primary key, n int)")
							op.do(t.Context(), ex)
							got, n, left := exEvents.take()
							prepared += n
							if len(want) == 0 || !cmp.Equal(want, got) {
								t.Errorf("run %d: pgx (-) and the executor (+) tell different stories:\n%s", run, cmp.Diff(want, got))
							}
							if len(left) > 0 {
								t.Errorf("started and never ended: %v", left)
							}
						}
					})
				}
				if prepared == 0 {
					t.Error("learning was never shown")
				}
			}
		})
	}
}

// A tracer may run statements in the transaction that it is told about. What opens the transaction has gone out with those then, and goes once:
// a second SAVEPOINT of the same name would keep them when the nested transaction is rolled back.
func TestATracerInANestedTransaction(t *testing.T) {
	t.Parallel()
	st := place.New(place.Direct, "", "15").Start(t)
	admin := connect(t, st.DB.URL)
	mustExec(t, admin, "create table t (v int)")
	for name, do := range map[string]func(ctx context.Context, tx pgx.Tx) error{
		"Exec": func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, "insert into t values ($1)", prepare.Stable, 1)
			return err
		},
		"SendBatch": func(ctx context.Context, tx pgx.Tx) error {
			var b pgx.Batch
			b.Queue("insert into t values ($1)", prepare.Stable, 1)
			return tx.SendBatch(ctx, &b).Close()
		},
		"CopyFrom": func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.CopyFrom(ctx, pgx.Identifier{"t"}, []string{"v"}, pgx.CopyFromRows([][]any{{1}}))
			return err
		},
		"Prepare": func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Prepare(ctx, "a", "insert into t values ($1)")
			return err
		},
	} {
		for _, at := range []string{"query start", "query end", "prepare start", "prepare end"} {
			i := &intruder{at: at}
			ex := newExecutor(t, newPool(t, st.URL, maxConns(1), func(cfg *pgxpool.Config) { cfg.ConnConfig.Tracer = i }), executor.Config{})
			err := ex.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
				nested, err := tx.Begin(ctx)
				if err != nil {
					return err
				}
				i.run = func() {
					if _, err := nested.Exec(ctx, "insert into t values ($1 + 1)", 1); err != nil {
						t.Error(name, at, err)
					}
				}
				return errors.Join(do(ctx, nested), nested.Rollback(ctx))
			})
			if got := one(t, admin, "select string_agg(v::text, ' ' order by v) from t"); err != nil || got != "NULL" {
				t.Errorf("%s, %s: %v, the table has %s", name, at, err, got)
			}
			mustExec(t, admin, "truncate t")
		}
	}
}
