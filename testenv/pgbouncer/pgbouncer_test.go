package pgbouncer_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

// backend returns the process id of the server connection that serves conn now.
func backend(ctx context.Context, t *testing.T, conn *pgx.Conn) int {
	t.Helper()
	var pid int
	if err := conn.QueryRow(ctx, "select pg_backend_pid()", pgx.QueryExecModeExec).Scan(&pid); err != nil {
		t.Fatal(err)
	}
	return pid
}

func connect(ctx context.Context, t *testing.T, url string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

func TestEveryVersionServesQueriesAndPinSwitchesTheServer(t *testing.T) {
	t.Parallel()
	for _, version := range pgbouncer.Versions() {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			ctx := t.Context()
			s := postgres.Start(t, postgres.Options{})
			db := s.NewDatabase(t)
			begin := time.Now()
			b := pgbouncer.Start(t, s, pgbouncer.Options{Version: version})
			t.Logf("PgBouncer %s (%s) ready in %v", b.FullVersion(), b.Runtime(), time.Since(begin))
			conn := connect(ctx, t, b.URL(db.Name))
			first := backend(ctx, t, conn)
			if again := backend(ctx, t, conn); again != first {
				t.Fatalf("without a pin the server changed from %d to %d", first, again)
			}
			release, err := b.Pin(ctx, b.URL(db.Name))
			if err != nil {
				t.Fatal(err)
			}
			if second := backend(ctx, t, conn); second == first {
				t.Fatal("with its server pinned, the client is still on it")
			}
			release()
			rows, err := b.Admin("show version")
			if err != nil || len(rows) != 1 {
				t.Fatalf("show version: %v, %v", rows, err)
			}
		})
	}
}
