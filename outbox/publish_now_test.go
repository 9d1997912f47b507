package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/outbox"
)

func TestPublishNowAloneCostsOneRoundTrip(t *testing.T) {
	t.Parallel()
	db := setup(t, outbox.Config{WakeUp: outbox.WakeUpPoll})
	p := db.proc
	now := func(events ...outbox.Event) int64 {
		before := p.requests.Load()
		if err := p.store.PublishNow(t.Context(), events...); err != nil {
			t.Fatal(err)
		}
		return p.requests.Load() - before
	}
	for range 10 { // learnt and prepared on every connection
		now(outbox.Event{Type: "t", Key: "k"})
		now(events(3, unkeyed)...)
	}
	if n := now(outbox.Event{Type: "t", Key: "k"}); n != 1 {
		t.Errorf("%d requests for one event", n)
	}
	if n := now(events(3, unkeyed)...); n != 1 {
		t.Errorf("%d requests for three events", n)
	}
	if n := now(); n != 0 {
		t.Errorf("%d requests for no event", n)
	}
}

func TestConcurrentPublishNowSharesCommits(t *testing.T) {
	t.Parallel()
	db := setup(t, outbox.Config{WakeUp: outbox.WakeUpPoll})
	p := db.proc
	rec := newRecorder()
	sub := p.subscribe(t, "s", outbox.SubscriptionConfig{})
	const callers, each = 32, 50
	run := func(publish func(e ...outbox.Event) error) (commits int64) {
		before := db.count(t, "select count(distinct xid) from outbox.event")
		var wg sync.WaitGroup
		for i := range callers {
			wg.Go(func() {
				for j := range each {
					key := ""
					if i%2 == 0 {
						key = fmt.Sprint("k", i%8)
					}
					if err := publish(outbox.Event{Type: "t", Key: key, Payload: fmt.Appendf(nil, "%d/%d", i, j)}); err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		wg.Wait()
		return db.count(t, "select count(distinct xid) from outbox.event") - before
	}
	shared := run(func(e ...outbox.Event) error { return p.store.PublishNow(t.Context(), e...) })
	alone := run(func(e ...outbox.Event) error {
		return p.ex.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error { return p.store.Publish(ctx, tx, e...) })
	})
	if shared > callers*each/4 || alone != callers*each {
		t.Errorf("%d transactions together and %d alone for %d events", shared, alone, callers*each)
	}
	t.Logf("%d transactions together, %d alone, for %d events", shared, alone, callers*each)
	start(t, sub, outbox.HandlerFunc(rec.handle), quick)
	eventually(t, "all", func() bool { return rec.n.Load() >= 2*callers*each })
	last := make(map[string]int)
	for _, d := range rec.deliveries() {
		var i, j int
		if _, err := fmt.Sscanf(string(d.Payload), "%d/%d", &i, &j); err != nil {
			t.Fatal(err)
		}
		if from := fmt.Sprint(i); d.Key != "" {
			if want := last[from] % each; j != want {
				t.Fatalf("caller %d: event %d came, want %d", i, j, want)
			}
			last[from]++
		}
	}
	if len(rec.seen) != 2*callers*each {
		t.Errorf("%d events delivered, want %d", len(rec.seen), 2*callers*each)
	}
}

func TestARefusedCallOfPublishNowTakesNobodyDown(t *testing.T) {
	t.Parallel()
	db := setup(t, outbox.Config{WakeUp: outbox.WakeUpPoll})
	if _, err := db.conn.Exec(t.Context(), "alter table outbox.event add constraint no_bad check (type <> 'bad')"); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	var refused atomic.Int64
	for i := range 64 {
		wg.Go(func() {
			typ := "good"
			if i%16 == 3 {
				typ = "bad"
			}
			err := db.proc.store.PublishNow(t.Context(), outbox.Event{Type: "good", Payload: []byte("first")}, outbox.Event{Type: typ})
			pgErr, isPgErr := errors.AsType[*pgconn.PgError](err)
			switch {
			case typ == "good" && err != nil:
				t.Error(err)
			case typ == "bad" && (!isPgErr || pgErr.Code != "23514"):
				t.Errorf("refused event: %v", err)
			case typ == "bad":
				refused.Add(1)
			}
		})
	}
	wg.Wait()
	if n := db.count(t, "select count(*) from outbox.event"); n != 2*60 || refused.Load() != 4 {
		t.Errorf("%d events stand, want those of 60 calls whole; %d calls refused", n, refused.Load())
	}
}

// holdKey takes a key's lock in a transaction elsewhere until it is let go.
func holdKey(t *testing.T, db *database, key string) (letGo func()) {
	t.Helper()
	tx, err := db.conn.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := db.proc.store.Publish(t.Context(), tx, outbox.Event{Type: "held", Key: key}); err != nil {
		t.Fatal(err)
	}
	return func() {
		if err := tx.Rollback(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	}
}

func TestPublishNowThatWaitsForAKeyHoldsUpNoOther(t *testing.T) {
	t.Parallel()
	db := setup(t, outbox.Config{WakeUp: outbox.WakeUpPoll})
	store := db.proc.store
	letGo := holdKey(t, db, "held")
	waiting := make(chan error, 8)
	for range cap(waiting) {
		go func() { waiting <- store.PublishNow(t.Context(), outbox.Event{Type: "t", Key: "held"}) }()
	}
	eventually(t, "one waits for the lock", func() bool {
		return db.count(t, "select count(*) from pg_locks where locktype = 'advisory' and not granted") > 0
	})
	for i := range 20 {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		if err := store.PublishNow(ctx, outbox.Event{Type: "t", Key: fmt.Sprint("free", i%3)}); err != nil {
			t.Fatal(err)
		}
		cancel()
	}
	if n := db.count(t, "select count(*) from pg_locks where locktype = 'advisory' and not granted"); n != 1 {
		t.Errorf("%d wait for the lock, want one for all", n)
	}
	select {
	case err := <-waiting:
		t.Fatalf("published under a held key: %v", err)
	default:
	}

	// One that gives up leaves the others; the last one takes its statement with it.
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := store.PublishNow(ctx, outbox.Event{Type: "gave up", Key: "held"}); !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, executor.ErrCommitUnknown) {
		t.Errorf("one that was never sent: %v", err)
	}
	letGo()
	for range cap(waiting) {
		if err := <-waiting; err != nil {
			t.Error(err)
		}
	}
	if n := db.count(t, "select count(*) from outbox.event where type = 't'"); n != 28 {
		t.Errorf("%d events, want 28", n)
	}
	if n := db.count(t, "select count(*) from outbox.event where type <> 't'"); n != 0 {
		t.Errorf("%d events of calls that gave up", n)
	}
}

func TestPublishNowThatEverybodyLeavesIsCancelled(t *testing.T) {
	t.Parallel()
	db := setup(t, outbox.Config{WakeUp: outbox.WakeUpPoll})
	letGo := holdKey(t, db, "held")
	ctx, cancel := context.WithCancel(t.Context())
	errs := make(chan error, 4)
	for range cap(errs) {
		go func() { errs <- db.proc.store.PublishNow(ctx, outbox.Event{Type: "t", Key: "held"}) }()
	}
	eventually(t, "one waits for the lock", func() bool {
		return db.count(t, "select count(*) from pg_locks where locktype = 'advisory' and not granted") > 0
	})
	cancel()
	for range cap(errs) {
		if err := <-errs; !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
	}
	eventually(t, "the statement is cancelled", func() bool {
		return db.count(t, "select count(*) from pg_locks where locktype = 'advisory' and not granted") == 0
	})
	letGo()
	if err := db.proc.store.PublishNow(t.Context(), outbox.Event{Type: "after", Key: "held"}); err != nil {
		t.Fatal(err)
	}
	if n := db.count(t, "select count(*) from outbox.event"); n != 1 {
		t.Errorf("%d events, want the one after", n)
	}
}

// What PublishNow said happened happened, whatever becomes of the connections; and no worker stays.
func TestPublishNowNeverLiesWhenConnectionsAreLost(t *testing.T) {
	t.Parallel()
	db := setup(t, outbox.Config{WakeUp: outbox.WakeUpPoll})
	var published, failed sync.Map
	var done atomic.Bool
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			for j := 0; !done.Load(); j++ {
				typ := fmt.Sprintf("%d/%d", i, j)
				switch err := db.proc.store.PublishNow(t.Context(), outbox.Event{Type: typ}); {
				case err == nil:
					published.Store(typ, true)
				case errors.Is(err, executor.ErrCommitUnknown):
				default:
					failed.Store(typ, err)
				}
			}
		})
	}
	for range 20 {
		db.count(t, `select count(pg_terminate_backend(pid)) from pg_stat_activity
			where datname = current_database() and pid <> pg_backend_pid() and application_name <> 'auditor' and query like '%event%'`)
		n := db.count(t, "select count(*) from outbox.event")
		eventually(t, "more events", func() bool { return db.count(t, "select count(*) from outbox.event") > n+50 })
	}
	done.Store(true)
	wg.Wait()
	rows, err := db.conn.Query(t.Context(), "select type, count(*) from outbox.event group by type")
	if err != nil {
		t.Fatal(err)
	}
	stands := make(map[string]int64)
	var typ string
	var n int64
	if _, err := pgx.ForEachRow(rows, []any{&typ, &n}, func() error { stands[typ] = n; return nil }); err != nil {
		t.Fatal(err)
	}
	count := 0
	published.Range(func(typ, _ any) bool {
		count++
		if stands[typ.(string)] != 1 { //nolint:forcetypeassert // stored above
			t.Errorf("%v was said to be published and stands %d times", typ, stands[typ.(string)]) //nolint:forcetypeassert // as above
		}
		return true
	})
	failed.Range(func(typ, err any) bool {
		if stands[typ.(string)] != 0 { //nolint:forcetypeassert // stored above
			t.Errorf("%v was said to have failed (%v) and stands", typ, err)
		}
		return true
	})
	t.Logf("%d published", count)
	eventually(t, "no worker", func() bool {
		buf := make([]byte, 1<<20)
		return !strings.Contains(string(buf[:runtime.Stack(buf, true)]), "outbox.(*groups).work") || t.Failed()
	})
}
