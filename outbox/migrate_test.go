package outbox_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/internal/logrec"
	"github.com/bounceproof/bounceproof/outbox"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

// A store of the first version, with events that were delivered, that failed, and that nobody has seen, goes on where it was.
func TestMigrateBringsAFirstVersionWithEventsUpToDate(t *testing.T) {
	for _, version := range postgres.Versions() {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			ctx := t.Context()
			url := postgres.Start(t, postgres.Options{Version: version}).NewDatabase(t).URL
			conn, err := pgxpool.New(ctx, url)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(conn.Close)
			db := &database{url: url, conn: conn, proc: newProcess(t, url, outbox.Config{})}
			exec := func(sql string, args ...any) {
				t.Helper()
				if _, err := conn.Exec(ctx, sql, args...); err != nil {
					t.Fatal(err)
				}
			}
			exec("create schema outbox")
			exec(strings.NewReplacer("{lanes}", "4", "{hash}", "'fnv1a64'").Replace(db.proc.store.Statement("schema_001")))
			const publish = `insert into outbox.event select $1, nextval('outbox.event_seq'), pg_current_xact_id(), $2, $3, '\x00', null, now()`
			exec(publish, 0, "delivered", nil)
			exec(`insert into outbox.tick (id, floor, tip, snapshot) values (1, 0, 1, pg_current_snapshot())`)
			exec(`insert into outbox.tick (id, floor, tip, snapshot) values (2, 0, 1, pg_current_snapshot())`)
			exec(`insert into outbox.subscription (name) values ('s')`)
			exec(`insert into outbox.lease (subscription, lane, owner, token, lease_until) select 's', l, 'gone', 7, now() from generate_series(0, 3) l`)
			exec(`insert into outbox.cursor (subscription, lane, n, from_tick, token) select 's', l, 5, 2, 7 from generate_series(0, 3) l`)
			exec(`insert into outbox.failed (subscription, lane, seq, key, type, payload, published_at, attempt, state, due_at)
				values ('s', 0, 1, repeat('k', 900), 'failed', '\x00', now(), 1, 'retry', now()), ('s', 0, 2, repeat('k', 900), 'parked', '\x00', now(), 0, 'parked', null)`)
			exec(`insert into outbox.dedup (key) values ('once')`)
			exec(publish, 1, "pending", nil)
			exec(publish, 2, "pending", "k")

			if _, err := db.proc.store.Subscription(ctx, "s"); !errors.Is(err, outbox.ErrNotMigrated) {
				t.Fatalf("before: %v", err)
			}
			if err := db.proc.store.Migrate(ctx); err != nil {
				t.Fatal(err)
			}
			if v := db.count(t, "select version from outbox.meta"); v != 2 {
				t.Fatalf("version %d", v)
			}
			if err := db.proc.store.Migrate(ctx); err != nil { // nothing is to be done
				t.Fatal(err)
			}
			rec := newRecorder()
			start(t, db.proc.subscribe(t, "s", outbox.SubscriptionConfig{}), outbox.HandlerFunc(rec.handle), quick)
			db.proc.publish(t, outbox.Event{Type: "new"}, outbox.Event{Type: "double", DedupKey: "once"})
			eventually(t, "all five", func() bool { return rec.n.Load() >= 5 })
			types := make(map[string]int)
			for _, d := range rec.deliveries() {
				types[d.Type]++
			}
			for typ, n := range map[string]int{"failed": 1, "parked": 1, "pending": 2, "new": 1, "delivered": 0, "double": 0} {
				if types[typ] != n {
					t.Errorf("%d × %s, want %d (%v)", types[typ], typ, n, types)
				}
			}
		})
	}
}

// The clock of the server was set back by an hour after an owner had died: its lanes rest no longer than its lease was meant to last.
func TestALeaseDoesNotOutliveAClockThatWasSetBack(t *testing.T) {
	t.Parallel()
	for name, control := range map[string]bool{"a lease of 300 ms": false, "control: a lease of two hours": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := setup(t, outbox.Config{Lanes: 4})
			sub := db.proc.subscribe(t, "s", outbox.SubscriptionConfig{})
			lasts := 300 * time.Millisecond
			if control {
				lasts = 2 * time.Hour
			}
			for _, q := range []string{
				"update outbox.lease set owner = 'dead', token = 1, lease_until = clock_timestamp() + interval '1 hour', lasts = $1",
				"insert into outbox.member (subscription, owner, seen_until, lasts) values ('s', 'dead', clock_timestamp() + interval '1 hour', $1)",
			} {
				if _, err := db.conn.Exec(t.Context(), q, lasts); err != nil {
					t.Fatal(err)
				}
			}
			db.proc.publish(t, events(40, unkeyed)...)
			rec := newRecorder()
			start(t, sub, outbox.HandlerFunc(rec.handle), quick)
			if !control {
				eventually(t, "all", func() bool { return rec.n.Load() == 40 })
				return
			}
			before := db.proc.requests.Load()
			eventually(t, "a hundred requests", func() bool { return db.proc.requests.Load() > before+100 })
			if n := rec.n.Load(); n > 0 {
				t.Errorf("%d events of lanes that somebody else owns", n)
			}
		})
	}
}

