package executor_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/internal/pgscript"
	"github.com/bounceproof/bounceproof/prepare"
)

// question is a call that has to give the number it was asked for, or an error.
type question struct {
	name string
	ask  func(ctx context.Context, ex *executor.Executor, n int) (int, error)
}

const (
	askOnce  = "select $1::int4"
	askTwice = "select $1::int4, 2"
)

var questions = []question{
	{"Exec", func(ctx context.Context, ex *executor.Executor, n int) (int, error) {
		_, err := ex.Exec(ctx, "insert into numbers values ($1)", prepare.Stable, n)
		return n, err
	}},
	{"QueryRow", func(ctx context.Context, ex *executor.Executor, n int) (got int, err error) {
		err = ex.QueryRow(ctx, askOnce, prepare.Stable, n).Scan(&got)
		return got, err
	}},
	{"QueryRow, unmarked", func(ctx context.Context, ex *executor.Executor, n int) (got int, err error) {
		err = ex.QueryRow(ctx, "select $1::int4, 3", n).Scan(&got, nil)
		return got, err
	}},
	{"Query", func(ctx context.Context, ex *executor.Executor, n int) (got int, err error) {
		rows, err := ex.Query(ctx, "select $1::int4 from generate_series(1, 3)", prepare.Stable, n)
		if err != nil {
			return 0, err
		}
		return pgx.CollectOneRow(rows, pgx.RowTo[int])
	}},
	{"Query, given up after a row", func(ctx context.Context, ex *executor.Executor, n int) (got int, err error) {
		rows, err := ex.Query(ctx, "select $1::int4 from generate_series(1, 3)", prepare.Stable, n)
		if err != nil {
			return 0, err
		}
		defer rows.Close()
		if !rows.Next() {
			return 0, rows.Err()
		}
		return n, rows.Scan(&got)
	}},
	{"SendBatch", func(ctx context.Context, ex *executor.Executor, n int) (got int, err error) {
		var b pgx.Batch
		b.Queue(askOnce, prepare.Stable, n)
		b.Queue("insert into numbers values ($1)", prepare.Stable, n)
		br := ex.SendBatch(ctx, &b)
		err = br.QueryRow().Scan(&got)
		return got, errors.Join(err, br.Close())
	}},
	{"transaction", func(ctx context.Context, ex *executor.Executor, n int) (got int, err error) {
		tx, err := ex.Begin(ctx)
		if err != nil {
			return 0, err
		}
		defer func() { _ = tx.Rollback(ctx) }()
		if err := tx.QueryRow(ctx, askOnce, prepare.Stable, n).Scan(&got); err != nil {
			return 0, err
		}
		if err := tx.QueryRow(ctx, "select $1::int4, 4", prepare.Stable, n).Scan(&got, nil); err != nil {
			return 0, err
		}
		return got, tx.Commit(ctx)
	}},
	{"InTx with a queue", func(ctx context.Context, ex *executor.Executor, n int) (got int, err error) {
		err = ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
			tx.Queue("insert into numbers values ($1)", prepare.Stable, n)
			return tx.QueryRow(ctx, askOnce, prepare.Stable, n).Scan(&got)
		})
		return got, err
	}},
	{"queue only", func(ctx context.Context, ex *executor.Executor, n int) (int, error) {
		return n, ex.InTx(ctx, pgx.TxOptions{}, func(_ context.Context, tx executor.Tx) error {
			tx.Queue("insert into numbers values ($1)", prepare.Stable, n)
			return nil
		})
	}},
	{"CopyFrom", func(ctx context.Context, ex *executor.Executor, n int) (int, error) {
		_, err := ex.CopyFrom(ctx, pgx.Identifier{"numbers"}, []string{"n"}, pgx.CopyFromRows([][]any{{n}}))
		return n, err
	}},
}

// asked asks questions in ways that use every kind of request, and compares each answer. A group comes first: a single statement does not
// mind answers that it did not ask for.
func asked(ctx context.Context, ex *executor.Executor, n int) error {
	var got int
	var b pgx.Batch
	b.Queue(askOnce, n)
	br := ex.SendBatch(ctx, &b)
	err := br.QueryRow().Scan(&got)
	if err = errors.Join(err, br.Close()); err != nil || got != n {
		return fmt.Errorf("a batch answered %d instead of %d, %w", got, n, err)
	}
	for i, sql := range []string{askTwice, askOnce, askTwice} {
		var got int
		args := []any{n + i}
		if i < 2 {
			args = []any{prepare.Stable, n + i}
		}
		dest := []any{&got, nil}
		if sql == askOnce {
			dest = dest[:1]
		}
		if err := ex.QueryRow(ctx, sql, args...).Scan(dest...); err != nil || got != n+i {
			return fmt.Errorf("%s answered %d instead of %d, %w", sql, got, n+i, err)
		}
	}
	return nil
}

