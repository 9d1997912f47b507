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

// tailing is a Tail that runs.
type tailing struct {
	*recorder
	stop func()
}

func startTail(t *testing.T, s *outbox.Store, from outbox.Start) *tailing {
	t.Helper()
	r := &tailing{recorder: newRecorder()}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan error, 1)
	go func() { done <- s.Tail(ctx, from, r.handle) }()
	r.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Tail returned %v", err)
		}
	})
	t.Cleanup(r.stop)
	return r
}

func (r *tailing) types() string {
	var all []string
	for _, d := range r.deliveries() {
		all = append(all, d.Type)
	}
	return strings.Join(all, " ")
}

// What commits after a start is shown, although its number is below those that were shown before: it waits in no list of numbers.
func TestTailShowsWhatCommitsLate(t *testing.T) {
	t.Parallel()
	db := setup(t, outbox.Config{Lanes: 2})
	p := db.proc
	p.publish(t, outbox.Event{Type: "before"})
	early, err := db.conn.Begin(t.Context()) // in progress when the tail begins
	if err != nil {
		t.Fatal(err)
	}
	if err := p.store.Publish(t.Context(), early, outbox.Event{Type: "early"}); err != nil {
		t.Fatal(err)
	}
	r := startTail(t, p.store, outbox.StartNow())
	ping := 0
	shown := func() {
		t.Helper()
		ping++
		p.publish(t, outbox.Event{Type: fmt.Sprint(ping)})
		eventually(t, "an event that commits at once", func() bool { return strings.Contains(r.types(), fmt.Sprint(ping)) })
	}
	eventually(t, "the beginning", func() bool { p.publish(t, outbox.Event{Type: "0"}); return r.n.Load() > 0 })
	late, err := db.conn.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := p.store.Publish(t.Context(), late, outbox.Event{Type: "late"}); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		shown()
	}
	if s := r.types(); strings.Contains(s, "early") || strings.Contains(s, "late") {
		t.Fatalf("before their commits: %s", s)
	}
	if err := errors.Join(late.Commit(t.Context()), early.Commit(t.Context())); err != nil {
		t.Fatal(err)
	}
	eventually(t, "both", func() bool { return strings.Contains(r.types(), "early") && strings.Contains(r.types(), "late") })
	shown()
	if s := r.types(); strings.Contains(s, "before") {
		t.Error(s)
	}
	for seq, n := range r.seen {
		if n != 1 {
			t.Errorf("event %d came %d times", seq, n)
		}
	}
}

// Everything is shown once and in order, through a pooler that changes servers, over a cut network; and nothing is left behind.
func TestTailShowsEveryEventOnce(t *testing.T) {
	t.Parallel()
	s := postgres.Start(t, postgres.Options{})
	b := pgbouncer.Start(t, s, pgbouncer.Options{})
	db := setupOn(t, s, b, outbox.Config{})
	watcher := newProcess(t, db.url, outbox.Config{})
	before := db.count(t, "select count(*) from outbox.tick")
	r := startTail(t, watcher.store, outbox.StartEarliest())
	const publishers, each = 4, 150
	var publishing sync.WaitGroup
	for i := range publishers {
		publishing.Go(func() {
			for j := range each {
				key := fmt.Sprint((i + j) % 5)
				err := db.proc.ex.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
					return db.proc.store.Publish(ctx, tx, outbox.Event{Type: "test", Key: key}, outbox.Event{Type: "test"})
				})
				if err != nil {
					t.Error(err)
				}
				if i == 0 && j == each/2 {
					watcher.Cut()
					watcher.Restore()
				}
			}
		})
	}
	publishing.Wait()
	eventually(t, "all events", func() bool { return r.n.Load() >= 2*publishers*each })
	r.stop()
	if len(r.seen) != 2*publishers*each || r.n.Load() != 2*publishers*each {
		t.Errorf("%d events, %d of them different", r.n.Load(), len(r.seen))
	}
	for key, order := range r.order {
		if !slices.IsSorted(order) {
			t.Errorf("key %s: %v", key, order)
		}
	}
	if n := db.count(t, "select (select count(*) from outbox.subscription) + (select count(*) from outbox.cursor) + (select count(*) from outbox.member)"); n != 0 {
		t.Errorf("%d rows are left", n)
	}
	if n := db.count(t, "select count(*) from outbox.tick"); n != before {
		t.Errorf("%d ticks, %d before", n, before)
	}
}

func TestTailEndsWithItsHandlersError(t *testing.T) {
	t.Parallel()
	db := setup(t, outbox.Config{})
	db.proc.publish(t, events(5, unkeyed)...)
	enough := errors.New("enough")
	n := 0
	err := db.proc.store.Tail(t.Context(), outbox.StartEarliest(), func(context.Context, outbox.Delivery) error {
		if n++; n == 3 {
			return enough
		}
		return nil
	})
	if !errors.Is(err, enough) || n != 3 {
		t.Errorf("%v after %d events", err, n)
	}
	// What will not pass ends it too.
	if _, err := db.conn.Exec(t.Context(), "drop schema outbox cascade"); err != nil {
		t.Fatal(err)
	}
	if err := db.proc.store.Tail(t.Context(), outbox.StartNow(), func(context.Context, outbox.Delivery) error { return nil }); err == nil {
		t.Error("without tables")
	}
}
