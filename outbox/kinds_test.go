package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/outbox"
)

func TestBatchHandlerIsolatesThePoison(t *testing.T) {
	t.Parallel()
	db := setup(t, outbox.Config{Lanes: 1})
	sub := db.proc.subscribe(t, "s", outbox.SubscriptionConfig{})
	rec := newRecorder()
	var largest, poisoned atomic.Int64
	h := func(ctx context.Context, ds []outbox.Delivery) error {
		largest.Store(max(largest.Load(), int64(len(ds))))
		for _, d := range ds {
			if string(d.Payload) == "13" && d.Key != "" {
				if len(ds) == 1 {
					poisoned.Add(1)
				}
				return errors.New("poison")
			}
		}
		for _, d := range ds {
			_ = rec.handle(ctx, d)
		}
		return nil
	}
	db.proc.publish(t, events(60, func(i int) string { return fmt.Sprint(i % 3) })...)
	d := start(t, sub, outbox.BatchHandlerFunc(h), quick)
	eventually(t, "dead", func() bool { return d.Stats().Dead == 1 })
	eventually(t, "all but those behind the poison", func() bool { return rec.n.Load() == 44 })
	db.proc.publish(t, events(50, unkeyed)...)
	eventually(t, "the rest", func() bool { return rec.n.Load() == 94 })
	if poisoned.Load() != 4 || largest.Load() < 50 {
		t.Errorf("poison was tried alone %d times, want 4; largest batch %d", poisoned.Load(), largest.Load())
	}
	for key, seqs := range rec.order {
		if !slices.IsSorted(seqs) {
			t.Errorf("key %s came as %v", key, seqs)
		}
	}
}

// Both kinds with a transaction write what they handled into a table, whose primary key notices a second time.
func TestTransactionsHaveTheirEffectOnce(t *testing.T) {
	t.Parallel()
	for _, batch := range []bool{false, true} {
		t.Run(fmt.Sprintf("batch=%v", batch), func(t *testing.T) {
			t.Parallel()
			db := setup(t, outbox.Config{Lanes: 4})
			if _, err := db.conn.Exec(t.Context(), "create table effect (seq bigint, n serial, key text)"); err != nil {
				t.Fatal(err)
			}
			var h outbox.Handler
			one := func(ctx context.Context, tx pgx.Tx, d outbox.Delivery) error {
				if _, err := tx.Exec(ctx, "insert into effect (seq, key) values ($1, $2)", d.Seq, d.Key); err != nil {
					return err
				}
				if (d.Seq+int64(d.Attempt))%11 == 0 {
					return errors.New("now and then")
				}
				if d.Seq%5 == 0 {
					<-time.After(time.Millisecond)
				}
				return nil
			}
			h = outbox.TxHandlerFunc(one)
			if batch {
				h = outbox.BatchTxHandlerFunc(func(ctx context.Context, tx pgx.Tx, ds []outbox.Delivery) error {
					for _, d := range ds {
						if err := one(ctx, tx, d); err != nil {
							return err
						}
					}
					return nil
				})
			}
			cfg := quick
			cfg.LeaseDuration, cfg.PageSize, cfg.MaxAttempts = 300*time.Millisecond, 10, -1
			launch := func() (*process, *running) {
				p := newProcess(t, db.url, outbox.Config{})
				return p, start(t, p.subscribe(t, "s", outbox.SubscriptionConfig{}), h, cfg)
			}
			done := make(chan struct{})
			go func() {
				defer close(done)
				for i := range 60 {
					db.proc.publish(t, events(10, func(j int) string { return []string{fmt.Sprint((i + j) % 7), ""}[j%2] })...)
				}
			}()
			p1, r1 := launch()
			launch()
			for i := range 5 { // killed in the middle of things
				eventually(t, "progress", func() bool { return db.count(t, "select count(*) from effect") > int64(i*60) })
				p1.Cut()
				r1.cancel()
				p1, r1 = launch()
			}
			<-done
			eventually(t, "all effects", func() bool { return db.count(t, "select count(distinct seq) from effect") == 600 })
			if n := db.count(t, "select count(*) from effect"); n != 600 {
				t.Errorf("%d effects of 600 events", n)
			}
			disorder := db.count(t, `select count(*) from
				(select seq < lag(seq) over (partition by key order by n) as bad from effect where key <> '') x where bad`)
			if disorder != 0 {
				t.Errorf("%d effects out of the order of their key", disorder)
			}
			eventually(t, "nothing waits", func() bool { return db.count(t, "select count(*) from outbox.failed") == 0 })
		})
	}
}

