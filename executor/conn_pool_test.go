package executor_test

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/internal/pgscript"
	"github.com/bounceproof/bounceproof/prepare"
)

// The pool's remaining methods are the pool's.
func TestThePoolsOwnMethods(t *testing.T) {
	ignore := goleak.IgnoreCurrent()
	s, end := newScripted(t, pgscript.Options{}, executor.Config{}, maxConns(2))
	ctx := t.Context()
	if err := s.ex.Ping(ctx); err != nil {
		t.Error(err)
	}
	if diff := cmp.Diff(s.pool.Config().MaxConns, s.ex.Config().MaxConns); diff != "" {
		t.Errorf("Config: %s", diff)
	}
	c := acquire(t, s.ex)
	if n := s.ex.Stat().AcquiredConns(); n != 1 {
		t.Errorf("Stat: %d connections are in use", n)
	}
	old := c.Conn()
	s.ex.Reset()
	if _, err := c.Exec(ctx, insertA, prepare.Stable, 1); err != nil {
		t.Errorf("in use during Reset: %v", err)
	}
	c.Release()
	if next := acquire(t, s.ex); next.Conn() == old {
		t.Error("a connection outlived Reset")
	} else {
		next.Release()
	}
	if err := s.sane(ctx); err != nil {
		t.Error(err)
	}
	held := acquire(t, s.ex)
	if err := s.ex.Close(ctx); err != nil {
		t.Error(err)
	}
	if _, err := held.Exec(ctx, insertA, prepare.Stable, 1); err != nil {
		t.Errorf("acquired before Close: %v", err)
	}
	held.Release()
	_, errAcquire := s.ex.Acquire(ctx)
	for what, err := range map[string]error{
		"Ping": s.ex.Ping(ctx), "Acquire": errAcquire, "AcquireFunc": s.ex.AcquireFunc(ctx, func(*executor.Conn) error { return nil }),
	} {
		if !errors.Is(err, executor.ErrClosed) {
			t.Errorf("closed: %s: %v", what, err)
		}
	}
	end()
	if err := goleak.Find(ignore); err != nil {
		t.Error(err)
	}
}

// A Conn costs what the executor costs: no round trip more, and its own struct.
func TestAConnCostsNothing(t *testing.T) {
	for _, sc := range scenes {
		s, _ := newScripted(t, sc.o, executor.Config{PreparedStatements: sc.policy}, maxConns(1))
		for _, call := range []func(db starter) error{
			func(db starter) error { _, err := db.Exec(t.Context(), insertA, prepare.Stable, 1); return err },
			func(db starter) error {
				tx, err := db.Begin(t.Context())
				if err != nil {
					return err
				}
				if _, err := tx.Exec(t.Context(), insertA, prepare.Stable, 1); err != nil {
					return err
				}
				return tx.Commit(t.Context())
			},
		} {
			trips := func(db starter) int {
				for range 3 {
					if err := call(db); err != nil {
						t.Fatal(err)
					}
				}
				s.b.Reset()
				if err := call(db); err != nil {
					t.Fatal(err)
				}
				return s.b.RoundTrips()
			}
			want := trips(s.ex)
			c := acquire(t, s.ex)
			if got := trips(c); got != want || got == 0 {
				t.Errorf("%s: %d round trips, the executor's are %d", sc.name, got, want)
			}
			c.Release()
		}
	}
}
