package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/outbox"
	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

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

// Every transaction holds a connection, none is left, and each is the first of its store to publish. No wake-up takes a connection here.
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
				store, err := outbox.New(ex, outbox.Config{Logger: quiet, WakeUp: outbox.WakeUpPoll})
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
	// Nor does one take a connection while there are some.
	for _, begun := range []bool{false, true} {
		store, err := outbox.New(ex, outbox.Config{Logger: quiet, WakeUp: outbox.WakeUpPoll})
		if err != nil {
			t.Fatal(err)
		}
		err = ex.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
			if begun {
				if _, err := tx.Exec(ctx, "select 1"); err != nil {
					return err
				}
			}
			nested, err := tx.Begin(ctx)
			if err != nil {
				return err
			}
			before := pool.Stat().AcquireCount()
			if err := store.Publish(ctx, nested, outbox.Event{Type: "t", Key: "k"}); err != nil {
				return err
			}
			if n := pool.Stat().AcquireCount() - before; n != 0 {
				t.Errorf("begun %v: it took %d connections", begun, n)
			}
			return nested.Commit(ctx)
		})
		if err != nil {
			t.Error(err)
		}
	}
	// While rows are open the connection cannot be asked, and the answer waits for the commit.
	for _, schema := range []string{"outbox", "nowhere"} {
		store, err := outbox.New(ex, outbox.Config{Schema: schema, Logger: quiet, WakeUp: outbox.WakeUpPoll})
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
	if got := db.count(t, "select count(*) from outbox.event"); got != 2*n+8 {
		t.Errorf("%d events, want %d", got, 2*n+8)
	}
}

// The pooler's only server connection is the one that the transaction holds.
func TestAFirstPublishNeedsNoSecondServerConnection(t *testing.T) {
	t.Parallel()
	s := postgres.Start(t, postgres.Options{})
	db := setupOn(t, s, nil, outbox.Config{})
	b := pgbouncer.Start(t, s, pgbouncer.Options{PoolSize: 1})
	p := newProcess(t, b.URL(db.conn.Config().ConnConfig.Database), outbox.Config{})
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	err := p.ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
		if _, err := tx.Exec(ctx, "select pg_current_xact_id()"); err != nil {
			return err
		}
		return p.store.Publish(ctx, tx, outbox.Event{Type: "t", Key: "k"})
	})
	if err != nil {
		t.Fatal(err)
	}
	if n := db.count(t, "select count(*) from outbox.event"); n != 1 {
		t.Errorf("%d events, want 1", n)
	}
}

// What is published in a nested transaction is delivered if what has run there is kept, and what the one around publishes is announced.
func TestAnEventSharesTheFateOfItsNestedTransaction(t *testing.T) {
	t.Parallel()
	for _, leftOpen := range []bool{true, false} {
		db := setup(t, outbox.Config{})
		p := db.proc
		if _, err := db.conn.Exec(t.Context(), "create table business (id int)"); err != nil {
			t.Fatal(err)
		}
		rec := newRecorder()
		start(t, p.subscribe(t, "s", outbox.SubscriptionConfig{}), outbox.HandlerFunc(rec.handle), outbox.DispatcherConfig{PollInterval: -1})
		p.publish(t, outbox.Event{Type: "first"}) // what a dispatcher finds by itself at its start is no announcement
		eventually(t, "the first", func() bool { return rec.n.Load() == 1 })
		err := p.ex.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
			nested, err := tx.Begin(ctx)
			if err != nil {
				return err
			}
			if _, err := nested.Exec(ctx, "insert into business values (1)"); err != nil {
				return err
			}
			if err := p.store.Publish(ctx, nested, outbox.Event{Type: "nested", Key: "k"}); err != nil {
				return err
			}
			if !leftOpen {
				done, cancel := context.WithCancel(ctx)
				cancel()
				if err := nested.Commit(done); !errors.Is(err, context.Canceled) {
					t.Errorf("commit with a context that is done: %v", err)
				}
			}
			return p.store.Publish(ctx, tx, outbox.Event{Type: "outer", Key: "k"})
		})
		if err != nil {
			t.Fatal(err)
		}
		if rows, n := db.count(t, "select count(*) from business"), db.count(t, "select count(*) from outbox.event"); rows != 1 || n != 3 {
			t.Errorf("left open %v: %d rows of 1, %d events of 3", leftOpen, rows, n)
		}
		eventually(t, "all without a poll", func() bool { return rec.n.Load() == 3 })
	}
}