// Keys are bounded, and one that is longer, of a time without that bound, fails like any other.
func TestAKeyOfAnyLengthCanFail(t *testing.T) {
	t.Parallel()
	db := setup(t, outbox.Config{Lanes: 1})
	long := strings.Repeat("k", outbox.MaxKeyBytes)
	for _, e := range []outbox.Event{{Type: "t", Key: long + "k"}, {Type: "t", DedupKey: long + "k"}} {
		tx, err := db.conn.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if err := db.proc.store.Publish(t.Context(), tx, e); !errors.Is(err, outbox.ErrInvalidEvent) {
			t.Errorf("got %v", err)
		}
		if err := tx.Commit(t.Context()); err != nil { // unharmed
			t.Error(err)
		}
	}
	rec := newRecorder()
	h := func(ctx context.Context, d outbox.Delivery) error {
		if d.Attempt == 1 {
			return errors.New("fails once")
		}
		return rec.handle(ctx, d)
	}
	const older = `insert into outbox.event select 0, nextval('outbox.event_seq'), pg_current_xact_id(), 't',
		(select string_agg(md5(g::text), '') from generate_series(1, 200) g), '\x00', null, now()` // 6,400 bytes that do not compress
	for range 2 {
		if _, err := db.conn.Exec(t.Context(), older); err != nil {
			t.Fatal(err)
		}
	}
	db.proc.publish(t, outbox.Event{Type: "t", Key: long, DedupKey: long})
	start(t, db.proc.subscribe(t, "s", outbox.SubscriptionConfig{}), outbox.HandlerFunc(h), quick)
	eventually(t, "all three", func() bool { return rec.n.Load() == 3 })
	eventually(t, "nothing waits", func() bool { return db.count(t, "select count(*) from outbox.failed") == 0 })
}

// Sweeping finds the old keys without reading the others, whatever statistics there are.
func TestSweepingDedupKeysUsesAnIndex(t *testing.T) {
	t.Parallel()
	db := setup(t, outbox.Config{})
	ctx := t.Context()
	for _, q := range []string{
		"alter table outbox.dedup set (autovacuum_enabled = off)",
		"insert into outbox.dedup (key, at) select md5(g::text), now() - case when g <= 10 then 30 else 0 end * interval '1 day' from generate_series(1, 50000) g",
	} {
		if _, err := db.conn.Exec(ctx, q); err != nil {
			t.Fatal(err)
		}
	}
	tx, err := db.conn.Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }()
	for _, q := range []string{db.proc.store.Statement("plans"), "prepare sweep as " + db.proc.store.Statement("sweep_dedup")} {
		if _, err := tx.Exec(ctx, q); err != nil {
			t.Fatal(err)
		}
	}
	rows, err := tx.Query(ctx, "explain (analyze, costs off, timing off, summary off) execute sweep('7 days')")
	if err != nil {
		t.Fatal(err)
	}
	plan, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	if text := strings.Join(plan, "\n"); !strings.Contains(text, "Index Scan using dedup_at") || !strings.Contains(text, "Index Scan using dedup_pkey") {
		t.Errorf("the plan:\n%s", text)
	}
}

// What the server would refuse, and abort the caller's transaction with, is refused before.
func TestARefusedPublishLeavesTheTransactionUnharmed(t *testing.T) {
	t.Parallel()
	db := setup(t, outbox.Config{})
	missing, err := outbox.New(db.proc.ex, outbox.Config{Schema: "missing"})
	if err != nil {
		t.Fatal(err)
	}
	half := make([]byte, outbox.MaxCallBytes/2)
	for name, c := range map[string]struct {
		store  *outbox.Store
		events []outbox.Event
		want   error
	}{
		"no schema":         {missing, []outbox.Event{{Type: "t"}}, outbox.ErrNotMigrated},
		"due too far ahead": {db.proc.store, []outbox.Event{{Type: "t", DueAt: time.Date(300_000, 1, 1, 0, 0, 0, 0, time.UTC)}}, outbox.ErrInvalidEvent},
		"too many bytes": {db.proc.store, []outbox.Event{
			{Type: "t", Payload: half}, {Type: "t", Payload: half}, {Type: "t", Payload: half[:1]},
		}, outbox.ErrInvalidEvent},
	} {
		t.Run(name, func(t *testing.T) {
			tx, err := db.conn.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
			if _, err := tx.Exec(t.Context(), "create temporary table mine () on commit drop"); err != nil {
				t.Fatal(err)
			}
			if err := c.store.Publish(t.Context(), tx, c.events...); !errors.Is(err, c.want) {
				t.Errorf("got %v, want %v", err, c.want)
			}
			if err := tx.Commit(t.Context()); err != nil {
				t.Errorf("the transaction: %v", err)
			}
		})
	}
}

// A role with another isolation level moves scheduled events all the same, by many at once.
func TestScheduledEventsOfARoleWithAnotherIsolationLevel(t *testing.T) {
	t.Parallel()
	db := setup(t, outbox.Config{})
	rec := newRecorder()
	var log logrec.Recorder
	for range 3 {
		p := newProcess(t, db.url+"&default_transaction_isolation=repeatable%20read", outbox.Config{Logger: log.Logger()})
		start(t, p.subscribe(t, "s", outbox.SubscriptionConfig{}), outbox.HandlerFunc(rec.handle), quick)
	}
	for range 10 {
		es := events(20, unkeyed)
		for i := range es {
			es[i].DueAt = time.Now().Add(time.Duration(200+i*10) * time.Millisecond)
		}
		db.proc.publish(t, es...)
	}
	eventually(t, "all", func() bool { return rec.n.Load() >= 200 })
	if text := log.All(); strings.Contains(text, "40001") {
		t.Errorf("logged: %s", text)
	}
}
