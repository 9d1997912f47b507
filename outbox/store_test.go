package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/outbox"
	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

func TestConfigIsChecked(t *testing.T) {
	t.Parallel()
	db := setup(t, outbox.Config{})
	for _, cfg := range []outbox.Config{
		{Schema: "a b"}, {Schema: `x"y`}, {Schema: strings.Repeat("x", 64)}, {Lanes: -1}, {Lanes: 1025}, {WakeUp: 7},
	} {
		if _, err := outbox.New(db.proc.ex, cfg); err == nil {
			t.Errorf("%+v was taken", cfg)
		}
	}
	sub := db.proc.subscribe(t, "s", outbox.SubscriptionConfig{})
	h := outbox.HandlerFunc(newRecorder().handle)
	for _, cfg := range []outbox.DispatcherConfig{
		{LeaseDuration: time.Millisecond}, {Concurrency: -1}, {PageSize: 1001}, {MinBackoff: 2, MaxBackoff: 1}, {Owner: "\x00"}, {Middleware: []outbox.Middleware{nil}},
	} {
		if _, err := outbox.NewDispatcher(sub, h, cfg); err == nil {
			t.Errorf("%+v was taken", cfg)
		}
	}
	if _, err := db.proc.store.Subscribe(t.Context(), "", outbox.SubscriptionConfig{}); err == nil {
		t.Error("an empty name was taken")
	}
}

func TestLanesAreFixedByTheFirstMigrate(t *testing.T) {
	t.Parallel()
	db := setup(t, outbox.Config{Lanes: 5})
	other, err := outbox.New(db.proc.ex, outbox.Config{Lanes: 6})
	if err != nil {
		t.Fatal(err)
	}
	publish := func(s *outbox.Store) error {
		return db.proc.ex.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
			return s.Publish(ctx, tx, outbox.Event{Type: "t"})
		})
	}
	for what, err := range map[string]error{"migrate": other.Migrate(t.Context()), "publish": publish(other)} {
		if m, ok := errors.AsType[*outbox.ConfigMismatchError](err); !ok || m.Database != "5" || m.Config != "6" {
			t.Errorf("%s: %v", what, err)
		}
	}
	same, err := outbox.New(db.proc.ex, outbox.Config{}) // the default takes what is there
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(same.Migrate(t.Context()), publish(same)); err != nil {
		t.Error(err)
	}
	missing, err := outbox.New(db.proc.ex, outbox.Config{Schema: "nowhere"})
	if err != nil {
		t.Fatal(err)
	}
	if err := publish(missing); !errors.Is(err, outbox.ErrNotMigrated) {
		t.Errorf("without tables: %v", err)
	}
}

func TestMigrateMayBeCalledByAllAtOnceAndByNobodySpecial(t *testing.T) {
	t.Parallel()
	db := postgres.Start(t, postgres.Options{}).NewDatabase(t)
	admin, err := pgxpool.New(t.Context(), db.URL)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(admin.Close)
	role := strings.ToLower(db.Name) + "_role"
	t.Cleanup(func() {
		ctx := context.Background()
		_, _ = admin.Exec(ctx, fmt.Sprintf("drop owned by %s cascade", role))
		_, _ = admin.Exec(ctx, "drop role "+role)
	})
	for _, q := range []string{
		"create role " + role + " login",
		`create schema "Mine" authorization ` + role, // no right to create schemas
		"alter role " + role + " set default_transaction_isolation = 'repeatable read'",
	} {
		if _, err := admin.Exec(t.Context(), q); err != nil {
			t.Fatal(err)
		}
	}
	url := strings.Replace(db.URL, "postgres@", role+"@", 1)
	p := newProcess(t, url, outbox.Config{Schema: "Mine"})
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if err := p.store.Migrate(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if t.Failed() {
		return
	}
	rec := newRecorder()
	start(t, p.subscribe(t, "s", outbox.SubscriptionConfig{}), outbox.HandlerFunc(rec.handle), quick)
	for range 20 {
		p.publish(t, events(5, unkeyed)...)
	}
	eventually(t, "all, as a role with another isolation level", func() bool { return rec.n.Load() == 100 })
}

func TestASequenceThatLosesEventsIsRefused(t *testing.T) {
	t.Parallel()
	for what, alter := range map[string]string{
		"CACHE":     "alter sequence outbox.event_seq cache 20",
		"CYCLE":     "alter sequence outbox.event_seq cycle",
		"INCREMENT": "alter sequence outbox.event_seq increment by 2",
		"owned":     "alter sequence outbox.event_seq owned by outbox.event.seq",
		"set back":  "select setval('outbox.event_seq', 3)",
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			db := setup(t, outbox.Config{})
			db.proc.publish(t, events(10, unkeyed)...)
			if err := db.proc.store.Migrate(t.Context()); err != nil {
				t.Fatalf("before: %v", err)
			}
			if _, err := db.conn.Exec(t.Context(), alter); err != nil {
				t.Fatal(err)
			}
			_, statusErr := db.proc.store.Status(t.Context())
			for _, err := range []error{db.proc.store.Migrate(t.Context()), statusErr} {
				if e, ok := errors.AsType[*outbox.SequenceError](err); !ok || !strings.Contains(e.Reason, what) {
					t.Errorf("got %v", err)
				}
			}
		})
	}
}

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

