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
				s.b.Define(at, pgscript.Statement{Params: paramsOf(at), Tag: "X", Fail: pgscript.FailTimes(pgscript.Execute, 1, e)})
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

// What provably did not happen is run again where nobody has to know, and is named where somebody has.
func TestCommitThatProvablyDidNotHappen(t *testing.T) {
	t.Parallel()
	const gone = "prepared statement did not exist"
	sc := scenes[1] // named, tracked
	for _, end := range endings {
		s, _ := newScripted(t, sc.o, executor.Config{PreparedStatements: sc.policy})
		if o := inTx(t.Context(), s.ex, end.opts, end.executed, end.queued); o.err != nil {
			t.Fatal(o.err)
		}
		s.b.ForgetNames()
		s.b.Reset()
		o := inTx(t.Context(), s.ex, end.opts, end.executed, end.queued)
		if o.err != nil || o.onCommit != 1 {
			t.Errorf("%s: %v, %d OnCommit", end.name, o.err, o.onCommit)
		}
		for _, sql := range []string{insertA, insertB} {
			if s.b.Committed(sql) != 1 {
				t.Errorf("%s: %q was committed %d times", end.name, sql, s.b.Committed(sql))
			}
		}
		if s.ex.Stats().Retries != 1 || s.ex.Stats().Downgrades != 1 {
			t.Errorf("%s: %+v", end.name, s.ex.Stats())
		}
	}
	// Later in a transaction it is that transaction's end, and InTx runs it once more. The second time it is the caller's.
	for _, times := range []int{1, 2} {
		s, _ := newScripted(t, sc.o, executor.Config{PreparedStatements: sc.policy})
		if o := inTx(t.Context(), s.ex, pgx.TxOptions{}, []string{insertA}, []string{insertB}); o.err != nil {
			t.Fatal(o.err)
		}
		s.b.Define(insertB, pgscript.Statement{
			Params: []uint32{23}, Tag: "INSERT 0 1", Fail: pgscript.FailTimes(pgscript.Execute, times, pgscript.PoolerError(gone)),
		})
		s.b.Reset()
		o := inTx(t.Context(), s.ex, pgx.TxOptions{}, []string{insertA}, []string{insertB})
		var lost *executor.PreparedStatementError
		switch {
		case times == 1 && (o.err != nil || o.runs != 2 || o.onCommit != 1 || s.b.Committed(insertA) != 1):
			t.Errorf("once: %v, %d runs, %d OnCommit, committed %d", o.err, o.runs, o.onCommit, s.b.Committed(insertA))
		case times == 2 && (!errors.As(o.err, &lost) || !lost.InTx || errors.Is(o.err, executor.ErrCommitUnknown)):
			t.Errorf("twice: %v", o.err)
		case times == 2 && (o.runs != 2 || o.onCommit != 0 || s.b.Committed(insertA) != 0):
			t.Errorf("twice: %d runs, %d OnCommit, committed %d", o.runs, o.onCommit, s.b.Committed(insertA))
		}
	}
}

