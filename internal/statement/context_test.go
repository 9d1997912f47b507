package statement_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/internal/pgscript"
	"github.com/bounceproof/bounceproof/internal/statement"
)

// Whatever a context does to a request, the connection is closed or the next statement gets its own answer. The trap is a prefix of Close
// and Parse that stays in pgx's buffer.
func TestContextThatEndsAtAnyLook(t *testing.T) {
	t.Parallel()
	b := pgscript.New(t, pgscript.Options{})
	calls := map[string]func(ctx context.Context, w *wire, d *statement.Description) error{
		"learn": func(ctx context.Context, w *wire, _ *statement.Description) error {
			_, err := w.k.Lookup("select 5, $1", true).Learn(ctx, w.c, nil)
			return err
		},
		"learn with begin": func(ctx context.Context, w *wire, _ *statement.Description) error {
			_, err := w.k.Lookup("select 6, $1", true).Learn(ctx, w.c, &[]string{"begin"})
			return err
		},
		"group": func(ctx context.Context, w *wire, d *statement.Description) error {
			g := w.c.NewGroup()
			if err := g.Add(statement.Execution{Description: d, Strategy: fallback.Named, Args: []any{3}}); err != nil {
				return err
			}
			_, err := finish(ctx, g)
			return err
		},
	}
	for _, s := range []fallback.Strategy{fallback.Unprepared, fallback.Named, fallback.Shared} {
		calls[s.String()] = func(ctx context.Context, w *wire, d *statement.Description) error {
			_, err := w.run(ctx, statement.Execution{Description: d, Strategy: s, Parse: true, Args: []any{3}})
			return err
		}
	}
	for name, call := range calls {
		for _, late := range []int{0, 1, 2, 1000} {
			for k := 1; ; k++ {
				if k > 50 {
					t.Fatalf("%s: no end of looks", name)
				}
				w := dialWire(t, b, 1)
				d, other := w.learn(selectArg), w.learn("select 2, $1")
				// One name evicted, so that a Close is owed too.
				for range 2 {
					if _, err := w.run(t.Context(), statement.Execution{Description: other, Strategy: fallback.Named, Args: []any{1}}); err != nil {
						t.Fatal(err)
					}
				}
				ctx := pgscript.TripAt(t.Context(), k, late)
				err := call(ctx, w, d)
				tripped := ctx.Tripped()
				if err != nil && !tripped {
					t.Fatalf("%s, look %d: %v", name, k, err)
				}
				if err != nil && prepareLost(err) {
					t.Errorf("%s, look %d: the name was bound without its Parse: %v", name, k, err)
				}
				if err := w.answersRightly(other); err != nil {
					t.Errorf("%s, look %d, late %d: %v", name, k, late, err)
				}
				_ = w.c.Conn().Close(context.Background())
				if !tripped {
					break
				}
			}
		}
	}
}

func prepareLost(err error) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && pgErr.Code == "26000"
}

// answersRightly checks that the connection is closed, or gives every statement its own answer.
func (w *wire) answersRightly(d *statement.Description) error {
	if w.c.PgConn().IsClosed() {
		return nil
	}
	if w.c.PgConn().IsBusy() {
		return fmt.Errorf("the connection is busy")
	}
	// First a group: a single statement does not mind answers that it did not ask for.
	g := w.c.NewGroup()
	if err := g.Add(statement.Execution{Description: d, Args: []any{99}}); err != nil {
		return err
	}
	if got, err := finish(w.t.Context(), g); err != nil || got[0] != "99" {
		return fmt.Errorf("the next group answered %q instead of 99, %w", got, err)
	}
	for n := 100; n < 103; n++ {
		got, err := w.run(w.t.Context(), statement.Execution{Description: d, Args: []any{n}})
		if err != nil || got != fmt.Sprint(n) {
			return fmt.Errorf("the next statement answered %q instead of %d, %w", got, n, err)
		}
	}
	return nil
}

// The check sees a prefix that was left behind.
func TestAnswersRightlySeesALeftPrefix(t *testing.T) {
	t.Parallel()
	w := newWire(t, pgscript.Options{}, 10)
	d := w.learn(selectArg)
	done, cancel := context.WithCancel(t.Context())
	cancel()
	w.c.PgConn().Frontend().SendClose(&pgproto3.Close{ObjectType: 'S', Name: "by hand"})
	w.c.PgConn().Frontend().SendParse(&pgproto3.Parse{Name: "by hand", Query: selectArg})
	if _, err := w.c.PgConn().ExecPrepared(done, "by hand", [][]byte{[]byte("1")}, nil, nil).Close(); err == nil {
		t.Fatal("a done context was accepted")
	}
	g := w.c.NewGroup()
	if err := g.Add(statement.Execution{Description: d, Args: []any{1}}); err != nil {
		t.Fatal(err)
	}
	// A single statement is forgiving, a group is not.
	if got, err := finish(t.Context(), g); err == nil {
		t.Errorf("a group after a left prefix answered %q as if nothing had been", got)
	}
}
