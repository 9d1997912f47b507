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

	"github.com/bounceproof/bounceproof/outbox"
)

// quick is for a dispatcher that has its subscription to itself: its lease never runs out, however busy the machine is.
var quick = outbox.DispatcherConfig{
	PollInterval: 20 * time.Millisecond, LeaseDuration: time.Minute,
	MinBackoff: time.Millisecond, MaxBackoff: 20 * time.Millisecond, MaxAttempts: 4,
}

func TestAFailedEventComesAgainAndBlocksItsKeyOnly(t *testing.T) {
	t.Parallel()
	db := setup(t, outbox.Config{Lanes: 1})
	sub := db.proc.subscribe(t, "s", outbox.SubscriptionConfig{})
	rec := newRecorder()
	var heal atomic.Bool
	var mu sync.Mutex
	var attempts []int
	h := func(ctx context.Context, d outbox.Delivery) error {
		if d.Key == "bad" && string(d.Payload) == "0" && !heal.Load() {
			mu.Lock()
			defer mu.Unlock()
			attempts = append(attempts, d.Attempt)
			return outbox.RetryAfter(10*time.Millisecond, errors.New("not now\x00"))
		}
		return rec.handle(ctx, d)
	}
	cfg := quick
	cfg.MaxAttempts = -1
	d := start(t, sub, outbox.HandlerFunc(h), cfg)
	db.proc.publish(t, events(40, func(i int) string { return []string{"bad", "good", "", "fine"}[i%4] })...)
	eventually(t, "all others", func() bool { return rec.n.Load() == 30 })
	eventually(t, "some attempts", func() bool { mu.Lock(); defer mu.Unlock(); return len(attempts) > 3 })
	if n := db.count(t, "select count(*) from outbox.failed where key = 'bad'"); n != 10 {
		t.Errorf("%d events of the key wait, want 10", n)
	}
	if n := db.count(t, "select count(*) from outbox.failed where due_at is not null"); n != 1 {
		t.Errorf("%d events have a due time, want the head", n)
	}
	// Another dispatcher, and what was published meanwhile, keep the order.
	d.stop(t)
	db.proc.publish(t, outbox.Event{Type: "test", Key: "bad", Payload: []byte("40")})
	start(t, sub, outbox.HandlerFunc(h), cfg)
	heal.Store(true)
	eventually(t, "all", func() bool { return rec.n.Load() == 41 })
	if !slices.IsSorted(rec.order["bad"]) || len(rec.order["bad"]) != 11 {
		t.Errorf("the key came as %v", rec.order["bad"])
	}
	if !slices.IsSorted(attempts) || attempts[0] != 1 || attempts[len(attempts)-1] != len(attempts) {
		t.Errorf("attempts %v", attempts)
	}
	eventually(t, "nothing waits", func() bool { return db.count(t, "select count(*) from outbox.failed") == 0 })
}

func TestADeadEventBlocksItsKeyOrIsSkipped(t *testing.T) {
	t.Parallel()
	for _, skip := range []bool{false, true} {
		t.Run(fmt.Sprintf("skip=%v", skip), func(t *testing.T) {
			t.Parallel()
			db := setup(t, outbox.Config{Lanes: 2})
			sub := db.proc.subscribe(t, "s", outbox.SubscriptionConfig{SkipOnDead: skip})
			rec := newRecorder()
			var tries atomic.Int64
			h := func(ctx context.Context, d outbox.Delivery) error {
				switch string(d.Payload) {
				case "3":
					tries.Add(1)
					panic("poison")
				case "7":
					return outbox.Discard(errors.New("never mind"))
				}
				return rec.handle(ctx, d)
			}
			d := start(t, sub, outbox.HandlerFunc(h), quick)
			db.proc.publish(t, events(20, func(int) string { return "k" })...)
			want := int64(3)
			if skip {
				want = 18
			}
			eventually(t, "dead", func() bool { return d.Stats().Dead == 1 })
			eventually(t, "deliveries", func() bool { return rec.n.Load() == want })
			db.proc.publish(t, outbox.Event{Type: "other", Key: "other"}, outbox.Event{Type: "unkeyed"})
			eventually(t, "others", func() bool { return rec.n.Load() == want+2 })
			if tries.Load() != 4 {
				t.Errorf("%d attempts, want 4", tries.Load())
			}
			d.stop(t)
			// What a successor finds is the same.
			d = start(t, sub, outbox.HandlerFunc(h), quick)
			db.proc.publish(t, outbox.Event{Type: "more", Key: "k"}, outbox.Event{Type: "more", Key: "other"})
			if skip {
				want++
			}
			eventually(t, "more", func() bool { return rec.n.Load() == want+3 })
			if tries.Load() != 4 {
				t.Errorf("%d attempts, want 4", tries.Load())
			}
			if !slices.IsSorted(rec.order["k"]) {
				t.Errorf("order %v", rec.order["k"])
			}
			if n := db.count(t, "select count(*) from outbox.failed where state = 'dead' and attempt = 4 and last_error like '%panic: poison'"); n != 1 {
				t.Errorf("%d dead events with their error", n)
			}
		})
	}
}

