package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/outbox"
)

func TestScheduledEventsComeWhenTheyAreDue(t *testing.T) {
	t.Parallel()
	db := setup(t, outbox.Config{})
	sub := db.proc.subscribe(t, "s", outbox.SubscriptionConfig{})
	rec := newRecorder()
	due := time.Now().Add(400 * time.Millisecond)
	var early atomic.Bool
	h := func(ctx context.Context, d outbox.Delivery) error {
		if d.Type == "later" && time.Now().Before(due) {
			early.Store(true)
		}
		return rec.handle(ctx, d)
	}
	start(t, sub, outbox.HandlerFunc(h), outbox.DispatcherConfig{PollInterval: -1})
	db.proc.publish(t,
		outbox.Event{Type: "later", Key: "k", DueAt: due},
		outbox.Event{Type: "past", DueAt: due.Add(-time.Hour)},
		outbox.Event{Type: "now", Key: "k"},
		outbox.Event{Type: "never", DueAt: due.Add(time.Hour)})
	eventually(t, "three", func() bool { return rec.n.Load() == 3 })
	if early.Load() {
		t.Error("it came before it was due")
	}
	var ofKey []string
	for _, d := range rec.deliveries() {
		if d.Key == "k" {
			ofKey = append(ofKey, d.Type)
		}
		if d.Type == "never" {
			t.Error("what is due in an hour came now")
		}
	}
	if !slices.Equal(ofKey, []string{"now", "later"}) {
		t.Errorf("the key came as %q", ofKey)
	}
	st, err := db.proc.store.Status(t.Context())
	if err != nil || st.Scheduled != 1 {
		t.Errorf("%d are scheduled, want 1 (%v)", st.Scheduled, err)
	}
}

func TestADedupKeyLetsOneThrough(t *testing.T) {
	t.Parallel()
	db := setup(t, outbox.Config{DedupWindow: time.Nanosecond})
	sub := db.proc.subscribe(t, "s", outbox.SubscriptionConfig{})
	p := db.proc
	abort := errors.New("abort")
	err := p.ex.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
		if err := p.store.Publish(ctx, tx, outbox.Event{Type: "aborted", DedupKey: "a"}); err != nil {
			return err
		}
		return abort
	})
	if !errors.Is(err, abort) {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			p.publish(t, outbox.Event{Type: "once", DedupKey: "a", Key: fmt.Sprint(i)}, outbox.Event{Type: "twice", DedupKey: "b"},
				outbox.Event{Type: "twice", DedupKey: "b"}, outbox.Event{Type: "always"})
		})
	}
	wg.Wait()
	if n := db.count(t, "select count(*) from outbox.event"); n != 10 {
		t.Errorf("%d events, want 10", n)
	}
	swept, err := p.store.Sweep(t.Context()) // before a dispatcher does
	if err != nil || swept.Dedup != 2 {
		t.Errorf("swept %+v, %v", swept, err)
	}
	rec := newRecorder()
	start(t, sub, outbox.HandlerFunc(rec.handle), quick)
	eventually(t, "ten", func() bool { return rec.n.Load() == 10 })
	p.publish(t, outbox.Event{Type: "again", DedupKey: "a"})
	eventually(t, "after the window", func() bool { return rec.n.Load() == 11 })
}

