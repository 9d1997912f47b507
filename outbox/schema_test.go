package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/outbox"
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
		"create role " + role + " login password '" + postgres.Password() + "'",
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
			if err := d.ended(t); !errors.Is(err, outbox.ErrRebaseNeeded) {
				t.Errorf("Run returned %v", err)
			}
		})
	}
}

// The sequence is changed while dispatchers run: numbers that one backend keeps would come below a tip that was read before.
func TestASequenceThatIsChangedStopsDispatchers(t *testing.T) {
	t.Parallel()
	for what, alter := range map[string]string{
		"CACHE":     "alter sequence outbox.event_seq cache 20",
		"CYCLE":     "alter sequence outbox.event_seq cycle",
		"INCREMENT": "alter sequence outbox.event_seq increment by 2",
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			db := setup(t, outbox.Config{})
			sub := db.proc.subscribe(t, "s", outbox.SubscriptionConfig{})
			rec := newRecorder()
			d := start(t, sub, outbox.HandlerFunc(rec.handle), quick)
			db.proc.publish(t, outbox.Event{Type: "t"})
			eventually(t, "works before", func() bool { return rec.n.Load() == 1 })
			if _, err := db.conn.Exec(t.Context(), alter); err != nil {
				t.Fatal(err)
			}
			db.proc.publish(t, outbox.Event{Type: "t"})
			err := d.ended(t)
			if e, ok := errors.AsType[*outbox.SequenceError](err); !ok || !strings.Contains(e.Reason, what) {
				t.Errorf("Run returned %v", err)
			}
			if _, err := db.proc.store.Subscribe(t.Context(), "another", outbox.SubscriptionConfig{Start: outbox.StartNow()}); err == nil {
				t.Error("a tick was made")
			}
			// Put right, it goes on, with all that was published meanwhile.
			if _, err := db.conn.Exec(t.Context(), "alter sequence outbox.event_seq cache 1 increment by 1 no cycle"); err != nil {
				t.Fatal(err)
			}
			start(t, sub, outbox.HandlerFunc(rec.handle), quick)
			db.proc.publish(t, outbox.Event{Type: "t"})
			eventually(t, "all three", func() bool { return rec.n.Load() == 3 })
		})
	}
}