func TestAnOutageRestsTheLaneAndCountsNoAttempts(t *testing.T) {
	t.Parallel()
	db := setup(t, outbox.Config{Lanes: 2})
	sub := db.proc.subscribe(t, "s", outbox.SubscriptionConfig{})
	rec := newRecorder()
	var down atomic.Bool
	var calls atomic.Int64
	down.Store(true)
	h := func(ctx context.Context, d outbox.Delivery) error {
		calls.Add(1)
		if down.Load() {
			return errors.New("the service is down")
		}
		return rec.handle(ctx, d)
	}
	db.proc.publish(t, events(100, unkeyed)...)
	d := start(t, sub, outbox.HandlerFunc(h), quick)
	eventually(t, "more calls than all attempts of all events", func() bool { return calls.Load() > 1000 })
	if n := db.count(t, "select count(*) from outbox.failed"); n != 0 || d.Stats().Dead != 0 {
		t.Errorf("%d events failed, %d dead, in an outage", n, d.Stats().Dead)
	}
	down.Store(false)
	eventually(t, "all", func() bool { return rec.n.Load() == 100 })
	d.stop(t)
	if rec.n.Load() != 100 {
		t.Errorf("%d deliveries of 100", rec.n.Load())
	}
}

func TestAStopInTheMiddleOfAPageDeliversNothingTwice(t *testing.T) {
	t.Parallel()
	db := setup(t, outbox.Config{Lanes: 1})
	sub := db.proc.subscribe(t, "s", outbox.SubscriptionConfig{})
	rec := newRecorder()
	reached, proceed := make(chan struct{}), make(chan struct{})
	h := func(ctx context.Context, d outbox.Delivery) error {
		if string(d.Payload) == "37" {
			close(reached)
			<-proceed
		}
		return rec.handle(ctx, d)
	}
	cfg := quick
	cfg.Concurrency = 1
	d := start(t, sub, outbox.HandlerFunc(h), cfg)
	db.proc.publish(t, events(90, func(i int) string { return fmt.Sprint(i % 6) })...)
	<-reached
	d.cancel()
	close(proceed)
	d.stop(t)
	if n := rec.n.Load(); n < 6 || n >= 90 {
		t.Fatalf("%d deliveries before the stop: this proves nothing", n)
	}
	start(t, sub, outbox.HandlerFunc(rec.handle), cfg)
	eventually(t, "all", func() bool { return rec.n.Load() >= 90 })
	eventually(t, "nothing waits", func() bool { return db.count(t, "select count(*) from outbox.failed") == 0 })
	for seq, n := range rec.seen {
		if n != 1 {
			t.Errorf("%d came %d times", seq, n)
		}
	}
	for key, seqs := range rec.order {
		if !slices.IsSorted(seqs) || len(seqs) != 15 {
			t.Errorf("key %s came as %v", key, seqs)
		}
	}
}

// After an asynchronous failover ids of ticks may be issued again. A page that was read under one of the lost ones is not recorded, and
// comes again.
func TestAPageOfALostTickIsNotRecorded(t *testing.T) {
	t.Parallel()
	db := setup(t, outbox.Config{Lanes: 1})
	sub := db.proc.subscribe(t, "s", outbox.SubscriptionConfig{})
	rec := newRecorder()
	reached, proceed := make(chan struct{}), make(chan struct{})
	var once sync.Once
	h := func(ctx context.Context, d outbox.Delivery) error {
		once.Do(func() {
			close(reached)
			<-proceed
		})
		return rec.handle(ctx, d)
	}
	db.proc.publish(t, events(10, func(int) string { return "k" })...)
	start(t, sub, outbox.HandlerFunc(h), quick)
	<-reached
	// The same id, another moment.
	if _, err := db.conn.Exec(t.Context(), "update outbox.tick set at = at + interval '1 ms' where id = (select max(id) from outbox.tick)"); err != nil {
		t.Fatal(err)
	}
	close(proceed)
	eventually(t, "ten, twice", func() bool { return rec.n.Load() == 20 })
	db.proc.publish(t, outbox.Event{Type: "t", Key: "k"})
	eventually(t, "and on", func() bool { return rec.n.Load() == 21 })
}