// numbersBackend gives the questions' texts their columns.
func defineQuestions(b *pgscript.Backend) {
	for _, sql := range []string{askTwice, "select $1::int4, 3", "select $1::int4, 4"} {
		b.Define(sql, pgscript.Statement{
			Params: []uint32{23}, Columns: []pgscript.Column{{Name: "n", OID: 23}, {Name: "m", OID: 23}}, Tag: "SELECT 1",
			Rows: func(args []string) [][]string { return [][]string{{args[0], "2"}} },
		})
	}
	b.Define("select $1::int4 from generate_series(1, 3)", pgscript.Statement{
		Params: []uint32{23}, Columns: []pgscript.Column{{Name: "n", OID: 23}}, Tag: "SELECT 3",
		Rows: func(args []string) [][]string { return [][]string{{args[0]}, {args[0]}, {args[0]}} },
	})
	b.Define(`select "n" from "numbers"`, pgscript.Statement{Columns: []pgscript.Column{{Name: "n", OID: 23}}, Tag: "SELECT 0"})
}

// TestContextEndsAtAnyLook ends the context at each of the looks that pgx or the executor take at it. The answer is right, or an error that
// says so, and the pool gives right answers afterwards.
func TestContextEndsAtAnyLook(t *testing.T) {
	t.Parallel()
	for _, sc := range scenes {
		t.Run(sc.name, func(t *testing.T) {
			t.Parallel()
			lates := []int{0, 1000}
			if sc.o.Kind == pgscript.Direct {
				lates = []int{0, 1, 2, 1000}
			}
			for _, q := range questions {
				for _, warm := range []bool{false, true} {
					for _, late := range lates {
						looks := 0
						for k := 1; ; k++ {
							if k > 200 {
								t.Fatalf("%s: no end of looks", q.name)
							}
							s, end := newScripted(t, sc.o, executor.Config{PreparedStatements: sc.policy, StatementCapacity: 2}, maxConns(1))
							defineQuestions(s.b)
							if warm {
								for i := range 2 {
									if _, err := q.ask(t.Context(), s.ex, i); err != nil {
										t.Fatalf("%s: %v", q.name, err)
									}
								}
							}
							// One name evicted, so that a Close is owed.
							if err := asked(t.Context(), s.ex, 10); err != nil {
								t.Fatal(err)
							}
							before := s.ex.Stats()
							ctx := pgscript.TripAt(t.Context(), k, late)
							got, err := q.ask(ctx, s.ex, 4000)
							tripped := ctx.Tripped()
							what := fmt.Sprintf("%s, warm %t, late %d, look %d", q.name, warm, late, k)
							switch {
							case err == nil && got != 4000:
								t.Errorf("%s: answered %d", what, got)
							case err != nil && !tripped:
								t.Errorf("%s: %v", what, err)
							case err != nil && !errors.Is(err, context.Canceled):
								t.Errorf("%s: the error does not say that the context ended: %v", what, err)
							}
							if err := givenBack(s.pool); err != nil {
								t.Errorf("%s: %v", what, err)
							}
							if err := asked(t.Context(), s.ex, 5000); err != nil {
								t.Errorf("%s: afterwards %v", what, err)
							}
							if after := s.ex.Stats(); after.Downgrades != before.Downgrades {
								t.Errorf("%s: a downgrade", what)
							}
							end()
							if !tripped {
								break
							}
							looks++
						}
						if looks == 0 {
							t.Errorf("%s never looked at its context", q.name)
						}
					}
				}
			}
		})
	}
}

