package executor_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/prepare"
	"github.com/bounceproof/bounceproof/testenv/place"
)

// queueing is a transaction whose queue and OnCommit functions are watched.
type queueing struct {
	t    *testing.T
	ctx  context.Context
	done []string // names of OnCommit functions that ran
}

const queueInsert = "insert into q (name) values ($1)"

// add queues a row and an OnCommit function of this name.
func (q *queueing) add(tx pgx.Tx, name string) {
	q.t.Helper()
	etx, ok := tx.(executor.Tx)
	if !ok {
		q.t.Fatalf("%T is no executor.Tx", tx)
	}
	etx.Queue(queueInsert, prepare.Stable, name)
	etx.OnCommit(func() { q.done = append(q.done, name) })
}

func (q *queueing) exec(tx pgx.Tx, sql string, args ...any) error {
	_, err := tx.Exec(q.ctx, sql, args...)
	return err
}

// nested runs f in a nested transaction and commits it, or rolls it back if f says so.
func (q *queueing) nested(tx pgx.Tx, f func(tx pgx.Tx) (commit bool)) {
	q.t.Helper()
	nested, err := tx.Begin(q.ctx)
	if err != nil {
		q.t.Fatal(err)
	}
	end := nested.Rollback
	if f(nested) {
		end = nested.Commit
	}
	if err := end(q.ctx); err != nil {
		q.t.Fatal(err)
	}
}

func (q *queueing) must(err error) {
	q.t.Helper()
	if err != nil {
		q.t.Fatal(err)
	}
}

// queueCases: what the transaction does, and which rows and OnCommit functions are left, in order. Rows in capitals were not queued.
var queueCases = []struct {
	name string
	do   func(q *queueing, tx pgx.Tx) error
	rows string
	done string
	fail bool
}{
	{"a queue alone", func(q *queueing, tx pgx.Tx) error {
		q.add(tx, "a")
		q.add(tx, "b")
		return nil
	}, "a b", "a b", false},
	{"a queue and statements", func(q *queueing, tx pgx.Tx) error {
		q.add(tx, "a")
		return q.exec(tx, queueInsert, "B")
	}, "B a", "a", false},
	{"the caller's own error", func(q *queueing, tx pgx.Tx) error {
		q.add(tx, "a")
		q.must(q.exec(tx, queueInsert, "B"))
		return errors.New("own")
	}, "", "", true},
	{"a queued statement that fails", func(q *queueing, tx pgx.Tx) error {
		q.add(tx, "a")
		q.must(q.exec(tx, queueInsert, "B"))
		q.add(tx, "a")
		return nil
	}, "", "", true},
	{"a queue alone that fails", func(q *queueing, tx pgx.Tx) error {
		q.add(tx, "a")
		q.add(tx, "a")
		return nil
	}, "", "", true},
	{"a failed statement that is overlooked", func(q *queueing, tx pgx.Tx) error {
		q.add(tx, "a")
		if q.exec(tx, "select 1 / $1::int", 0) == nil {
			return errors.New("divided by zero")
		}
		return nil
	}, "", "", true},
	{"nested, committed", func(q *queueing, tx pgx.Tx) error {
		q.add(tx, "a")
		q.nested(tx, func(tx pgx.Tx) bool {
			q.add(tx, "b")
			q.must(q.exec(tx, queueInsert, "C"))
			return true
		})
		q.add(tx, "d")
		return nil
	}, "C a b d", "a b d", false},
	{"nested, rolled back", func(q *queueing, tx pgx.Tx) error {
		q.add(tx, "a")
		q.nested(tx, func(tx pgx.Tx) bool {
			q.add(tx, "b")
			q.must(q.exec(tx, queueInsert, "C"))
			return false
		})
		q.add(tx, "d")
		return nil
	}, "a d", "a d", false},
	{"nested twice", func(q *queueing, tx pgx.Tx) error {
		q.nested(tx, func(tx pgx.Tx) bool {
			q.add(tx, "a")
			q.nested(tx, func(tx pgx.Tx) bool {
				q.add(tx, "b")
				return true
			})
			q.nested(tx, func(tx pgx.Tx) bool {
				q.add(tx, "c")
				return false
			})
			return true
		})
		q.nested(tx, func(tx pgx.Tx) bool {
			q.nested(tx, func(tx pgx.Tx) bool {
				q.add(tx, "d")
				q.must(q.exec(tx, queueInsert, "E"))
				return true
			})
			return false
		})
		return nil
	}, "a b", "a b", false},
	{"nested, failed and rolled back", func(q *queueing, tx pgx.Tx) error {
		q.add(tx, "a")
		q.nested(tx, func(tx pgx.Tx) bool {
			q.add(tx, "b")
			if q.exec(tx, "select 1 / $1::int", prepare.Stable, 0) == nil {
				q.t.Error("divided by zero")
			}
			return false
		})
		return nil
	}, "a", "a", false},
	{"savepoints in text", func(q *queueing, tx pgx.Tx) error {
		q.add(tx, "a")
		q.must(q.exec(tx, "savepoint s"))
		q.add(tx, "b") // its row is undone; what OnCommit is to do with it is the caller's affair
		q.must(q.exec(tx, "rollback to savepoint s"))
		q.add(tx, "c")
		q.must(q.exec(tx, "SAVEPOINT t; RELEASE t"))
		return q.exec(tx, queueInsert, "D")
	}, "a c D", "a b c", false},
	{"savepoints in a batch", func(q *queueing, tx pgx.Tx) error {
		q.add(tx, "a")
		var b pgx.Batch
		b.Queue("savepoint s")
		b.Queue(queueInsert, "B")
		b.Queue("rollback to s")
		return tx.SendBatch(q.ctx, &b).Close()
	}, "a", "a", false},
	{"every way into one transaction", func(q *queueing, tx pgx.Tx) error {
		q.add(tx, "z")
		var b pgx.Batch
		b.Queue(queueInsert, "A")
		b.Queue(queueInsert, prepare.Stable, "B")
		q.must(tx.SendBatch(q.ctx, &b).Close())
		_, err := tx.CopyFrom(q.ctx, pgx.Identifier{"q"}, []string{"name"}, pgx.CopyFromRows([][]any{{"C"}}))
		q.must(err)
		q.must(q.exec(tx, "insert into q (name) values ('D'); insert into q (name) values ('E')"))
		_, err = tx.Conn().Exec(q.ctx, "insert into q (name) values ('F')")
		q.must(err)
		_, err = tx.Prepare(q.ctx, "mine", queueInsert)
		q.must(err)
		return q.exec(tx, "mine", "G")
	}, "A B C D E F G z", "z", false},
	{"a deferred constraint", func(q *queueing, tx pgx.Tx) error {
		q.add(tx, "a")
		etx, _ := tx.(executor.Tx)
		etx.Queue("insert into deferred values ($1), ($1)", 1)
		return nil
	}, "", "", true},
	{"a deferred constraint and statements", func(q *queueing, tx pgx.Tx) error {
		q.must(q.exec(tx, queueInsert, "A"))
		etx, _ := tx.(executor.Tx)
		etx.Queue("insert into deferred values (@n), (@n)", pgx.NamedArgs{"n": 1})
		return nil
	}, "", "", true},
	{"arguments that do not fit", func(q *queueing, tx pgx.Tx) error {
		q.add(tx, "a")
		etx, _ := tx.(executor.Tx)
		etx.Queue(queueInsert, struct{}{})
		return nil
	}, "", "", true},
}

