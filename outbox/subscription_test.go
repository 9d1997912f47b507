package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/outbox"
	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

func TestSubscriptionsStartWhereTheySay(t *testing.T) {
	t.Parallel()
	db := setup(t, outbox.Config{})
	p := db.proc
	p.publish(t, outbox.Event{Type: "1"})
	first := newRecorder()
	start(t, p.subscribe(t, "first", outbox.SubscriptionConfig{Start: outbox.StartEarliest()}), outbox.HandlerFunc(first.handle), quick)
	eventually(t, "one", func() bool { return first.n.Load() == 1 })
	var between time.Time
	if err := db.conn.QueryRow(t.Context(), "select clock_timestamp()").Scan(&between); err != nil {
		t.Fatal(err)
	}
	p.publish(t, outbox.Event{Type: "2"})
	eventually(t, "two", func() bool { return first.n.Load() == 2 })
	subs := map[string]*outbox.Subscription{
		"123": p.subscribe(t, "earliest", outbox.SubscriptionConfig{Start: outbox.StartEarliest()}),
		"23":  p.subscribe(t, "between", outbox.SubscriptionConfig{Start: outbox.StartAt(between)}),
		"3":   p.subscribe(t, "now", outbox.SubscriptionConfig{Start: outbox.StartNow()}),
	}
	p.publish(t, outbox.Event{Type: "3"})
	for want, sub := range subs {
		rec := newRecorder()
		d := start(t, sub, outbox.HandlerFunc(rec.handle), quick)
		types := func() string {
			var s []string
			for _, d := range rec.deliveries() {
				s = append(s, d.Type)
			}
			slices.Sort(s)
			return strings.Join(s, "")
		}
		eventually(t, want, func() bool { return rec.n.Load() >= int64(len(want)) })
		if types() != want {
			t.Errorf("%s: delivered %s, want %s", sub.Name(), types(), want)
		}
		// Subscribing again changes nothing.
		p.subscribe(t, sub.Name(), outbox.SubscriptionConfig{Start: outbox.StartEarliest()})
		// Back to the second, while it runs.
		if err := sub.Replay(t.Context(), outbox.StartAt(between)); err != nil {
			t.Fatal(err)
		}
		eventually(t, want+" and 23 again", func() bool { return rec.n.Load() >= int64(len(want)+2) })
		d.stop(t)
		if got := types(); len(got) != len(want)+2 {
			t.Errorf("%s: delivered %s after the replay", sub.Name(), got)
		}
	}
}