func TestALogFromAnotherClusterIsRefused(t *testing.T) {
	t.Parallel()
	for what, change := range map[string]string{
		"another cluster":   "update outbox.meta set system_identifier = system_identifier + 1",
		"another database":  "update outbox.meta set database_oid = 1",
		"ids gone back":     "insert into outbox.tick (id, floor, tip, snapshot, xid) values (1000, 0, 0, '900000000:900000000:', '900000000')",
		"numbers gone back": "insert into outbox.tick (id, floor, tip, snapshot) values (1000, 0, 100, pg_current_snapshot())",
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			db := setup(t, outbox.Config{})
			sub := db.proc.subscribe(t, "s", outbox.SubscriptionConfig{})
			rec := newRecorder()
			d := start(t, sub, outbox.HandlerFunc(rec.handle), quick)
			db.proc.publish(t, outbox.Event{Type: "t"})
			eventually(t, "works before", func() bool { return rec.n.Load() == 1 })
			if _, err := db.conn.Exec(t.Context(), change); err != nil {
				t.Fatal(err)
			}
			select {
			case err := <-d.done:
				if !errors.Is(err, outbox.ErrRebaseNeeded) {
					t.Errorf("Run returned %v", err)
				}
				d.done <- nil
			case <-time.After(patience):
				t.Fatal("Run goes on")
			}
		})
	}
}

func TestScheduledEventsComeWhenTheyAreDue(t *testing.T) {
	t.Parallel()
	db := setup(t, outbox.Config{})
	sub := db.proc.subscribe(t, "s", outbox.SubscriptionConfig{})
	rec := newRecorder()
	start(t, sub, outbox.HandlerFunc(rec.handle), outbox.DispatcherConfig{PollInterval: -1})
	begin := time.Now()
	db.proc.publish(t,
		outbox.Event{Type: "later", Key: "k", DueAt: begin.Add(400 * time.Millisecond)},
		outbox.Event{Type: "past", DueAt: begin.Add(-time.Hour)},
		outbox.Event{Type: "now", Key: "k"},
		outbox.Event{Type: "never", DueAt: begin.Add(time.Hour)})
	eventually(t, "two at once", func() bool { return rec.n.Load() == 2 })
	eventually(t, "the third", func() bool { return rec.n.Load() == 3 })
	if took := time.Since(begin); took < 400*time.Millisecond {
		t.Errorf("it came after %v", took)
	}
	if last := rec.deliveries()[2]; last.Type != "later" || last.Key != "k" {
		t.Errorf("the last was %+v", last)
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
	rec := newRecorder()
	start(t, sub, outbox.HandlerFunc(rec.handle), quick)
	eventually(t, "ten", func() bool { return rec.n.Load() == 10 })
	if n := db.count(t, "select count(*) from outbox.event"); n != 10 {
		t.Errorf("%d events, want 10", n)
	}
	swept, err := p.store.Sweep(t.Context())
	if err != nil || swept.Dedup != 2 {
		t.Errorf("swept %+v, %v", swept, err)
	}
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
	if _, err := db.conn.Exec(ctx, "update outbox.tick set at = at - interval '1 hour' where id > 0"); err != nil {
		t.Fatal(err)
	}
	d.stop(t)
	before := db.count(t, "select count(*) from outbox.tick")
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