func TestQueueAndOnCommit(t *testing.T) {
	for _, p := range place.OneOfEachKind() {
		t.Run(p.String(), func(t *testing.T) {
			t.Parallel()
			st := p.Start(t)
			openServers(t, st, 4)
			plain := connect(t, st.DB.URL)
			mustExec(t, plain, "create table q (id int generated always as identity, name text unique)")
			mustExec(t, plain, "create table deferred (n int unique deferrable initially deferred)")
			for _, policy := range []executor.PreparedStatements{executor.Auto, executor.Shared, executor.Off} {
				ex := newExecutor(t, newPool(t, st.URL, maxConns(1)), executor.Config{PreparedStatements: policy})
				for _, tc := range queueCases {
					t.Run(policy.String()+"/"+tc.name, func(t *testing.T) {
						for _, opts := range []pgx.TxOptions{{}, {IsoLevel: pgx.Serializable}, {}} {
							mustExec(t, plain, "truncate q")
							q := &queueing{t: t, ctx: t.Context()}
							err := ex.InTx(t.Context(), opts, func(_ context.Context, tx executor.Tx) error {
								q.done = nil
								tx.OnCommit(func() {
									if got := one(t, plain, "select count(*) from q"); got == "0" {
										t.Error("OnCommit ran before the commit")
									}
								})
								return tc.do(q, tx)
							})
							if (err != nil) != tc.fail {
								t.Errorf("error %v", err)
							}
							if rows := one(t, plain, "select coalesce(string_agg(name, ' ' order by id), '') from q"); rows != tc.rows {
								t.Errorf("rows %q, want %q", rows, tc.rows)
							}
							if done := strings.Join(q.done, " "); done != tc.done {
								t.Errorf("OnCommit %q, want %q", done, tc.done)
							}
						}
					})
				}
				t.Run(policy.String()+"/panic", func(t *testing.T) {
					func() {
						defer func() {
							if r := recover(); r != "own" {
								t.Errorf("recovered %v", r)
							}
						}()
						_ = ex.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
							_, err := tx.Exec(ctx, "truncate q; insert into q (name) values ('x')")
							if err != nil {
								t.Error(err)
							}
							panic("own")
						})
					}()
					var n int
					if err := ex.QueryRow(t.Context(), "select count(*) from q where name = $1", "x").Scan(&n); err != nil || n != 0 {
						t.Errorf("%d rows, %v", n, err)
					}
				})
			}
		})
	}
}
