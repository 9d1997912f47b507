package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/bounceproof/bounceproof/outbox"
)

// A log whose transaction ids are those of another cluster, far ahead, and that got new events since.
func TestRebaseLosesNothing(t *testing.T) {
	t.Parallel()
	db := setup(t, outbox.Config{Lanes: 3})
	p := db.proc
	sub := p.subscribe(t, "s", outbox.SubscriptionConfig{})
	p.subscribe(t, "idle", outbox.SubscriptionConfig{})
	rec := newRecorder()
	enough := make(chan struct{})
	h := func(ctx context.Context, d outbox.Delivery) error {
		if rec.n.Load() == 200 {
			select {
			case <-enough:
			default:
				close(enough)
			}
		}
		if rec.n.Load() >= 200 {
			<-ctx.Done()
			return ctx.Err()
		}
		return rec.handle(ctx, d)
	}
	for range 10 {
		p.publish(t, events(30, func(i int) string { return fmt.Sprint(i % 5) })...)
	}
	cfg := quick
	cfg.PageSize, cfg.ShutdownTimeout, cfg.Concurrency = 7, -1, 1
	d := start(t, sub, outbox.HandlerFunc(h), cfg)
	<-enough
	d.stop(t)
	for _, q := range []string{
		"update outbox.event set xid = (xid::text::bigint + 1000000000)::text::xid8",
		`update outbox.tick set snapshot = (select ((pg_snapshot_xmin(snapshot)::text::bigint + 1000000000) || ':' ||
		   (pg_snapshot_xmax(snapshot)::text::bigint + 1000000000) || ':' ||
		   coalesce((select string_agg((x::text::bigint + 1000000000)::text, ',' order by x) from pg_snapshot_xip(snapshot) x), ''))::pg_snapshot)
		 where id > 0`,
		"update outbox.meta set system_identifier = 1",
	} {
		if _, err := db.conn.Exec(t.Context(), q); err != nil {
			t.Fatal(err)
		}
	}
	p.publish(t, events(20, func(int) string { return "new" })...)
	d2, err := outbox.NewDispatcher(sub, outbox.HandlerFunc(rec.handle), quick)
	if err != nil {
		t.Fatal(err)
	}
	if err := d2.Run(t.Context()); !errors.Is(err, outbox.ErrRebaseNeeded) {
		t.Fatalf("before: %v", err)
	}
	if err := p.store.Rebase(t.Context()); err != nil {
		t.Fatal(err)
	}
	start(t, sub, outbox.HandlerFunc(rec.handle), quick)
	eventually(t, "all of both clusters", func() bool {
		rec.mu.Lock()
		defer rec.mu.Unlock()
		return len(rec.seen) == 320
	})
	p.publish(t, outbox.Event{Type: "after"})
	eventually(t, "the next", func() bool {
		rec.mu.Lock()
		defer rec.mu.Unlock()
		return len(rec.seen) == 321
	})
	rec.mu.Lock()
	defer rec.mu.Unlock()
	again := len(rec.all) - len(rec.seen)
	if again > 200 {
		t.Errorf("%d came again", again)
	}
	for key, seqs := range rec.order {
		var first []int64
		for _, s := range seqs {
			if !slices.Contains(first, s) {
				first = append(first, s)
			}
		}
		if !slices.IsSorted(first) {
			t.Errorf("key %s came as %v", key, seqs)
		}
	}
	t.Logf("%d of 300 came again", again)
	all := newRecorder() // a reader from the start still gets everything
	start(t, p.subscribe(t, "another", outbox.SubscriptionConfig{}), outbox.HandlerFunc(all.handle), quick)
	eventually(t, "all for another", func() bool { return all.n.Load() == 321 })
}
