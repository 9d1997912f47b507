package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/notify"
	"github.com/bounceproof/bounceproof/outbox"
)

func TestPublishedEventsAreDeliveredWithAllTheyCarry(t *testing.T) {
	t.Parallel()
	db := setup(t, outbox.Config{})
	sub := db.proc.subscribe(t, "mailer", outbox.SubscriptionConfig{})
	want := outbox.Event{Type: "order.paid", Key: "7", Payload: []byte{0, 1, 255}, Headers: map[string]string{"trace": "ü\"x"}}
	db.proc.publish(t, want)
	db.proc.publish(t, outbox.Event{Type: "plain"})
	rec := newRecorder()
	d := start(t, sub, outbox.HandlerFunc(rec.handle), outbox.DispatcherConfig{})
	eventually(t, "two deliveries", func() bool { return rec.n.Load() == 2 })
	d.stop(t)
	for _, got := range rec.deliveries() {
		if got.Subscription != "mailer" || got.Attempt != 1 || time.Since(got.PublishedAt).Abs() > time.Hour || got.Seq < 1 || got.Seq > 2 {
			t.Errorf("delivery %+v", got)
		}
		if got.Type == "plain" {
			if got.Key != "" || len(got.Payload) != 0 || got.Headers != nil {
				t.Errorf("plain event came as %+v", got.Event)
			}
			continue
		}
		if got.Type != want.Type || got.Key != want.Key || string(got.Payload) != string(want.Payload) || got.Headers["trace"] != "ü\"x" {
			t.Errorf("got %+v, want %+v", got.Event, want)
		}
	}
	if n := db.count(t, "select count(*) from outbox.lease where owner is not null"); n != 0 {
		t.Errorf("%d leases are still held after Run returned", n)
	}
	if n := db.count(t, "select count(*) from outbox.member"); n != 0 {
		t.Errorf("%d members are left after Run returned", n)
	}
}

func TestASecondRunDeliversNothingAgain(t *testing.T) {
	t.Parallel()
	db := setup(t, outbox.Config{})
	sub := db.proc.subscribe(t, "s", outbox.SubscriptionConfig{})
	for i := range 10 {
		db.proc.publish(t, events(50, func(j int) string { return fmt.Sprint((i + j) % 7) })...)
	}
	rec := newRecorder()
	d := start(t, sub, outbox.HandlerFunc(rec.handle), outbox.DispatcherConfig{PageSize: 7})
	eventually(t, "all delivered", func() bool { return rec.n.Load() >= 500 })
	d.stop(t)
	d = start(t, sub, outbox.HandlerFunc(rec.handle), outbox.DispatcherConfig{PageSize: 7})
	db.proc.publish(t, outbox.Event{Type: "last"})
	eventually(t, "the last", func() bool { return rec.n.Load() >= 501 })
	d.stop(t)
	if n := rec.n.Load(); n != 501 {
		t.Fatalf("%d deliveries of 501 events", n)
	}
	for key, seqs := range rec.order {
		if !slices.IsSorted(seqs) {
			t.Errorf("key %s came as %v", key, seqs)
		}
	}
}

func TestAbortedTransactionsAndSavepointsNeverDeliver(t *testing.T) {
	t.Parallel()
	db := setup(t, outbox.Config{})
	p := db.proc
	sub := p.subscribe(t, "s", outbox.SubscriptionConfig{})
	boom := errors.New("boom")
	err := p.ex.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
		if err := p.store.Publish(ctx, tx, outbox.Event{Type: "aborted"}); err != nil {
			return err
		}
		return boom
	})
	if !errors.Is(err, boom) {
		t.Fatal(err)
	}
	// A foreign transaction, with a savepoint that is rolled back and one that is not.
	tx, err := db.conn.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for i, keep := range []bool{false, true} {
		sp, err := tx.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if err := p.store.Publish(t.Context(), sp, outbox.Event{Type: fmt.Sprintf("savepoint %v", keep), Key: fmt.Sprint(i)}); err != nil {
			t.Fatal(err)
		}
		if keep {
			err = sp.Commit(t.Context())
		} else {
			err = sp.Rollback(t.Context())
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	rec := newRecorder()
	d := start(t, sub, outbox.HandlerFunc(rec.handle), outbox.DispatcherConfig{})
	p.publish(t, outbox.Event{Type: "last"})
	eventually(t, "two deliveries", func() bool { return rec.n.Load() >= 2 })
	d.stop(t)
	var types []string
	for _, got := range rec.deliveries() {
		types = append(types, got.Type)
	}
	slices.Sort(types)
	if !slices.Equal(types, []string{"last", "savepoint true"}) {
		t.Fatalf("delivered %q", types)
	}
}

func TestPublishRefusesWhatTheClusterCouldNotBear(t *testing.T) {
	t.Parallel()
	db := setup(t, outbox.Config{})
	p := db.proc
	publish := func(evs ...outbox.Event) error {
		return p.ex.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
			return p.store.Publish(ctx, tx, evs...)
		})
	}
	tooMany, ok := errors.AsType[*outbox.TooManyKeysError](publish(events(257, func(i int) string { return fmt.Sprint(i) })...))
	if !ok || tooMany.Keys != 257 {
		t.Fatalf("257 keys: %v", tooMany)
	}
	if err := publish(events(600, func(i int) string { return fmt.Sprint(i % 256) })...); err != nil {
		t.Fatalf("256 keys: %v", err)
	}
	for _, bad := range []outbox.Event{{}, {Type: "a\x00"}, {Type: "t", Key: "\xff"}, {Type: "t", Headers: map[string]string{"a": "\x00"}}} {
		if err := publish(bad); !errors.Is(err, outbox.ErrInvalidEvent) {
			t.Errorf("%+v: %v", bad, err)
		}
	}
	if n := db.count(t, "select count(*) from outbox.event"); n != 600 {
		t.Errorf("%d events, want 600", n)
	}
}