// An event that kills its process is found out, and has its last attempt like any other.
func TestAnEventThatKillsTheProcessDies(t *testing.T) {
	t.Parallel()
	for _, inTx := range []bool{false, true} {
		t.Run(fmt.Sprintf("tx=%v", inTx), func(t *testing.T) {
			t.Parallel()
			db := setup(t, outbox.Config{Lanes: 1})
			db.proc.subscribe(t, "s", outbox.SubscriptionConfig{})
			db.proc.publish(t, events(20, func(i int) string { return fmt.Sprint(i % 4) })...)
			cfg := quick
			cfg.LeaseDuration, cfg.Concurrency = 200*time.Millisecond, 4
			rec := newRecorder()
			kills := 0
			for {
				p := newProcess(t, db.url, outbox.Config{})
				killed := make(chan struct{}, 4)
				one := func(ctx context.Context, d outbox.Delivery) error {
					if string(d.Payload) == "6" {
						p.Cut()
						killed <- struct{}{}
						<-ctx.Done()
						return ctx.Err()
					}
					return rec.handle(ctx, d)
				}
				var h outbox.Handler = outbox.HandlerFunc(one)
				if inTx {
					h = outbox.TxHandlerFunc(func(ctx context.Context, _ pgx.Tx, d outbox.Delivery) error { return one(ctx, d) })
				}
				r := start(t, p.subscribe(t, "s", outbox.SubscriptionConfig{}), h, cfg)
				dead := func() bool { return db.count(t, "select count(*) from outbox.failed where state = 'dead'") == 1 }
				eventually(t, "killed, or given up", func() bool { return len(killed) > 0 || dead() })
				if dead() {
					break
				}
				if kills++; kills > 10 {
					t.Fatal("it goes on killing")
				}
				r.cancel()
			}
			if kills < 4 {
				t.Errorf("dead after %d kills", kills)
			}
			eventually(t, "all but those behind the dead one", func() bool {
				rec.mu.Lock()
				defer rec.mu.Unlock()
				return len(rec.seen) == 16
			})
		})
	}
}

// A page that comes to its end makes former crashes be forgotten, whatever kind the handler is of: its lane goes page by page again.
func TestACompletedPageEndsTheSuspicion(t *testing.T) {
	t.Parallel()
	nothing := func() error { return nil }
	for name, h := range map[string]outbox.Handler{
		"one":       outbox.HandlerFunc(func(context.Context, outbox.Delivery) error { return nothing() }),
		"page":      outbox.BatchHandlerFunc(func(context.Context, []outbox.Delivery) error { return nothing() }),
		"one in tx": outbox.TxHandlerFunc(func(context.Context, pgx.Tx, outbox.Delivery) error { return nothing() }),
		"page tx":   outbox.BatchTxHandlerFunc(func(context.Context, pgx.Tx, []outbox.Delivery) error { return nothing() }),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := setup(t, outbox.Config{Lanes: 1})
			sub := db.proc.subscribe(t, "s", outbox.SubscriptionConfig{})
			if _, err := db.conn.Exec(t.Context(), "update outbox.lease set crashes = 3"); err != nil {
				t.Fatal(err)
			}
			d := start(t, sub, h, quick)
			eventually(t, "the lane", func() bool { return db.count(t, "select count(*) from outbox.lease where owner is not null") == 1 })
			if n := db.count(t, "select crashes from outbox.lease"); n != 3 {
				t.Fatalf("%d crashes before any page", n)
			}
			db.proc.publish(t, events(5, unkeyed)...)
			eventually(t, "they are delivered", func() bool { return d.Stats().Delivered == 5 })
			eventually(t, "no crashes", func() bool { return db.count(t, "select crashes from outbox.lease") == 0 })
			db.proc.publish(t, events(50, unkeyed)...)
			eventually(t, "the next are delivered", func() bool { return d.Stats().Delivered == 55 })
		})
	}
}

// A dispatcher that has to share gives lanes back when the events in hand are done, and not when their pages are.
func TestALaneThatIsGivenBackFinishesTheEventsInHand(t *testing.T) {
	t.Parallel()
	db := setup(t, outbox.Config{Lanes: 4})
	cfg := quick
	cfg.Concurrency, cfg.LeaseDuration = 4, time.Second
	rec := newRecorder()
	one := make(chan struct{})
	var calls atomic.Int64
	h := func(ctx context.Context, d outbox.Delivery) error {
		calls.Add(1)
		<-one
		return rec.handle(ctx, d)
	}
	db.proc.publish(t, events(400, unkeyed)...) // a page of 100 a lane
	start(t, db.proc.subscribe(t, "s", outbox.SubscriptionConfig{}), outbox.HandlerFunc(h), cfg)
	eventually(t, "all lanes have begun", func() bool { return calls.Load() == 4 })
	other := newProcess(t, db.url, outbox.Config{})
	start(t, other.subscribe(t, "s", outbox.SubscriptionConfig{}), outbox.HandlerFunc(rec.handle), cfg)
	eventually(t, "both are seen", func() bool { return db.count(t, "select count(*) from outbox.member") == 2 })
	released := 0
	eventually(t, "even lanes", func() bool {
		select {
		case one <- struct{}{}:
			released++
		default:
		}
		return db.count(t, "select count(*) from (select owner from outbox.lease where owner is not null group by owner having count(*) = 2) x") == 2
	})
	if released > 150 {
		t.Errorf("%d of 400 events were handled before the lanes were even", released)
	}
	t.Logf("%d events until lanes were even", released)
	close(one)
	eventually(t, "all", func() bool { return len(rec.distinct()) == 400 })
	if n := rec.n.Load(); n != 400 {
		t.Errorf("%d deliveries of 400 events", n)
	}
}
