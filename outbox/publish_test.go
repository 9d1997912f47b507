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
	"github.com/jackc/pgx/v5/pgxpool"

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

// unwrappable and opaque are wrappers as users write them.
type unwrappable struct{ pgx.Tx }

func (w unwrappable) Unwrap() pgx.Tx { return w.Tx }

type opaque struct{ pgx.Tx }

func TestPublishThroughAWrapperIsQueuedAndAnnounced(t *testing.T) {
	t.Parallel()
	db := setup(t, outbox.Config{})
	p := db.proc
	rec := newRecorder()
	d := start(t, p.subscribe(t, "s", outbox.SubscriptionConfig{}), outbox.HandlerFunc(rec.handle), outbox.DispatcherConfig{PollInterval: -1})
	p.publish(t, outbox.Event{Type: "first"}) // what a dispatcher finds by itself at its start is no announcement
	eventually(t, "the first", func() bool { return rec.n.Load() == 1 })
	for what, c := range map[string]struct {
		wrap   func(pgx.Tx) pgx.Tx
		queued bool
	}{
		"one level":               {func(tx pgx.Tx) pgx.Tx { return unwrappable{tx} }, true},
		"two levels":              {func(tx pgx.Tx) pgx.Tx { return unwrappable{unwrappable{tx}} }, true},
		"control: without Unwrap": {func(tx pgx.Tx) pgx.Tx { return opaque{tx} }, false},
	} {
		err := p.ex.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
			if err := p.store.Publish(ctx, c.wrap(tx), outbox.Event{Type: what, Key: "k"}); err != nil {
				return err
			}
			var written int
			if err := tx.QueryRow(ctx, "select count(*) from outbox.event where type = $1", what).Scan(&written); err != nil {
				return err
			}
			if (written == 0) != c.queued {
				t.Errorf("%s: %d events were written before the commit", what, written)
			}
			return nil
		})
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		if c.queued {
			eventually(t, what+": a delivery without a poll", func() bool {
				return slices.ContainsFunc(rec.deliveries(), func(d outbox.Delivery) bool { return d.Type == what })
			})
		}
	}
	d.Wake() // the control's event, which nobody announced
	eventually(t, "all", func() bool { return rec.n.Load() == 4 })
}

// Every transaction holds a connection, none is left, and each is the first of its store to publish.
func TestAFirstPublishNeedsNoSecondConnection(t *testing.T) {
	t.Parallel()
	db := setup(t, outbox.Config{})
	pc, err := pgxpool.ParseConfig(db.url)
	if err != nil {
		t.Fatal(err)
	}
	const n = 4
	pc.MaxConns = n
	pool, err := pgxpool.NewWithConfig(t.Context(), pc)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	ex, err := executor.New(pool, executor.Config{Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ex.Close(context.Background()) })
	for _, begun := range []bool{false, true} {
		var all, done sync.WaitGroup
		all.Add(n)
		for i := range n {
			done.Go(func() {
				store, err := outbox.New(ex, outbox.Config{Logger: quiet})
				if err != nil {
					t.Error(err)
				}
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				defer cancel()
				err = ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
					all.Done()
					all.Wait() // no connection is left
					if begun {
						if _, err := tx.Exec(ctx, "select 1"); err != nil {
							return err
						}
					}
					return store.Publish(ctx, tx, outbox.Event{Type: "t", Key: fmt.Sprint(i)})
				})
				if err != nil {
					t.Errorf("begun %v: %v", begun, err)
				}
			})
		}
		done.Wait()
	}
	// While rows are open the connection cannot be asked, and the answer waits for the commit.
	for _, schema := range []string{"outbox", "nowhere"} {
		store, err := outbox.New(ex, outbox.Config{Schema: schema, Logger: quiet})
		if err != nil {
			t.Fatal(err)
		}
		tx, err := ex.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		rows, err := tx.Query(t.Context(), "select generate_series(1, 3)")
		if err != nil {
			t.Fatal(err)
		}
		for rows.Next() {
			if err := store.Publish(t.Context(), tx, outbox.Event{Type: "t", Key: "k"}, outbox.Event{Type: "t"}); err != nil {
				t.Error(err)
			}
		}
		if err := rows.Err(); err != nil {
			t.Error(err)
		}
		if err := tx.Commit(t.Context()); (schema == "outbox") != (err == nil) || err != nil && !errors.Is(err, outbox.ErrNotMigrated) {
			t.Errorf("schema %s: %v", schema, err)
		}
	}
	if got := db.count(t, "select count(*) from outbox.event"); got != 2*n+6 {
		t.Errorf("%d events, want %d", got, 2*n+6)
	}
}