// TestContextEndsAtAnyMessage ends it while the backend has got so much of a request and says nothing, or has sent so much of an answer.
func TestContextEndsAtAnyMessage(t *testing.T) {
	t.Parallel()
	for _, sc := range scenes {
		t.Run(sc.name, func(t *testing.T) {
			t.Parallel()
			for _, q := range questions {
				s, end := newScripted(t, sc.o, executor.Config{PreparedStatements: sc.policy}, maxConns(1))
				defineQuestions(s.b)
				for _, side := range []pgscript.Side{pgscript.FromClient, pgscript.FromServer} {
					for n := 1; ; n++ {
						for i := range 2 {
							if _, err := q.ask(t.Context(), s.ex, i); err != nil {
								t.Fatalf("%s: %v", q.name, err)
							}
						}
						s.b.Reset()
						ctx, cancel := context.WithCancel(t.Context())
						stall := s.b.Stall(side, n, cancel)
						got, err := q.ask(ctx, s.ex, 4000)
						cancel()
						fired := stall.Fired()
						s.b.Reset()
						what := fmt.Sprintf("%s, side %d, message %d", q.name, side, n)
						switch {
						case err == nil && got != 4000:
							t.Errorf("%s: answered %d", what, got)
						case err == nil && fired && q.name != "Query, given up after a row":
							t.Errorf("%s: no error", what)
						case err != nil && (!fired || !errors.Is(err, context.Canceled)):
							t.Errorf("%s: %v", what, err)
						}
						if err := givenBack(s.pool); err != nil {
							t.Errorf("%s: %v", what, err)
						}
						if err := asked(t.Context(), s.ex, 5000); err != nil {
							t.Errorf("%s: afterwards %v", what, err)
						}
						if !fired {
							break
						}
					}
				}
				if d := s.ex.Stats().Downgrades; d > 1 || d == 1 && sc.name != "unprepared" {
					t.Errorf("%s: %d downgrades", q.name, d)
				}
				end()
			}
		})
	}
}

// The checks above see a request that was left in pgx's buffer.
func TestAskedSeesALeftPrefix(t *testing.T) {
	t.Parallel()
	seen := 0
	for _, sc := range scenes {
		s, _ := newScripted(t, sc.o, executor.Config{PreparedStatements: sc.policy}, maxConns(1))
		defineQuestions(s.b)
		if err := asked(t.Context(), s.ex, 10); err != nil {
			t.Fatal(err)
		}
		done, cancel := context.WithCancel(t.Context())
		cancel()
		err := s.pool.AcquireFunc(t.Context(), func(c *pgxpool.Conn) error {
			pg := c.Conn().PgConn()
			// What a caller of pgconn does who does not look first.
			pg.Frontend().SendParse(&pgproto3.Parse{Query: "select 999"})
			pg.Frontend().SendBind(&pgproto3.Bind{})
			pg.Frontend().SendDescribe(&pgproto3.Describe{ObjectType: 'P'})
			pg.Frontend().SendExecute(&pgproto3.Execute{})
			_, err := pg.ExecPrepared(done, "", nil, nil, nil).Close()
			if !pgconn.SafeToRetry(err) {
				t.Error(err)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		if asked(t.Context(), s.ex, 20) != nil {
			seen++
		}
	}
	if seen != len(scenes) {
		t.Errorf("seen %d times of %d", seen, len(scenes))
	}
}

// A ROLLBACK that the caller's context does not bound is bounded all the same: nobody waits for a server that does not answer.
func TestRollbackDoesNotWaitForAServerThatDoesNotAnswer(t *testing.T) {
	t.Parallel()
	for name, queue := range map[string]bool{"the closure fails": false, "a queued statement fails": true} {
		synctest.Test(t, func(t *testing.T) {
			s, end := newScripted(t, pgscript.Options{}, executor.Config{}, maxConns(1))
			defer end()
			if o := inTx(t.Context(), s.ex, pgx.TxOptions{}, []string{insertA}, []string{insertB}); o.err != nil {
				t.Fatal(o.err)
			}
			s.b.Reset()
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			start := time.Now()
			failed := errors.New("failed")
			err := s.ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
				if _, err := tx.Exec(ctx, insertA, prepare.Stable, 1); err != nil {
					return err
				}
				if !queue {
					s.b.Stall(pgscript.FromClient, 1, nil)
					cancel()
					return failed
				}
				s.b.Define(insertB, pgscript.Statement{
					Params: []uint32{23}, Fail: pgscript.FailTimes(pgscript.Execute, 1, pgscript.ServerError("23505", "twice", "_bt_check_unique")),
				})
				tx.Queue(insertB, prepare.Stable, 1)
				s.b.Stall(pgscript.FromClient, 3+4+1+1, nil) // behind the statement, COMMIT and Sync
				return nil
			})
			if !queue && !errors.Is(err, failed) || queue && code(err) != "23505" {
				t.Errorf("%s: %v", name, err)
			}
			if took := time.Since(start); took > 20*time.Second || took == 0 {
				t.Errorf("%s: it took %v", name, took)
			}
			if err := s.sane(t.Context()); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		})
	}
}
