package executor_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/internal/pgscript"
	"github.com/bounceproof/bounceproof/prepare"
)

// A context that is done before Commit: nothing is committed, the error says so, and the connection is clean.
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