// A statement that is lost behind another one of its transaction is the transaction's end: it is not run by itself in another one.
func TestStatementLostLaterInATransaction(t *testing.T) {
	t.Parallel()
	name := prepare.Name(insertB, []uint32{23}, "")
	for _, sc := range scenes {
		if sc.o.Kind == pgscript.Raw && sc.policy == executor.Auto {
			continue // has no names to lose
		}
		for _, e := range []*pgproto3.ErrorResponse{
			pgscript.ServerError("26000", fmt.Sprintf("prepared statement %q does not exist", name), "FetchPreparedStatement"),
			pgscript.PoolerError("prepared statement did not exist"),
		} {
			what := fmt.Sprint(sc.name, ", ", e.Message)
			losing := func() *scripted {
				s, _ := newScripted(t, sc.o, executor.Config{PreparedStatements: sc.policy})
				for range 2 {
					if o := inTx(t.Context(), s.ex, pgx.TxOptions{}, []string{insertA, insertB}, nil); o.err != nil {
						t.Fatal(o.err)
					}
				}
				s.b.Define(insertB, pgscript.Statement{Params: []uint32{23}, Tag: "INSERT 0 1", Fail: pgscript.FailTimes(pgscript.Bind, 1, e)})
				s.b.Reset()
				return s
			}

			s := losing()
			tx, err := s.ex.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if _, err := tx.Exec(t.Context(), insertA, prepare.Stable, 1); err != nil {
				t.Fatal(err)
			}
			_, err = tx.Exec(t.Context(), insertB, prepare.Stable, 1)
			var lost *executor.PreparedStatementError
			if !errors.As(err, &lost) || !lost.InTx || code(err) != e.Code {
				t.Errorf("%s: %v", what, err)
			}
			if _, err := tx.Exec(t.Context(), insertA, prepare.Stable, 1); err == nil {
				t.Errorf("%s: the transaction goes on", what)
			}
			if err := tx.Commit(t.Context()); err == nil || errors.Is(err, executor.ErrCommitUnknown) {
				t.Errorf("%s: %v", what, err)
			}
			if s.b.Committed(insertA)+s.b.Committed(insertB) != 0 {
				t.Errorf("%s: something of it was committed", what)
			}

			if err := s.sane(t.Context()); err != nil {
				t.Errorf("%s: %v", what, err)
			}

			s = losing()
			o := inTx(t.Context(), s.ex, pgx.TxOptions{}, []string{insertA, insertB}, nil)
			if o.err != nil || o.runs != 2 || o.onCommit != 1 || s.b.Committed(insertA) != 1 || s.b.Committed(insertB) != 1 {
				t.Errorf("%s, InTx: %v, %d runs, %d OnCommit, committed %d and %d",
					what, o.err, o.runs, o.onCommit, s.b.Committed(insertA), s.b.Committed(insertB))
			}
			if err := s.sane(t.Context()); err != nil {
				t.Errorf("%s: %v", what, err)
			}
		}
	}
}

// A pooler that had no server to give ran nothing: no riddle, and no second try at once.
func TestCommitWhenThePoolerIsBusy(t *testing.T) {
	t.Parallel()
	for _, sc := range scenes {
		for _, end := range endings[2:] {
			s, _ := newScripted(t, sc.o, executor.Config{PreparedStatements: sc.policy})
			if o := inTx(t.Context(), s.ex, end.opts, end.executed, end.queued); o.err != nil {
				t.Fatal(o.err)
			}
			s.b.Define(insertA, pgscript.Statement{Params: []uint32{23}, Fail: pgscript.FailTimes(pgscript.Bind, 9, pgscript.PoolerError("query_wait_timeout"))})
			s.b.Reset()
			o := inTx(t.Context(), s.ex, end.opts, end.executed, end.queued)
			if code(o.err) != "08P01" || errors.Is(o.err, executor.ErrCommitUnknown) || o.runs != 1 || s.b.Connects() != 0 {
				t.Errorf("%s, %s: %v, %d runs, %d connections", sc.name, end.name, o.err, o.runs, s.b.Connects())
			}
		}
	}
}

// A connection that was closed while it was idle has run nothing: the statement goes elsewhere, unseen.
func TestIdleConnectionClosed(t *testing.T) {
	t.Parallel()
	for _, sc := range scenes {
		for name, do := range map[string]func(s *scripted) error{
			"Exec": func(s *scripted) error {
				_, err := s.ex.Exec(t.Context(), insertA, prepare.Stable, 1)
				return err
			},
			"first of a transaction": func(s *scripted) error { return inTx(t.Context(), s.ex, pgx.TxOptions{}, []string{insertA}, nil).err },
			"queue only":             func(s *scripted) error { return inTx(t.Context(), s.ex, pgx.TxOptions{}, nil, []string{insertA}).err },
		} {
			s, _ := newScripted(t, sc.o, executor.Config{PreparedStatements: sc.policy})
			for range 2 {
				if err := do(s); err != nil {
					t.Fatal(err)
				}
			}
			e := pgscript.PoolerError("client_idle_timeout")
			if sc.o.Kind == pgscript.Direct {
				e = fatal("57P05", "terminating connection due to idle-session timeout")
			}
			s.b.Define(insertA, pgscript.Statement{Params: []uint32{23}, Tag: "INSERT 0 1", Fail: pgscript.FailTimes(pgscript.Bind, 1, e)})
			s.b.Reset()
			downgrades := s.ex.Stats().Downgrades
			if err := do(s); err != nil || s.b.Committed(insertA) != 1 || s.ex.Stats().Downgrades != downgrades {
				t.Errorf("%s, %s: %v, committed %d, %+v", sc.name, name, err, s.b.Committed(insertA), s.ex.Stats())
			}
		}
	}
}

