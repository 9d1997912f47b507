package outbox_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/outbox"
	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

// In a transaction of bare pgx nothing of this module goes by a name: behind a pooler that forwards names two clients' names collide
// (42P05), and the transaction that the caller has is aborted.

// everyStatement runs, in tx, each statement that this module runs on a transaction which is not its own.
func everyStatement(ctx context.Context, p *process, tx pgx.Tx) error {
	later := time.Now().Add(time.Hour)
	for _, events := range [][]outbox.Event{
		{{Type: "one", Key: "k", Payload: []byte{0, 1, 255}, Headers: map[string]string{"a": "ü\"\\,{}"}}},
		{{Type: "bare"}},
		{{Type: "two", Headers: map[string]string{"b": "c"}}, {Type: "three", Payload: []byte(`{"x","\y"}`)}},
		{{Type: "once", DedupKey: "d", Headers: map[string]string{"e": "f"}}, {Type: "later", DueAt: later, Key: "k"}},
	} {
		if err := p.store.Publish(ctx, tx, events...); err != nil {
			return err
		}
	}
	return p.ex.Sender().NotifyTx(ctx, tx, "news", `a "payload" \ ü`)
}

func TestAForeignTransactionSeesNoPreparedStatement(t *testing.T) {
	t.Parallel()
	db := setup(t, outbox.Config{})
	sub := db.proc.subscribe(t, "s", outbox.SubscriptionConfig{})
	p := newProcess(t, db.url, outbox.Config{}) // it has not read yet what Migrate fixed
	conn, err := db.conn.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	names := func(tx pgx.Tx) (n int) {
		t.Helper()
		if err := tx.QueryRow(t.Context(), `select count(*) from pg_prepared_statements`, pgx.QueryExecModeExec).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	tx, err := conn.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := everyStatement(t.Context(), p, tx); err != nil {
		t.Fatal(err)
	}
	if n := names(tx); n != 0 {
		t.Errorf("%d prepared statements", n)
	}
	if st := p.ex.Sender().Stats(); st.InTx != 1 {
		t.Errorf("NotifyTx did not notify inside: %+v", st)
	}
	if _, err := tx.Exec(t.Context(), `select $1::int`, 1); err != nil || names(tx) != 1 { // the control
		t.Errorf("%d prepared statements after one of the caller's (%v)", names(tx), err)
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	rec := newRecorder()
	d := start(t, sub, outbox.HandlerFunc(rec.handle), outbox.DispatcherConfig{})
	eventually(t, "five deliveries", func() bool { return rec.n.Load() >= 5 })
	d.stop(t)
	got := map[string]string{}
	for _, e := range rec.deliveries() {
		got[e.Type] = fmt.Sprint(e.Key, " ", string(e.Payload), " ", e.Headers)
	}
	want := map[string]string{
		"one": "k \x00\x01\xff " + fmt.Sprint(map[string]string{"a": "ü\"\\,{}"}), "bare": "  map[]",
		"two": "  map[b:c]", "three": ` {"x","\y"} map[]`, "once": "  map[e:f]",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if n := db.count(t, "select count(*) from outbox.scheduled"); n != 1 {
		t.Errorf("%d events are scheduled, want 1", n)
	}
}

// The same where it hurts, with many clients on few servers.
func TestForeignTransactionsBehindAPoolerThatForwardsNames(t *testing.T) {
	t.Parallel()
	s := postgres.Start(t, postgres.Options{})
	b := pgbouncer.Start(t, s, pgbouncer.Options{Version: "1.18", PoolSize: 2})
	db := setupOn(t, s, b, outbox.Config{})
	var wg sync.WaitGroup
	for range 6 {
		wg.Go(func() {
			pool, err := pgxpool.New(t.Context(), db.url) // bare pgx, in its default mode
			if err != nil {
				t.Error(err)
				return
			}
			defer pool.Close()
			for range 10 {
				err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error { return everyStatement(t.Context(), db.proc, tx) })
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	// 60 transactions of 6 events each; of the one with a DedupKey one is left, and one is for later.
	if n := db.count(t, "select count(*) from outbox.event"); n != 60*4+1 {
		t.Errorf("%d events", n)
	}
}
