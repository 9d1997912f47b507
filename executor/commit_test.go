package executor_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/internal/pgscript"
	"github.com/bounceproof/bounceproof/prepare"
)

const (
	insertA = "insert into a values ($1)"
	insertB = "insert into b values ($1)"
)

// endings are the ways to commit. Each has executed or queued insertA, and insertB last.
var endings = []struct {
	name     string
	opts     pgx.TxOptions
	executed []string
	queued   []string
	implicit bool // one Sync group without BEGIN
}{
	{"COMMIT alone", pgx.TxOptions{}, []string{insertA, insertB}, nil, false},
	{"COMMIT with the queue", pgx.TxOptions{}, []string{insertA}, []string{insertB}, false},
	{"queue only", pgx.TxOptions{}, nil, []string{insertA, insertB}, true},
	{"queue only, with options", pgx.TxOptions{AccessMode: pgx.ReadWrite}, nil, []string{insertA, insertB}, false},
}

// outcome is what a transaction came to.
type outcome struct {
	runs, onCommit int
	err            error
}

func inTx(ctx context.Context, ex *executor.Executor, opts pgx.TxOptions, executed, queued []string) outcome {
	var o outcome
	o.err = ex.InTx(ctx, opts, func(ctx context.Context, tx executor.Tx) error {
		o.runs++
		tx.OnCommit(func() { o.onCommit++ })
		for _, sql := range queued {
			tx.Queue(sql, prepare.Stable, 1)
		}
		for _, sql := range executed {
			if _, err := tx.Exec(ctx, sql, prepare.Stable, 1); err != nil {
				return err
			}
		}
		return nil
	})
	return o
}

// fatal is an error after which PostgreSQL closes the connection.
func fatal(code, message string) *pgproto3.ErrorResponse {
	e := pgscript.ServerError(code, message, "ProcessInterrupts")
	e.Severity, e.SeverityUnlocalized = "FATAL", "FATAL"
	return e
}

func code(err error) string {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) {
		return pgErr.Code
	}
	return ""
}

// An answer to COMMIT is an answer: the transaction was rolled back, the connection is idle, and nothing is left to send.
func TestCommitRefused(t *testing.T) {
	t.Parallel()
	for _, sc := range scenes {
		for _, end := range endings {
			for _, refusal := range []string{"23503", "40001"} {
				s, _ := newScripted(t, sc.o, executor.Config{PreparedStatements: sc.policy})
				if o := inTx(t.Context(), s.ex, end.opts, end.executed, end.queued); o.err != nil {
					t.Fatal(o.err)
				}
				s.b.Define(insertB, pgscript.Statement{
					Params: []uint32{23}, Tag: "INSERT 0 1",
					Fail: pgscript.FailTimes(pgscript.Sync, 1, pgscript.ServerError(refusal, "not now", "PreCommit")),
				})
				s.b.Reset()
				o := inTx(t.Context(), s.ex, end.opts, end.executed, end.queued)
				what := fmt.Sprint(sc.name, ", ", end.name, ", ", refusal)
				switch {
				case code(o.err) != refusal || errors.Is(o.err, executor.ErrCommitUnknown):
					t.Errorf("%s: %v", what, o.err)
				case o.runs != 1 || o.onCommit != 0:
					t.Errorf("%s: %d runs, %d OnCommit", what, o.runs, o.onCommit)
				case s.b.Committed(insertA) != 0 || s.b.Ran(insertA) != 1:
					t.Errorf("%s: ran %d times, committed %d", what, s.b.Ran(insertA), s.b.Committed(insertA))
				case s.b.Connects() != 0:
					t.Errorf("%s: the connection was lost", what)
				}
				if sent := s.b.Sent(); sent[len(sent)-1].SQL == "rollback" {
					t.Errorf("%s: ROLLBACK was sent after it", what)
				}
				if err := s.sane(t.Context()); err != nil {
					t.Errorf("%s: %v", what, err)
				}
			}
		}
	}
}

// A queued statement that fails takes the transaction with it; its error is Commit's.
func TestQueuedStatementFails(t *testing.T) {
	t.Parallel()
	for _, sc := range scenes {
		for _, end := range endings {
			if end.queued == nil {
				continue
			}
			for step, ran := range map[pgscript.Step]int{pgscript.Bind: 1, pgscript.Execute: 1} {
				s, _ := newScripted(t, sc.o, executor.Config{PreparedStatements: sc.policy})
				if o := inTx(t.Context(), s.ex, end.opts, end.executed, end.queued); o.err != nil {
					t.Fatal(o.err)
				}
				s.b.Define(insertB, pgscript.Statement{
					Params: []uint32{23}, Tag: "INSERT 0 1", Fail: pgscript.FailTimes(step, 1, pgscript.ServerError("23505", "twice", "_bt_check_unique")),
				})
				s.b.Reset()
				o := inTx(t.Context(), s.ex, end.opts, end.executed, end.queued)
				what := fmt.Sprint(sc.name, ", ", end.name, ", ", step)
				rollback := slices.Contains(pgscript.Strings(s.b.Sent()), "Query rollback")
				switch {
				case code(o.err) != "23505" || errors.Is(o.err, executor.ErrCommitUnknown):
					t.Errorf("%s: %v", what, o.err)
				case o.runs != 1 || o.onCommit != 0:
					t.Errorf("%s: %d runs, %d OnCommit", what, o.runs, o.onCommit)
				case s.b.Ran(insertA) != ran || s.b.Committed(insertA) != 0:
					t.Errorf("%s: ran %d times, committed %d", what, s.b.Ran(insertA), s.b.Committed(insertA))
				case rollback == end.implicit:
					t.Errorf("%s: ROLLBACK was sent: %t", what, rollback)
				case s.b.Connects() != 0:
					t.Errorf("%s: the connection was lost", what)
				}
				if err := s.sane(t.Context()); err != nil {
					t.Errorf("%s: %v", what, err)
				}
			}
		}
	}
}

