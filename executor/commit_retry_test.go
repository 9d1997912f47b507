package executor_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/internal/pgscript"
	"github.com/bounceproof/bounceproof/prepare"
)

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

// A pooler that had no server to give ran nothing: the outcome is known, and there is no second try at once.
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
