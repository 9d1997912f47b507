package main

import (
	"context"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

func TestOutboxMigrate(t *testing.T) {
	s := postgres.Start(t, postgres.Options{})
	db := s.NewDatabase(t)
	conn, err := pgx.Connect(t.Context(), db.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(t.Context())) }()
	lanes := func(schema string) (n int) {
		t.Helper()
		if err := conn.QueryRow(t.Context(), "select lanes from "+schema+".meta").Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	pooled := pgbouncer.Start(t, s, pgbouncer.Options{}).URL(db.Name)

	for range 2 { // the second time there is nothing to do
		code, stdout, stderr := command(t.Context(), "outbox", "migrate", "--url", pooled)
		if code != exitOK || stdout != "The outbox in schema outbox is ready.\n" || stderr != "" {
			t.Fatalf("status %d, %s%s", code, stdout, stderr)
		}
	}
	if n := lanes("outbox"); n != 16 {
		t.Errorf("%d lanes", n)
	}
	code, stdout, stderr := command(t.Context(), "outbox", "migrate", "--url", pooled, "--lanes", "4")
	if code != exitFailed || stdout != "" || !strings.Contains(stderr, "lanes") {
		t.Errorf("another number of lanes: status %d, %s%s", code, stdout, stderr)
	}

	t.Setenv(envURL, db.URL)
	if code, stdout, stderr := command(t.Context(), "outbox", "migrate", "--schema", "second", "--lanes", "4"); code != exitOK {
		t.Fatalf("status %d, %s%s", code, stdout, stderr)
	}
	if n := lanes("second"); n != 4 {
		t.Errorf("%d lanes", n)
	}
	if code, _, stderr := command(t.Context(), "outbox", "migrate", "--schema", "no good"); code != exitFailed || !strings.Contains(stderr, "schema") {
		t.Errorf("a bad schema: status %d, %s", code, stderr)
	}
}

func TestOutboxWithoutServer(t *testing.T) {
	t.Parallel()
	code, stdout, stderr := command(t.Context(), "outbox", "migrate", "--url", "postgres://app:s3cr3t@127.0.0.1:1/x")
	if code != exitFailed || stdout != "" || !strings.Contains(stderr, "connection refused") || strings.Contains(stderr, "s3cr3t") {
		t.Errorf("status %d, %s%s", code, stdout, stderr)
	}
}
