package pgbouncer_test

import (
	"context"
	"fmt"
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

// TestEveryVersionStopsKillsRestartsAndReloads also holds what PgBouncer logs.
func TestEveryVersionStopsKillsRestartsAndReloads(t *testing.T) {
	t.Parallel()
	for _, version := range pgbouncer.Versions() {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			ctx := t.Context()
			s := postgres.Start(t, postgres.Options{})
			db := s.NewDatabase(t)
			b := pgbouncer.Start(t, s, pgbouncer.Options{Version: version, PoolMode: "session"})
			if b.Version() != version {
				t.Errorf("Version() = %q", b.Version())
			}
			url := b.URL(db.Name)
			gone := func() {
				t.Helper()
				if conn, err := pgx.Connect(ctx, url); err == nil {
					_ = conn.Close(ctx)
					t.Fatal("it still answers")
				}
			}
			conn := connect(ctx, t, url)
			b.Kill(t)
			gone()
			if err := conn.Ping(ctx); err == nil {
				t.Error("a connection survived the kill")
			}
			b.Start(t)
			connect(ctx, t, url)
			b.Stop(t) // although a client is connected
			gone()
			b.Restart(t)
			backend(ctx, t, connect(ctx, t, url))
			b.Restart(t)
			if got := setting(t, b, "pool_mode"); got != "session" {
				t.Errorf("pool_mode = %s", got)
			}
			b.Set(t, "pool_mode", "statement")
			if got := setting(t, b, "pool_mode"); got != "statement" {
				t.Errorf("after Set pool_mode = %s", got)
			}
			b.Reload(t, map[string]string{"pool_mode": "transaction"})
			if got := setting(t, b, "pool_mode"); got != "transaction" {
				t.Errorf("after Reload pool_mode = %s", got)
			}
			b.AwaitLog(t, "process up")
			if b.LogContains("never said") {
				t.Error("the log holds what nobody wrote")
			}
			if _, err := b.Admin("no command"); err == nil {
				t.Error("a wrong command succeeds")
			}
		})
	}
}

func setting(t *testing.T, b *pgbouncer.Bouncer, key string) string {
	t.Helper()
	rows, err := b.Admin("show config")
	if err != nil {
		t.Fatal(err)
	}
	for _, row := range rows {
		if row["key"] == key {
			return row["value"]
		}
	}
	return ""
}

func TestMaxPreparedStatementsByVersion(t *testing.T) {
	t.Parallel()
	s := postgres.Start(t, postgres.Options{})
	for _, version := range pgbouncer.Versions() {
		for given, want := range map[int]string{0: "200", 7: "7", -1: "0"} {
			if version == "1.15" || version == "1.18" {
				want = "" // no such setting
			}
			t.Run(fmt.Sprintf("%s/%d", version, given), func(t *testing.T) {
				t.Parallel()
				b := pgbouncer.Start(t, s, pgbouncer.Options{Version: version, MaxPreparedStatements: given})
				if got := setting(t, b, "max_prepared_statements"); got != want {
					t.Errorf("%d gave %q, want %q", given, got, want)
				}
			})
		}
	}
}

func TestRolesAndDatabasesMadeByTestsAreReachable(t *testing.T) {
	t.Parallel()
	for _, version := range pgbouncer.Versions() {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			ctx := t.Context()
			s := postgres.Start(t, postgres.Options{})
			db := s.NewDatabase(t)
			b := pgbouncer.Start(t, s, pgbouncer.Options{Version: version})
			conn := connect(ctx, t, db.URL)
			role := db.Name + "_role"
			if _, err := conn.Exec(ctx, "create role "+role+" login password '"+postgres.Password()+"'; alter role "+role+" set work_mem = '7MB'"); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if _, err := conn.Exec(context.Background(), "drop role "+role); err != nil {
					t.Error(err)
				}
			})
			config, err := pgx.ParseConfig(b.URL(db.Name))
			if err != nil {
				t.Fatal(err)
			}
			config.User = role
			as, err := pgx.ConnectConfig(ctx, config)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = as.Close(ctx) }()
			var who, mem string
			if err := as.QueryRow(ctx, "select current_user, current_setting('work_mem')", pgx.QueryExecModeExec).Scan(&who, &mem); err != nil {
				t.Fatal(err)
			}
			if who != role || mem != "7MB" {
				t.Errorf("connected as %s with work_mem %s", who, mem)
			}
		})
	}
}