// No answer to COMMIT, or one that says nothing of it.
func TestCommitUnknown(t *testing.T) {
	t.Parallel()
	for _, sc := range scenes {
		for _, end := range endings {
			for _, e := range []*pgproto3.ErrorResponse{
				fatal("57P01", "terminating connection due to administrator command"),
				fatal("57P02", "terminating connection because of crash of another server process"),
				pgscript.PoolerError("query timeout"),
				pgscript.PoolerError("server conn crashed?"),
				pgscript.PoolerError("admin forced disconnect"),
				pgscript.PoolerError("a text no version has"),
			} {
				s, _ := newScripted(t, sc.o, executor.Config{PreparedStatements: sc.policy})
				if o := inTx(t.Context(), s.ex, end.opts, end.executed, end.queued); o.err != nil {
					t.Fatal(o.err)
				}
				at := "commit"
				if end.implicit {
					at = insertB
				}
				s.b.Define(at, pgscript.Statement{Params: paramsOf(at), Fail: pgscript.FailTimes(pgscript.Execute, 1, e)})
				s.b.Reset()
				o := inTx(t.Context(), s.ex, end.opts, end.executed, end.queued)
				what := fmt.Sprint(sc.name, ", ", end.name, ", ", e.Message)
				var pgErr *pgconn.PgError
				switch {
				case !errors.Is(o.err, executor.ErrCommitUnknown):
					t.Errorf("%s: %v", what, o.err)
				case !errors.As(o.err, &pgErr) || pgErr.Message != e.Message:
					t.Errorf("%s: the cause is not in %v", what, o.err)
				case o.runs != 1 || o.onCommit != 0:
					t.Errorf("%s: %d runs, %d OnCommit", what, o.runs, o.onCommit)
				case s.b.Ran(insertA) != 1:
					t.Errorf("%s: ran %d times", what, s.b.Ran(insertA))
				}
				if err := s.sane(t.Context()); err != nil {
					t.Errorf("%s: %v", what, err)
				}
			}
		}
	}
}

func paramsOf(sql string) []uint32 {
	if sql == insertA || sql == insertB {
		return []uint32{23}
	}
	return nil
}

// An aborted transaction does not commit, as in pgx.
func TestCommitOfAnAbortedTransaction(t *testing.T) {
	t.Parallel()
	for _, sc := range scenes {
		for _, queue := range []bool{false, true} {
			s, _ := newScripted(t, sc.o, executor.Config{PreparedStatements: sc.policy})
			s.b.Define(insertA, pgscript.Statement{
				Params: []uint32{23}, Tag: "INSERT 0 1", Fail: pgscript.FailTimes(pgscript.Execute, 1, pgscript.ServerError("23505", "twice", "_bt_check_unique")),
			})
			s.b.Reset()
			told := 0
			err := s.ex.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
				tx.OnCommit(func() { told++ })
				if queue {
					tx.Queue(insertB, prepare.Stable, 1)
				}
				if _, err := tx.Exec(ctx, insertA, prepare.Stable, 1); code(err) != "23505" {
					t.Errorf("%s: %v", sc.name, err)
				}
				return nil // and goes on as if nothing had been
			})
			if !errors.Is(err, pgx.ErrTxCommitRollback) || told != 0 || s.b.Committed(insertB) != 0 {
				t.Errorf("%s, with queue %t: %v, %d OnCommit", sc.name, queue, err, told)
			}
			if s.b.Connects() > 1 {
				t.Errorf("%s: the connection was lost", sc.name)
			}
			if err := s.sane(t.Context()); err != nil {
				t.Errorf("%s: %v", sc.name, err)
			}
		}
	}
}

// A transaction that never sent anything ends without traffic.
func TestEmptyTransactionIsSilent(t *testing.T) {
	t.Parallel()
	s, _ := newScripted(t, pgscript.Options{}, executor.Config{})
	if err := s.sane(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.b.Reset()
	for _, end := range []func(pgx.Tx) error{
		func(tx pgx.Tx) error { return tx.Commit(t.Context()) },
		func(tx pgx.Tx) error { return tx.Rollback(t.Context()) },
		func(tx pgx.Tx) error {
			sp, err := tx.Begin(t.Context())
			if err != nil {
				return err
			}
			return errors.Join(sp.Commit(t.Context()), tx.Commit(t.Context()))
		},
	} {
		tx, err := s.ex.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if err := end(tx); err != nil {
			t.Error(err)
		}
	}
	if diff := cmp.Diff([]string{}, pgscript.Strings(s.b.Sent())); diff != "" {
		t.Error(diff)
	}
}
