package bench

import (
	"database/sql"
	"testing"

	_ "github.com/lib/pq" // the other driver of database/sql

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/outbox"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

// PublishSQL works with a driver that knows nothing of pgx, also with parameters that it sends as text (binary_parameters=no is its default).
func TestPublishSQLByLibPQ(t *testing.T) {
	t.Parallel()
	db := postgres.Start(t, postgres.Options{}).NewDatabase(t)
	store, err := outbox.New(newExecutor(t, pool(t, db.URL, 2), executor.Config{Logger: quiet}), outbox.Config{Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	if err := store.Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, parameters := range []string{"no", "yes"} {
		std, err := sql.Open("postgres", db.URL+"&binary_parameters="+parameters)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = std.Close() })
		tx, err := std.BeginTx(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		e := outbox.Event{Type: "by lib/pq", Key: "k", Payload: []byte("\x00\xff'\\"), Headers: map[string]string{"a": "b"}}
		if err := store.PublishSQL(t.Context(), tx, e, e); err != nil {
			t.Fatal(err)
		}
		if err := tx.Commit(); err != nil {
			t.Fatal(err)
		}
		var n int
		err = std.QueryRowContext(t.Context(), `select count(*) from outbox.event where payload = '\x00ff275c' and key = 'k' and headers ->> 'a' = 'b'`).Scan(&n)
		if err != nil {
			t.Fatal(err)
		}
		if want := map[string]int{"no": 2, "yes": 4}[parameters]; n != want {
			t.Errorf("binary_parameters=%s: %d events, want %d", parameters, n, want)
		}
	}
}