func TestStatusCountsWhatIsPending(t *testing.T) {
	t.Parallel()
	db := setup(t, outbox.Config{Lanes: 3})
	p := db.proc
	sub := p.subscribe(t, "s", outbox.SubscriptionConfig{})
	p.publish(t, events(100, func(i int) string { return fmt.Sprint(i % 10) })...)
	status := func() outbox.SubscriptionStatus {
		t.Helper()
		st, err := p.store.Status(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if len(st.Subscriptions) != 1 || st.Tip < 100 || st.Lanes != 3 || len(st.Subscriptions[0].Lanes) != 3 {
			t.Fatalf("status %+v", st)
		}
		return st.Subscriptions[0]
	}
	if s := status(); s.Pending != 100 || s.Oldest.IsZero() || s.Dispatchers != 0 {
		t.Errorf("before: %+v", s)
	}
	var sick atomic.Bool
	sick.Store(true)
	rec := newRecorder()
	h := func(ctx context.Context, d outbox.Delivery) error {
		if sick.Load() && (d.Key == "3" || d.Key == "4") {
			return errors.New("sick")
		}
		return rec.handle(ctx, d)
	}
	cfg := quick
	cfg.MaxAttempts = 2
	d := start(t, sub, outbox.HandlerFunc(h), cfg)
	eventually(t, "80 delivered, two dead, their followers parked", func() bool {
		s := status()
		return rec.n.Load() == 80 && s.Pending == 0 && s.Dead == 2 && s.Parked == 18 && s.Retrying == 0
	})
	if s := status(); s.Dispatchers != 1 || !s.Lanes[0].Alive || !strings.Contains(s.Lanes[0].Owner, "/") {
		t.Errorf("while it runs: %+v", s)
	}
	sick.Store(false)
	list, err := sub.Failed(t.Context(), outbox.StateDead, 0, 10)
	if err != nil || len(list) != 2 || list[0].LastError != "sick" || list[0].Attempt != 2 || list[0].Key == "" {
		t.Fatalf("dead: %+v, %v", list, err)
	}
	if parked, err := sub.Failed(t.Context(), outbox.StateParked, list[1].Seq, 5); err != nil || len(parked) != 5 {
		t.Errorf("parked: %+v, %v", parked, err)
	}
	seq := list[slices.IndexFunc(list, func(f outbox.FailedEvent) bool { return f.Key == "3" })].Seq
	if n, err := sub.Retry(t.Context(), seq, 1<<60); n != 1 || err != nil {
		t.Errorf("Retry: %d, %v", n, err)
	}
	eventually(t, "the first key", func() bool { return rec.n.Load() == 90 })
	if n, err := sub.Discard(t.Context()); n != 1 || err != nil {
		t.Errorf("Discard: %d, %v", n, err)
	}
	eventually(t, "the second key without its dead one", func() bool { return rec.n.Load() == 99 })
	eventually(t, "nothing waits", func() bool { s := status(); return s.Dead+s.Parked+s.Retrying+s.Pending == 0 })
	for key, seqs := range rec.order {
		if !slices.IsSorted(seqs) {
			t.Errorf("key %s came as %v", key, seqs)
		}
	}
	d.stop(t)
	if gone, err := p.store.Unsubscribe(t.Context(), "s"); !gone || err != nil {
		t.Errorf("Unsubscribe: %v, %v", gone, err)
	}
	dd, err := outbox.NewDispatcher(sub, outbox.HandlerFunc(h), cfg)
	if err != nil {
		t.Fatal(err)
	}
	if err := dd.Run(t.Context()); !errors.Is(err, outbox.ErrUnsubscribed) {
		t.Errorf("Run without a subscription: %v", err)
	}
	if _, err := p.store.Subscription(t.Context(), "s"); !errors.Is(err, outbox.ErrUnsubscribed) {
		t.Errorf("Subscription that is gone: %v", err)
	}
}

func TestStatementModePublishesAndDelivers(t *testing.T) {
	for _, version := range pgbouncer.Versions() {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			s := postgres.Start(t, postgres.Options{})
			db := setupOn(t, s, nil, outbox.Config{})
			db.proc.subscribe(t, "s", outbox.SubscriptionConfig{})
			b := pgbouncer.Start(t, s, pgbouncer.Options{Version: version, PoolMode: "statement"})
			p := newProcess(t, b.URL(db.conn.Config().ConnConfig.Database), outbox.Config{})
			for range 5 {
				p.publish(t, events(3, func(i int) string { return []string{"", "k"}[i%2] })...)
			}
			sub, err := p.store.Subscription(t.Context(), "s")
			if err != nil {
				t.Fatal(err)
			}
			inTx := outbox.TxHandlerFunc(func(context.Context, pgx.Tx, outbox.Delivery) error { return nil })
			d, err := outbox.NewDispatcher(sub, inTx, quick)
			if err != nil {
				t.Fatal(err)
			}
			if err := d.Run(t.Context()); !errors.Is(err, executor.ErrStatementMode) {
				t.Errorf("Run with transactions: %v", err)
			}
			rec := newRecorder()
			var once atomic.Bool
			h := func(ctx context.Context, d outbox.Delivery) error {
				if once.CompareAndSwap(false, true) {
					return errors.New("once")
				}
				return rec.handle(ctx, d)
			}
			start(t, sub, outbox.HandlerFunc(h), quick)
			eventually(t, "what was published in statement mode", func() bool { return rec.n.Load() == 15 })
			if _, err := p.store.Sweep(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}
