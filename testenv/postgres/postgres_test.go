package postgres_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/testenv/postgres"
)

func show(ctx context.Context, t *testing.T, url, setting string) string {
	t.Helper()
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close(ctx) }()
	var v string
	if err := conn.QueryRow(ctx, "select current_setting($1)", setting).Scan(&v); err != nil {
		t.Fatal(err)
	}
	return v
}

func run(ctx context.Context, t *testing.T, url string, statements ...string) {
	t.Helper()
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close(ctx) }()
	for _, sql := range statements {
		if _, err := conn.Exec(ctx, sql); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
	}
}

func TestEveryVersionStarts(t *testing.T) {
	t.Parallel()
	for _, version := range postgres.Versions() {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			begin := time.Now()
			s := postgres.Start(t, postgres.Options{Version: version})
			t.Logf("PostgreSQL %s (%s) ready in %v", s.FullVersion(), s.Runtime(), time.Since(begin))
			db := s.NewDatabase(t)
			if got := show(t.Context(), t, db.URL, "server_version"); !strings.HasPrefix(got, version+".") {
				t.Fatalf("asked for %s, the server is %s", version, got)
			}
			if s.Version() != version {
				t.Fatalf("Version() = %q", s.Version())
			}
			for setting, want := range map[string]string{
				"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off",
				"max_connections": "300", "max_prepared_transactions": "50",
				"shared_preload_libraries": "pg_stat_statements",
			} {
				if got := show(t.Context(), t, db.URL, setting); got != want {
					t.Errorf("%s = %s, want %s", setting, got, want)
				}
			}
		})
	}
}

func TestEqualOptionsShareAServerAndDedicatedOnesDoNot(t *testing.T) {
	t.Parallel()
	a := postgres.Start(t, postgres.Options{})
	if b := postgres.Start(t, postgres.Options{}); a != b {
		t.Error("equal options gave two servers")
	}
	own := postgres.Start(t, postgres.Options{Dedicated: true})
	if own == a {
		t.Error("a dedicated server is shared")
	}
	if own.URL("x") == a.URL("x") {
		t.Error("two servers have one address")
	}
}

func TestSettingsAndDurableReachTheServer(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	s := postgres.Start(t, postgres.Options{
		Dedicated: true, Durable: true,
		Settings: map[string]string{"work_mem": "7MB", "log_statement": "all"},
	})
	url := s.URL("postgres")
	for setting, want := range map[string]string{"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on", "work_mem": "7MB"} {
		if got := show(ctx, t, url, setting); got != want {
			t.Errorf("%s = %s, want %s", setting, got, want)
		}
	}
	run(ctx, t, url, "select 'said in the log'")
	s.AwaitLog(t, "said in the log")
	if s.LogContains("never said") {
		t.Error("the log holds what nobody wrote")
	}
}

func TestDataSurvivesRestartAndKill(t *testing.T) {
	t.Parallel()
	for _, durable := range []bool{false, true} {
		t.Run(fmt.Sprintf("durable=%t", durable), func(t *testing.T) {
			t.Parallel()
			ctx := t.Context()
			s := postgres.Start(t, postgres.Options{Dedicated: true, Durable: durable})
			url := s.URL("postgres")
			// A SIGKILL leaves what the kernel has, so commits without fsync survive it once they are written.
			run(ctx, t, url, "set synchronous_commit = on", "create table kept (n int)", "insert into kept values (1)")
			s.Restart(t)
			run(ctx, t, url, "set synchronous_commit = on", "insert into kept values (2)")
			s.Kill(t)
			if _, err := pgx.Connect(ctx, url); err == nil {
				t.Fatal("the killed server still answers")
			}
			s.Restart(t)
			conn, err := pgx.Connect(ctx, url)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = conn.Close(ctx) }()
			var n int
			if err := conn.QueryRow(ctx, "select count(*) from kept").Scan(&n); err != nil || n != 2 {
				t.Fatalf("found %d rows, want 2 (%v)", n, err)
			}
		})
	}
}

func TestDatabasesAreEmptyApartAndDropped(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	s := postgres.Start(t, postgres.Options{})
	var first string
	t.Run("a test with a name that is much longer than what PostgreSQL lets an identifier be", func(t *testing.T) {
		a, b := s.NewDatabase(t), s.NewDatabase(t)
		if a.Name == b.Name {
			t.Fatal("two databases have one name")
		}
		run(ctx, t, a.URL, "create table only_here ()")
		conn, err := pgx.Connect(ctx, b.URL)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close(ctx) }) // runs before the drop
		var there bool
		if err := conn.QueryRow(ctx, "select to_regclass('only_here') is not null").Scan(&there); err != nil || there {
			t.Fatalf("the table of one database is in the other (%v)", err)
		}
		// Somebody is still connected when the database is dropped.
		if _, err := pgx.Connect(context.Background(), a.URL); err != nil {
			t.Fatal(err)
		}
		first = a.URL
	})
	if conn, err := pgx.Connect(ctx, first); err == nil {
		_ = conn.Close(ctx)
		t.Error("the database is still there after its test")
	}
}
