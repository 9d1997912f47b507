package outbox_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/outbox"
)

// A plain select of a sequence sees, while nextval writes its log record, a number up to 32 ahead of the last that was drawn
// (PostgreSQL src/backend/commands/sequence.c, nextval_internal). A tip that is read so makes the next one look set back.
func TestATipIsNeverAheadOfWhatWasDrawn(t *testing.T) {
	t.Parallel()
	db := setup(t, outbox.Config{})
	if _, err := db.proc.store.Status(t.Context()); err != nil {
		t.Fatal(err)
	}
	end := time.Now().Add(5 * time.Second)
	var wg sync.WaitGroup
	defer wg.Wait()
	for range 2 {
		conn, err := pgx.Connect(t.Context(), db.url)
		if err != nil {
			t.Fatal(err)
		}
		wg.Go(func() {
			defer func() { _ = conn.Close(context.Background()) }()
			for time.Now().Before(end) {
				if _, err := conn.Exec(t.Context(), "select nextval('outbox.event_seq') from generate_series(1, 1000)"); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	var looks, ahead, control int
	for time.Now().Before(end) {
		status, err := db.proc.store.Status(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		var plain, drawn int64
		if err := db.conn.QueryRow(t.Context(), "select pg_sequence_last_value('outbox.event_seq')").Scan(&drawn); err != nil {
			t.Fatal(err)
		}
		if status.Tip > drawn {
			ahead++
		}
		if err := db.conn.QueryRow(t.Context(), "select last_value from outbox.event_seq").Scan(&plain); err != nil {
			t.Fatal(err)
		}
		if err := db.conn.QueryRow(t.Context(), "select pg_sequence_last_value('outbox.event_seq')").Scan(&drawn); err != nil {
			t.Fatal(err)
		}
		if plain > drawn {
			control++
		}
		looks++
	}
	if ahead > 0 {
		t.Errorf("%d of %d tips were ahead", ahead, looks)
	}
	t.Logf("%d looks; a plain select was ahead %d times", looks, control)
}

func TestRebaseCallsASequenceThatWasRestoredUncalled(t *testing.T) {
	t.Parallel()
	db := setup(t, outbox.Config{})
	p := db.proc
	sub := p.subscribe(t, "s", outbox.SubscriptionConfig{})
	p.publish(t, events(3, unkeyed)...)
	for _, q := range []string{"select setval('outbox.event_seq', 500, false)", "update outbox.meta set system_identifier = 1"} {
		if _, err := db.conn.Exec(t.Context(), q); err != nil {
			t.Fatal(err)
		}
	}
	if err := p.store.Rebase(t.Context()); err != nil {
		t.Fatal(err)
	}
	status, err := p.store.Status(t.Context())
	if err != nil || status.Tip != 499 {
		t.Fatalf("tip %d, %v", status.Tip, err)
	}
	rec := newRecorder()
	start(t, sub, outbox.HandlerFunc(rec.handle), quick)
	p.publish(t, events(3, unkeyed)...)
	eventually(t, "those of both clusters", func() bool { return rec.n.Load() == 6 })
}

// The rule for every text of the module: only Rebase, which takes the greater of two, may look at the sequence's row.
func TestNoStatementReadsTheSequenceWithoutItsLock(t *testing.T) {
	t.Parallel()
	texts, err := filepath.Glob("sql/*.sql")
	if err != nil || len(texts) < 40 {
		t.Fatal(len(texts), err)
	}
	for _, name := range texts {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		text := strings.ReplaceAll(string(b), "pg_sequence_last_value", "")
		if strings.Contains(text, "last_value") && filepath.Base(name) != "rebase_sequence.sql" {
			t.Errorf("%s reads last_value", name)
		}
	}
}
