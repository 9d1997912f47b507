package outbox_test

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"math"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/outbox"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

// All that an event can hold arrives as by Publish, if and only if the transaction commits.
func TestPublishSQLIsPublish(t *testing.T) {
	t.Parallel()
	db := setup(t, outbox.Config{WakeUp: outbox.WakeUpPoll})
	std := stdlib.OpenDBFromPool(db.conn)
	defer std.Close()
	store, err := outbox.New(db.proc.ex, outbox.Config{WakeUp: outbox.WakeUpPoll, Logger: quiet}) // which has not read what Migrate fixed
	if err != nil {
		t.Fatal(err)
	}
	all := make([]byte, 256)
	for i := range all {
		all[i] = byte(i)
	}
	want := []outbox.Event{
		{Type: "plain"},
		{Type: `odd " ' \ ☃ \u0000`, Key: `k" \ ☃`, Payload: all, Headers: map[string]string{`h "`: `\u0041 ☃`, "": ""}},
		{Type: "due before", DueAt: time.Now().Add(-time.Hour), DedupKey: "d1"},
		{Type: "due later", Key: "later", DueAt: time.Now().Add(math.MaxInt32 * time.Second), DedupKey: "d2"},
		{Type: "due and seen", DedupKey: "d1"},
		{Type: "last", Key: "k2"},
	}
	publish := func(commit bool, events ...outbox.Event) error {
		tx, err := std.BeginTx(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		err = store.PublishSQL(t.Context(), tx, events...)
		if !commit {
			return errors.Join(err, tx.Rollback())
		}
		return errors.Join(err, tx.Commit())
	}
	if err := publish(false, want...); err != nil {
		t.Fatal(err)
	}
	if err := publish(true, want...); err != nil {
		t.Fatal(err)
	}
	if err := publish(true, want[2]); err != nil { // seen
		t.Fatal(err)
	}
	if n := db.count(t, "select count(*) from outbox.scheduled where type = 'due later' and lock is not null"); n != 1 {
		t.Errorf("%d events are scheduled", n)
	}
	rec := newRecorder()
	start(t, db.proc.subscribe(t, "s", outbox.SubscriptionConfig{Start: outbox.StartEarliest()}), outbox.HandlerFunc(rec.handle), quick)
	eventually(t, "four", func() bool { return rec.n.Load() >= 4 })
	got := make(map[string]outbox.Event)
	for _, d := range rec.deliveries() {
		got[d.Type] = d.Event
	}
	for i, e := range want {
		g, ok := got[e.Type]
		if delivered := i != 3 && i != 4; ok != delivered {
			t.Errorf("%s: delivered %v", e.Type, ok)
		} else if ok && (g.Key != e.Key || !bytes.Equal(g.Payload, e.Payload) || len(g.Headers) != len(e.Headers) || g.Headers[`h "`] != e.Headers[`h "`]) {
			t.Errorf("%s came as %+v", e.Type, g)
		}
	}

	// By Publish the key is in the same lane and under the same lock.
	db.proc.publish(t, outbox.Event{Type: "last", Key: "k2"})
	if n := db.count(t, "select count(distinct lane) from outbox.event where key = 'k2'"); n != 1 {
		t.Errorf("one key in %d lanes", n)
	}
	letGo := holdKey(t, db, "k2")
	defer letGo()
	tx, err := std.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	if _, err := tx.ExecContext(t.Context(), "set local lock_timeout = '50ms'"); err != nil {
		t.Fatal(err)
	}
	err = store.PublishSQL(t.Context(), tx, want[5])
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); !ok || pgErr.Code != "55P03" {
		t.Errorf("a key that another transaction holds: %v", err)
	}
}

func TestPublishSQLRefusesBeforeItHarmsTheTransaction(t *testing.T) {
	t.Parallel()
	db := postgres.Start(t, postgres.Options{}).NewDatabase(t)
	pool, err := pgxpool.New(t.Context(), db.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	ex, err := executor.New(pool, executor.Config{Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	defer ex.Close(context.Background())
	store, err := outbox.New(ex, outbox.Config{Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	std := sql.OpenDB(stdlib.GetPoolConnector(pool))
	defer std.Close()
	tx, err := std.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	if err := store.PublishSQL(t.Context(), tx, outbox.Event{Type: "t"}); !errors.Is(err, outbox.ErrNotMigrated) {
		t.Errorf("not migrated: %v", err)
	}
	if err := store.PublishSQL(t.Context(), tx, outbox.Event{}); !errors.Is(err, outbox.ErrInvalidEvent) {
		t.Errorf("no type: %v", err)
	}
	if err := store.PublishSQL(t.Context(), tx); err != nil {
		t.Errorf("no event: %v", err)
	}
	if _, err := tx.ExecContext(t.Context(), "select 1"); err != nil {
		t.Errorf("the transaction goes on: %v", err)
	}
}
