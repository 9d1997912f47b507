package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/outbox"
	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

func TestQueuedPublishesOfOneTransactionDoNotDeadlock(t *testing.T) {
	t.Parallel()
	db := setup(t, outbox.Config{})
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			keys := []string{"a", "b", "c", "d"}
			if i%2 == 1 {
				slices.Reverse(keys)
			}
			for range 40 {
				err := db.proc.ex.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
					if _, err := tx.Exec(ctx, "select pg_current_xact_id()"); err != nil {
						return err
					}
					for _, k := range keys {
						if err := db.proc.store.Publish(ctx, tx, outbox.Event{Type: "t", Key: k}); err != nil {
							return err
						}
					}
					return nil
				})
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	if n := db.count(t, "select count(*) from outbox.event"); n != 8*40*4 {
		t.Errorf("%d events", n)
	}
	bad := `select count(*) from (select lag(xid) over (partition by key order by seq) > xid and
		lag(published_at) over (partition by key order by seq) > published_at as bad from outbox.event) x where bad`
	if n := db.count(t, bad); n != 0 {
		t.Errorf("%d events of a key in another order than they were published", n)
	}
}

func TestKeysOfATransactionAreCountedOverItsCalls(t *testing.T) {
	t.Parallel()
	db := setup(t, outbox.Config{})
	err := db.proc.ex.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
		for i := range 300 {
			err := db.proc.store.Publish(ctx, tx, outbox.Event{Type: "t", Key: fmt.Sprint(i)}, outbox.Event{Type: "t", Key: "0"})
			if tooMany, ok := errors.AsType[*outbox.TooManyKeysError](err); ok != (i >= 256) || ok && tooMany.Keys != 257 {
				t.Errorf("key %d: %v", i, err)
			}
			if i == 100 { // sends what is queued, and changes nothing
				if _, err := tx.Exec(ctx, "savepoint s"); err != nil {
					return err
				}
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if n := db.count(t, "select count(*) from outbox.event"); n != 512 {
		t.Errorf("%d events, want those of 256 calls", n)
	}
	// Nothing of the transaction is left; the next one counts from zero.
	db.proc.publish(t, events(256, func(i int) string { return fmt.Sprint(i) })...)
}

func TestOrderWithinATransactionIsThatOfTheCalls(t *testing.T) {
	for _, pooled := range []bool{false, true} {
		t.Run(fmt.Sprintf("pooled=%v", pooled), func(t *testing.T) {
			t.Parallel()
			s := postgres.Start(t, postgres.Options{})
			var b *pgbouncer.Bouncer
			if pooled {
				b = pgbouncer.Start(t, s, pgbouncer.Options{})
			}
			db := setupOn(t, s, b, outbox.Config{})
			p := db.proc
			publish := func(ctx context.Context, tx pgx.Tx, name string) {
				t.Helper()
				if err := p.store.Publish(ctx, tx, outbox.Event{Type: name, Key: "k"}); err != nil {
					t.Fatal(err)
				}
			}
			err := p.ex.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
				publish(ctx, tx, "1")
				kept, err := tx.Begin(ctx)
				if err != nil {
					return err
				}
				publish(ctx, kept, "2")
				inner, err := kept.Begin(ctx)
				if err != nil {
					return err
				}
				publish(ctx, inner, "lost")
				if _, err := inner.Exec(ctx, "select 1"); err != nil {
					return err
				}
				if err := inner.Rollback(ctx); err != nil {
					return err
				}
				publish(ctx, kept, "3")
				if err := kept.Commit(ctx); err != nil {
					return err
				}
				publish(ctx, tx, "4")
				for _, q := range []string{"savepoint a", "select 1"} {
					if _, err := tx.Exec(ctx, q); err != nil {
						return err
					}
				}
				publish(ctx, tx, "lost")
				if _, err := tx.Exec(ctx, "rollback to savepoint a"); err != nil {
					return err
				}
				publish(ctx, tx, "5")
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			var got string
			if err := db.conn.QueryRow(t.Context(), "select string_agg(type, ',' order by seq) from outbox.event").Scan(&got); err != nil {
				t.Fatal(err)
			}
			if want := "1,2,3,4,5"; got != want {
				t.Errorf("published %s, want %s", got, strings.ReplaceAll(want, ",", ", "))
			}
		})
	}
}

func TestTheKeyLimitHoldsOverNestedTransactions(t *testing.T) {
	t.Parallel()
	db := setup(t, outbox.Config{})
	p := db.proc
	publish := func(ctx context.Context, tx pgx.Tx, from, to int) error {
		return p.store.Publish(ctx, tx, events(to-from, func(i int) string { return fmt.Sprint(from + i) })...)
	}
	tooMany := func(err error) bool {
		e, ok := errors.AsType[*outbox.TooManyKeysError](err)
		return ok && e.Keys == 257
	}
	err := p.ex.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
		begin := func(in pgx.Tx) pgx.Tx {
			nested, err := in.Begin(ctx)
			if err != nil {
				t.Fatal(err)
			}
			return nested
		}
		end := func(err error) {
			t.Helper()
			if err != nil {
				t.Error(err)
			}
		}
		end(publish(ctx, tx, 0, 100))
		for range 3 { // rolled back: given back each time
			lost := begin(tx)
			end(publish(ctx, lost, 50, 256))
			if err := publish(ctx, lost, 256, 257); !tooMany(err) {
				t.Errorf("over the limit in a nested transaction: %v", err)
			}
			inner := begin(lost)
			if err := publish(ctx, inner, 256, 257); !tooMany(err) {
				t.Errorf("over the limit, two levels down: %v", err)
			}
			end(publish(ctx, inner, 200, 256)) // no new ones
			end(inner.Commit(ctx))
			end(lost.Rollback(ctx))
		}
		kept := begin(tx)
		end(publish(ctx, kept, 100, 200))
		inner := begin(kept)
		end(publish(ctx, inner, 200, 250))
		if _, err := inner.Exec(ctx, "savepoint raw"); err != nil { // sends what is queued, and changes nothing
			return err
		}
		end(publish(ctx, inner, 250, 256))
		end(inner.Commit(ctx))
		end(kept.Commit(ctx))
		for what, in := range map[string]pgx.Tx{"the outermost": tx, "a new one": begin(tx)} {
			if err := publish(ctx, in, 256, 257); !tooMany(err) {
				t.Errorf("over the limit in %s, after commits: %v", what, err)
			}
			end(publish(ctx, in, 0, 256))
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if n := db.count(t, "select count(distinct key) from outbox.event"); n != 256 {
		t.Errorf("%d keys were published, want 256", n)
	}
}

// The locks of nested transactions that committed are taken by the first statement of the outermost one, in sorted order with its own.
func TestQueuedPublishesOfNestedTransactionsDoNotDeadlock(t *testing.T) {
	t.Parallel()
	db := setup(t, outbox.Config{})
	p := db.proc
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			keys := []string{"a", "b", "c", "d"}
			if i%2 == 1 {
				slices.Reverse(keys)
			}
			for n := range 40 {
				err := p.ex.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
					if _, err := tx.Exec(ctx, "select pg_current_xact_id()"); err != nil {
						return err
					}
					for j, k := range keys {
						in := pgx.Tx(tx)
						if (j+n)%3 > 0 {
							var err error
							if in, err = tx.Begin(ctx); err != nil {
								return err
							}
						}
						if err := p.store.Publish(ctx, in, outbox.Event{Type: "t", Key: k}); err != nil {
							return err
						}
						if in != pgx.Tx(tx) {
							if err := in.Commit(ctx); err != nil {
								return err
							}
						}
					}
					return nil
				})
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	if n := db.count(t, "select count(*) from outbox.event"); n != 8*40*4 {
		t.Errorf("%d events", n)
	}
}