// A context that is done before Commit: nothing is committed, no riddle, and the connection is clean.
func TestCommitWithADoneContext(t *testing.T) {
	t.Parallel()
	for _, sc := range scenes {
		for _, end := range endings {
			s, _ := newScripted(t, sc.o, executor.Config{PreparedStatements: sc.policy})
			for range 2 {
				if o := inTx(t.Context(), s.ex, end.opts, end.executed, end.queued); o.err != nil {
					t.Fatal(o.err)
				}
			}
			s.b.Reset()
			tx, err := s.ex.BeginTx(t.Context(), end.opts)
			if err != nil {
				t.Fatal(err)
			}
			told := false
			etx, ok := tx.(executor.Tx)
			if !ok {
				t.Fatalf("%T", tx)
			}
			etx.OnCommit(func() { told = true })
			for _, sql := range end.executed {
				if _, err := tx.Exec(t.Context(), sql, prepare.Stable, 1); err != nil {
					t.Fatal(err)
				}
			}
			for _, sql := range end.queued {
				etx.Queue(sql, prepare.Stable, 1)
			}
			done, cancel := context.WithCancel(t.Context())
			cancel()
			err = tx.Commit(done)
			what := fmt.Sprint(sc.name, ", ", end.name)
			switch {
			case !errors.Is(err, context.Canceled) || errors.Is(err, executor.ErrCommitUnknown):
				t.Errorf("%s: %v", what, err)
			case told || s.b.Committed(insertA) != 0:
				t.Errorf("%s: OnCommit %t, committed %d", what, told, s.b.Committed(insertA))
			case s.b.Connects() != 0:
				t.Errorf("%s: the connection was lost", what)
			case !errors.Is(tx.Commit(t.Context()), pgx.ErrTxClosed) || !errors.Is(tx.Rollback(t.Context()), pgx.ErrTxClosed):
				t.Errorf("%s: the transaction is not closed", what)
			}
			if err := s.sane(t.Context()); err != nil {
				t.Errorf("%s: %v", what, err)
			}
			if len(end.executed) == 0 {
				continue
			}
			if !slices.Contains(pgscript.Strings(s.b.Sent()), "Query rollback") {
				t.Errorf("%s: no ROLLBACK was sent", what)
			}
		}
	}
}

// A context that ends while COMMIT is unanswered.
func TestCommitWithAContextThatEnds(t *testing.T) {
	t.Parallel()
	for _, sc := range scenes {
		for _, end := range endings {
			s, _ := newScripted(t, sc.o, executor.Config{PreparedStatements: sc.policy})
			for range 2 {
				if o := inTx(t.Context(), s.ex, end.opts, end.executed, end.queued); o.err != nil {
					t.Fatal(o.err)
				}
			}
			ctx, cancel := context.WithCancel(t.Context())
			s.b.Reset()
			// The last request is the one with COMMIT. Its last message stays unread, so nobody knows.
			if o := inTx(t.Context(), s.ex, end.opts, end.executed, end.queued); o.err != nil {
				t.Fatal(o.err)
			}
			n := len(s.b.Sent())
			s.b.Reset()
			stall := s.b.Stall(pgscript.FromClient, n, cancel)
			o := inTx(ctx, s.ex, end.opts, end.executed, end.queued)
			what := fmt.Sprint(sc.name, ", ", end.name)
			switch {
			case !stall.Fired():
				t.Fatalf("%s: no stall; %v", what, o.err)
			case !errors.Is(o.err, executor.ErrCommitUnknown) || !errors.Is(o.err, context.Canceled):
				t.Errorf("%s: %v", what, o.err)
			case o.runs != 1 || o.onCommit != 0:
				t.Errorf("%s: %d runs, %d OnCommit", what, o.runs, o.onCommit)
			}
			if err := s.sane(t.Context()); err != nil {
				t.Errorf("%s: %v", what, err)
			}
		}
	}
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
