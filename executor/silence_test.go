package executor_test

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/internal/pgscript"
)

// A server that reports an error and then says nothing more, at each place of each kind of answer, ends every call within a minute or two, without
// a deadline of the caller's. The connection is closed, and the next calls are right.
func TestSilenceAfterAnErrorEndsTheCall(t *testing.T) {
	t.Parallel()
	failure := pgscript.ServerError("42P01", "no table", "parserOpenTable")
	for _, sc := range scenes {
		for _, r := range requests {
			t.Run(sc.name+", "+r.name, func(t *testing.T) {
				t.Parallel()
				synctest.Test(t, func(t *testing.T) {
					s, end := newScripted(t, sc.o, executor.Config{PreparedStatements: sc.policy})
					defer end()
					ctx := t.Context()
					k := 1000
					if err := errors.Join(r.run(ctx, s, k), s.sane(ctx)); err != nil {
						t.Fatal("as it is:", err)
					}
					cells, waited := 0, 0
					for n := 1; ; n++ {
						if err := s.ready(ctx); err != nil {
							t.Fatal(err)
						}
						s.b.Reset()
						k++
						trigger := s.b.Stall(pgscript.FromServer, n, nil)
						s.b.Insert(n, failure)
						began := time.Now()
						err := r.run(ctx, s, k)
						if !trigger.Fired() {
							break
						}
						cells++
						took := time.Since(began)
						if took >= time.Minute {
							waited++
						}
						if wrong := judge(s, r, "", err); wrong != nil {
							t.Errorf("message %d: %v", n, wrong)
						}
						if took > 3*time.Minute {
							t.Errorf("message %d: it took %v", n, took)
						}
					}
					t.Logf("%d cells, %d of them silent", cells, waited)
					if cells == 0 || waited < cells/2 {
						t.Errorf("of %d cells only %d were waited for", cells, waited)
					}
				})
			})
		}
	}
}

// The control: without an error in front, an answer may take as long as it takes.
func TestAnAnswerMayTakeHours(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s, end := newScripted(t, pgscript.Options{}, executor.Config{})
		defer end()
		s.b.OnExecute(func(sql string) *pgproto3.ErrorResponse {
			if sql == insertRow {
				time.Sleep(5 * time.Hour)
			}
			return nil
		})
		tag, err := s.ex.Exec(t.Context(), insertRow, 1)
		if err != nil || tag.RowsAffected() != 1 {
			t.Error(tag, err)
		}
	})
}