func TestSweepRemovesWhatEverybodyHasSeen(t *testing.T) {
	t.Parallel()
	db := setup(t, outbox.Config{Lanes: 2, Retention: time.Nanosecond})
	p := db.proc
	rec := newRecorder()
	ctx := t.Context()
	d := start(t, p.subscribe(t, "fast", outbox.SubscriptionConfig{}), outbox.HandlerFunc(rec.handle), quick)
	p.subscribe(t, "slow", outbox.SubscriptionConfig{})
	open, err := db.conn.Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = open.Rollback(context.WithoutCancel(ctx)) }()
	if err := p.store.Publish(ctx, open, outbox.Event{Type: "late"}); err != nil {
		t.Fatal(err)
	}
	for i := range 50 {
		p.publish(t, events(20, unkeyed)...)
		eventually(t, "delivered", func() bool { return rec.n.Load() == int64(i+1)*20 })
	}
	// One subscription has seen nothing: nothing goes.
	if swept, err := p.store.Sweep(ctx); err != nil || swept.Events != 0 {
		t.Errorf("swept %+v, %v", swept, err)
	}
	if _, err := p.store.Unsubscribe(ctx, "slow"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "all but the open one", func() bool {
		if _, err := p.store.Sweep(ctx); err != nil {
			t.Fatal(err)
		}
		return db.count(t, "select count(*) from outbox.event") == 0
	})
	if n := db.count(t, "select max(c) from (select count(*) c from outbox.cursor group by subscription, lane) x"); n > 12 {
		t.Errorf("%d rows of progress in a lane", n)
	}
	// The late one still comes, though its place was swept; a new reader starts behind what is gone.
	if err := open.Commit(ctx); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the late one", func() bool { return rec.n.Load() == 1001 })
	if n := db.count(t, "select count(*) from outbox.event"); n != 1 {
		t.Errorf("%d events are left, want the late one", n)
	}
	// Ticks: as if an hour had passed.
	d.stop(t)
	before := db.count(t, "select count(*) from outbox.tick")
	if _, err := db.conn.Exec(ctx, "update outbox.tick set at = at - interval '1 hour' where id > 0"); err != nil {
		t.Fatal(err)
	}
	if _, err := p.store.Sweep(ctx); err != nil {
		t.Fatal(err)
	}
	if after := db.count(t, "select count(*) from outbox.tick"); after > 8 || before < 40 {
		t.Errorf("%d of %d ticks are left", after, before)
	}
	// And a day: below the mark.
	if _, err := db.conn.Exec(ctx, "update outbox.swept set late_at = late_at - interval '2 days'"); err != nil {
		t.Fatal(err)
	}
	d = start(t, p.subscribe(t, "fast", outbox.SubscriptionConfig{}), outbox.HandlerFunc(rec.handle), quick)
	p.publish(t, outbox.Event{Type: "last"})
	eventually(t, "goes on after all that", func() bool { return rec.n.Load() == 1002 })
	eventually(t, "the late one and the last are swept", func() bool {
		if _, err := p.store.Sweep(ctx); err != nil {
			t.Fatal(err)
		}
		return db.count(t, "select count(*) from outbox.event") == 0
	})
	d.stop(t)
}

// A transaction that is older than the retention: its event lies below what was swept, and comes all the same, for a reader that begins with
// the earliest event too.
func TestNoReaderPassesOverAnEventBelowTheSweptMark(t *testing.T) {
	t.Parallel()
	for name, open := range map[string]bool{"open when the reader begins": true, "committed before": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx := t.Context()
			db := setup(t, outbox.Config{Lanes: 1, Retention: time.Nanosecond})
			p := db.proc
			first, again := newRecorder(), newRecorder()
			sub := p.subscribe(t, "first", outbox.SubscriptionConfig{})
			d := start(t, sub, outbox.HandlerFunc(first.handle), quick)
			late, err := db.conn.Begin(ctx)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = late.Rollback(context.WithoutCancel(ctx)) }()
			if err := p.store.Publish(ctx, late, outbox.Event{Type: "late"}); err != nil {
				t.Fatal(err)
			}
			for i := range 4 { // so that floors pass it
				p.publish(t, events(20, unkeyed)...)
				eventually(t, "delivered", func() bool { return first.n.Load() == int64(i+1)*20 })
			}
			eventually(t, "all but the open one are swept", func() bool {
				if _, err := p.store.Sweep(ctx); err != nil {
					t.Fatal(err)
				}
				return db.count(t, "select count(*) from outbox.event") == 0
			})
			if mark := db.count(t, "select seq from outbox.swept"); mark < 80 {
				t.Fatalf("the mark stands at %d, not above the late event", mark)
			}
			d.stop(t)
			commit := func() {
				if err := late.Commit(ctx); err != nil {
					t.Fatal(err)
				}
			}
			if !open {
				commit()
			}
			second := p.subscribe(t, "second", outbox.SubscriptionConfig{Start: outbox.StartEarliest()})
			if err := sub.Replay(ctx, outbox.StartEarliest()); err != nil {
				t.Fatal(err)
			}
			if open {
				commit()
			}
			start(t, second, outbox.HandlerFunc(again.handle), quick)
			eventually(t, "the late one, to a new reader", func() bool { return again.n.Load() == 1 })
			start(t, sub, outbox.HandlerFunc(first.handle), quick)
			eventually(t, "the late one, after a replay", func() bool { return first.n.Load() == 81 })
		})
	}
}
