package executor_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/executor"
)

// What is queued in a nested transaction shares the fate of what has run there, however it ends. pgx's own transactions are the measure.
func TestTheQueueOfANestedTransactionSharesItsFate(t *testing.T) {
	t.Parallel()
	// Each begins nested transactions of tx, calls fill for one of them, and leaves tx to be committed.
	for what, play := range map[string]func(ctx context.Context, tx pgx.Tx, begin func(pgx.Tx) pgx.Tx, fill func(pgx.Tx)) error{
		"committed": func(ctx context.Context, tx pgx.Tx, begin func(pgx.Tx) pgx.Tx, fill func(pgx.Tx)) error {
			nested := begin(tx)
			fill(nested)
			return nested.Commit(ctx)
		},
		"rolled back": func(ctx context.Context, tx pgx.Tx, begin func(pgx.Tx) pgx.Tx, fill func(pgx.Tx)) error {
			nested := begin(tx)
			fill(nested)
			return nested.Rollback(ctx)
		},
		"left open": func(_ context.Context, tx pgx.Tx, begin func(pgx.Tx) pgx.Tx, fill func(pgx.Tx)) error {
			fill(begin(begin(tx)))
			return nil
		},
		"left open in one that commits": func(ctx context.Context, tx pgx.Tx, begin func(pgx.Tx) pgx.Tx, fill func(pgx.Tx)) error {
			nested := begin(tx)
			fill(begin(nested))
			return nested.Commit(ctx)
		},
		"left open in one that is rolled back": func(ctx context.Context, tx pgx.Tx, begin func(pgx.Tx) pgx.Tx, fill func(pgx.Tx)) error {
			nested := begin(tx)
			fill(begin(nested))
			return nested.Rollback(ctx)
		},
		"committed beside one that is rolled back": func(ctx context.Context, tx pgx.Tx, begin func(pgx.Tx) pgx.Tx, fill func(pgx.Tx)) error {
			first, second := begin(tx), begin(tx)
			fill(second)
			return errors.Join(second.Commit(ctx), first.Rollback(ctx))
		},
		"committed beside one that commits": func(ctx context.Context, tx pgx.Tx, begin func(pgx.Tx) pgx.Tx, fill func(pgx.Tx)) error {
			first, second := begin(tx), begin(tx)
			fill(second)
			return errors.Join(second.Commit(ctx), first.Commit(ctx))
		},
		"commit could not be sent": func(ctx context.Context, tx pgx.Tx, begin func(pgx.Tx) pgx.Tx, fill func(pgx.Tx)) error {
			nested := begin(tx)
			fill(nested)
			done, cancel := context.WithCancel(ctx)
			cancel()
			if err := nested.Commit(done); !errors.Is(err, context.Canceled) {
				return fmt.Errorf("with a context that is done: %w", err)
			}
			return nil
		},
		"commit with rows open": func(ctx context.Context, tx pgx.Tx, begin func(pgx.Tx) pgx.Tx, fill func(pgx.Tx)) error {
			nested := begin(tx)
			fill(nested)
			rows, err := tx.Query(ctx, "select generate_series(1, 3)")
			if err != nil {
				return err
			}
			defer rows.Close()
			if err := nested.Commit(ctx); err == nil {
				return errors.New("it committed with rows open")
			}
			return nil
		},
		"commit was refused, and a savepoint before it undid it": func(ctx context.Context, tx pgx.Tx, begin func(pgx.Tx) pgx.Tx, fill func(pgx.Tx)) error {
			if _, err := tx.Exec(ctx, "savepoint a"); err != nil {
				return err
			}
			nested := begin(tx)
			fill(nested)
			_, failed := nested.Exec(ctx, "select 1/0")
			if refused := nested.Commit(ctx); failed == nil || refused == nil {
				return fmt.Errorf("it did not fail: %w, %w", failed, refused)
			}
			_, err := tx.Exec(ctx, "rollback to savepoint a")
			return err
		},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			s, ex, c := numbers(t, 2, executor.Config{})
			pool := newPool(t, s.URL)
			run := func(tx pgx.Tx, err error, more func(nested executor.Tx)) int {
				t.Helper()
				if err != nil {
					t.Fatal(err)
				}
				mustExec(t, c, "truncate t")
				begin := func(in pgx.Tx) pgx.Tx {
					nested, err := in.Begin(t.Context())
					if err != nil {
						t.Fatal(err)
					}
					return nested
				}
				fill := func(nested pgx.Tx) {
					if _, err := nested.Exec(t.Context(), insertNumber, 1); err != nil {
						t.Fatal(err)
					}
					if more != nil {
						more(nested.(executor.Tx))
					}
				}
				if err := errors.Join(play(t.Context(), tx, begin, fill), tx.Commit(t.Context())); err != nil {
					t.Error(err)
				}
				return rowsIn(t, c)
			}
			tx, err := pool.Begin(t.Context())
			want := run(tx, err, nil)
			called := 0
			tx, err = ex.Begin(t.Context())
			got := run(tx, err, func(nested executor.Tx) {
				if err := nested.Queue(insertNumber, 2); err != nil {
					t.Fatal(err)
				}
				nested.OnCommit(func() { called++ })
			})
			if got != 2*want || called != want {
				t.Errorf("pgx kept %d rows; run and queued were kept %d, and OnCommit was called %d times", want, got, called)
			}
		})
	}
}