func TestALongTransactionDelaysNobodyAndIsDeliveredWhenItCommits(t *testing.T) {
	t.Parallel()
	db := setup(t, outbox.Config{})
	p := db.proc
	sub := p.subscribe(t, "s", outbox.SubscriptionConfig{})
	rec := newRecorder()
	start(t, sub, outbox.HandlerFunc(rec.handle), outbox.DispatcherConfig{PollInterval: 50 * time.Millisecond})
	long, err := db.conn.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = long.Rollback(context.WithoutCancel(t.Context())) }()
	if err := p.store.Publish(t.Context(), long, outbox.Event{Type: "long", Key: "long"}); err != nil {
		t.Fatal(err)
	}
	for i := range 300 { // far more ticks than the floor lags
		p.publish(t, outbox.Event{Type: "short", Key: fmt.Sprint(i % 5)})
		if i%20 == 0 {
			eventually(t, "short ones delivered while the long one is open", func() bool { return rec.n.Load() == int64(i)+1 })
		}
	}
	if err := long.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the long one", func() bool { return rec.n.Load() == 301 })
}

func TestIdleDispatchersWriteNoTicks(t *testing.T) {
	t.Parallel()
	db := setup(t, outbox.Config{})
	sub := db.proc.subscribe(t, "s", outbox.SubscriptionConfig{})
	rec := newRecorder()
	cfg := outbox.DispatcherConfig{PollInterval: 10 * time.Millisecond, LeaseDuration: 600 * time.Millisecond}
	start(t, sub, outbox.HandlerFunc(rec.handle), cfg)
	start(t, sub, outbox.HandlerFunc(rec.handle), cfg)
	db.proc.publish(t, events(10, unkeyed)...)
	eventually(t, "ten deliveries", func() bool { return rec.n.Load() == 10 })
	written := func() [2]int64 {
		return [2]int64{db.count(t, "select count(*) from outbox.tick"), db.count(t, "select count(*) from outbox.cursor")}
	}
	// Both keep polling, every 10 ms, and renewing leases, every 200 ms: transaction ids go on, ticks must not.
	var last [2]int64
	var since int64
	eventually(t, "no ticks and no progress rows for 300 polls and renewals", func() bool {
		if now := written(); now != last {
			last, since = now, db.proc.requests.Load()
		}
		return db.proc.requests.Load() > since+300
	})
	// The control: something new makes a tick.
	db.proc.publish(t, outbox.Event{Type: "new"})
	eventually(t, "delivery", func() bool { return rec.n.Load() == 11 })
	if n := written()[0]; n <= last[0] {
		t.Errorf("an event was delivered without a tick (%d before)", last[0])
	}
}

func TestLanesAreSpreadAndTakenOver(t *testing.T) {
	t.Parallel()
	db := setup(t, outbox.Config{Lanes: 16})
	cfg := outbox.DispatcherConfig{LeaseDuration: 2 * time.Second, PollInterval: 50 * time.Millisecond}
	shares := func() []int64 {
		rows, err := db.conn.Query(t.Context(), "select count(*) from outbox.lease where owner is not null and lease_until > now() group by owner order by 1")
		if err != nil {
			t.Fatal(err)
		}
		n, err := pgx.CollectRows(rows, pgx.RowTo[int64])
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	rec := newRecorder()
	procs := make([]*process, 3)
	run := make([]*running, 3)
	for i := range procs {
		procs[i] = newProcess(t, db.url, outbox.Config{})
		run[i] = start(t, procs[i].subscribe(t, "s", outbox.SubscriptionConfig{}), outbox.HandlerFunc(rec.handle), cfg)
	}
	eventually(t, "5, 5 and 6 lanes", func() bool { return slices.Equal(shares(), []int64{5, 5, 6}) })
	run[1].stop(t) // in order: its lanes are free at once
	eventually(t, "8 and 8 lanes", func() bool { return slices.Equal(shares(), []int64{8, 8}) })
	procs[0].Cut() // killed
	run[0].cancel()
	eventually(t, "16 lanes", func() bool { return slices.Equal(shares(), []int64{16}) })
	db.proc.publish(t, events(200, func(i int) string { return fmt.Sprint(i) })...)
	eventually(t, "all lanes delivered by the last", func() bool { return rec.n.Load() == 200 })
}

// A dispatcher whose own lease ran out, too, while it claims others must not claim that: its handlers may be at work there.
func TestAClaimLeavesTheOwnersLanesAlone(t *testing.T) {
	t.Parallel()
	db := setup(t, outbox.Config{Lanes: 4})
	db.proc.subscribe(t, "s", outbox.SubscriptionConfig{})
	const change = `update outbox.lease set owner = (array['me', 'other', 'other', null])[lane + 1],
		lease_until = now() + case lane when 2 then 1 else -1 end * interval '1 hour'`
	if _, err := db.conn.Exec(t.Context(), change); err != nil {
		t.Fatal(err)
	}
	rows, err := db.conn.Query(t.Context(), db.proc.store.Statement("lease_claim"), "s", "me", time.Minute, 4)
	if err != nil {
		t.Fatal(err)
	}
	lanes, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (lane int16, err error) {
		return lane, row.Scan(&lane, nil)
	})
	if err != nil {
		t.Fatal(err)
	}
	if slices.Sort(lanes); !slices.Equal(lanes, []int16{1, 3}) {
		t.Errorf("claimed lanes %v, want the other's that ran out and the free one", lanes)
	}
}

func TestAZombieRecordsNothing(t *testing.T) {
	t.Parallel()
	db := setup(t, outbox.Config{Lanes: 1})
	// The zombie's lease runs out soon and the successor's never. The successor's name is the first, so the lane stays with it when the
	// zombie is back.
	cfg := outbox.DispatcherConfig{LeaseDuration: 300 * time.Millisecond, PollInterval: 20 * time.Millisecond, Owner: "zombie"}
	zombie := newProcess(t, db.url, outbox.Config{})
	entered, proceed := make(chan struct{}), make(chan struct{})
	var once sync.Once
	slow := func(context.Context, outbox.Delivery) error { // ignores its context, as a process that was stopped does
		once.Do(func() { close(entered) })
		<-proceed
		return nil
	}
	z := start(t, zombie.subscribe(t, "s", outbox.SubscriptionConfig{}), outbox.HandlerFunc(slow), cfg)
	db.proc.publish(t, events(3, func(int) string { return "k" })...)
	<-entered
	zombie.Cut()
	rec := newRecorder()
	cfg.LeaseDuration, cfg.Owner = time.Minute, "a successor"
	start(t, db.proc.subscribe(t, "s", outbox.SubscriptionConfig{}), outbox.HandlerFunc(rec.handle), cfg)
	eventually(t, "the successor delivers", func() bool { return rec.n.Load() == 3 })
	token := db.count(t, "select token from outbox.lease")
	eventually(t, "the successor records", func() bool {
		return db.count(t, "select count(*) from outbox.cursor where token = $1 and from_tick > 0", token) > 0
	})
	zombie.Restore()
	close(proceed)
	eventually(t, "the zombie notices", func() bool { return z.Stats().LeasesLost > 0 })
	db.proc.publish(t, outbox.Event{Type: "after", Key: "k"})
	eventually(t, "the successor goes on", func() bool { return rec.n.Load() == 4 })
	if bad := db.count(t, "select count(*) from outbox.cursor where token < $1 and n > (select min(n) from outbox.cursor where token = $1)", token); bad != 0 {
		t.Errorf("the zombie added %d rows of progress", bad)
	}
	if last := db.count(t, "select token from outbox.cursor order by n desc limit 1"); last != token {
		t.Errorf("token %d, want %d", last, token)
	}
}

func TestAListenerWakesTheDispatcherOfAnotherProcess(t *testing.T) {
	t.Parallel()
	db := setup(t, outbox.Config{})
	other := newProcess(t, db.url, outbox.Config{})
	rec := newRecorder()
	l, err := notify.NewListener(other.pool, notify.ListenerConfig{Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	cfg := outbox.DispatcherConfig{PollInterval: -1, Proven: l.Healthy}
	d := start(t, other.subscribe(t, "s", outbox.SubscriptionConfig{}), outbox.HandlerFunc(rec.handle), cfg)
	l.Handle(other.store.Channel(), d)
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan error, 1)
	go func() { done <- l.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
	eventually(t, "a listener that works", l.Healthy)
	for i := range 5 {
		db.proc.publish(t, outbox.Event{Type: "t"})
		eventually(t, "delivery without polling", func() bool { return rec.n.Load() == int64(i)+1 })
	}
}
