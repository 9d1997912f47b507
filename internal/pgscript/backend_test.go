package pgscript_test

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/internal/pgscript"
)

func connect(t *testing.T, b *pgscript.Backend) *pgx.Conn {
	t.Helper()
	conn, err := pgx.ConnectConfig(t.Context(), b.ConnConfig(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(t.Context()) })
	b.Reset()
	return conn
}

// pgx itself is the judge of whether the model speaks the protocol.
func TestPgxWorksOnIt(t *testing.T) {
	t.Parallel()
	for _, kind := range []pgscript.Kind{pgscript.Direct, pgscript.Raw, pgscript.Tracked} {
		b := pgscript.New(t, pgscript.Options{Kind: kind})
		conn := connect(t, b)
		ctx := t.Context()
		for _, mode := range []pgx.QueryExecMode{
			pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec,
			pgx.QueryExecModeSimpleProtocol,
		} {
			for i := range 2 {
				var n int
				if mode == pgx.QueryExecModeSimpleProtocol {
					if err := conn.QueryRow(ctx, "select 41", mode).Scan(&n); err != nil || n != 41 {
						t.Fatal(kind, mode, n, err)
					}
					continue
				}
				if err := conn.QueryRow(ctx, "select $1", mode, 40+i).Scan(&n); err != nil || n != 40+i {
					t.Fatal(kind, mode, n, err)
				}
			}
		}
		tx, err := conn.Begin(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := tx.Exec(ctx, "insert into t values ($1)", 1); err != nil {
			t.Fatal(err)
		}
		if got := b.Committed("insert into t values ($1)"); got != 0 {
			t.Fatal("committed before COMMIT:", got)
		}
		if err := tx.Commit(ctx); err != nil {
			t.Fatal(err)
		}
		if got := b.Committed("insert into t values ($1)"); got != 1 {
			t.Fatal("committed:", got)
		}
		tx, _ = conn.Begin(ctx)
		_, _ = tx.Exec(ctx, "insert into t values (2)")
		if err := tx.Rollback(ctx); err != nil {
			t.Fatal(err)
		}
		if ran, kept := b.Ran("insert into t values (2)"), b.Committed("insert into t values (2)"); ran != 1 || kept != 0 {
			t.Fatal(ran, kept)
		}
		n, err := conn.CopyFrom(ctx, pgx.Identifier{"t"}, []string{"n"}, pgx.CopyFromRows([][]any{{1}}))
		if err != nil || n != 1 {
			t.Fatal(n, err)
		}
	}
}

func TestItRecordsMessages(t *testing.T) {
	t.Parallel()
	b := pgscript.New(t, pgscript.Options{})
	conn := connect(t, b)
	var n int
	if err := conn.QueryRow(t.Context(), "select $1", pgx.QueryExecModeCacheDescribe, 5).Scan(&n); err != nil {
		t.Fatal(err)
	}
	want := []string{
		`Parse "" select $1`, `Describe ""`, "Sync",
		`Parse "" select $1`, `Bind ""`, "Describe portal", "Execute", "Sync",
	}
	if diff := cmp.Diff(want, pgscript.Strings(b.Sent())); diff != "" {
		t.Error(diff)
	}
	if b.RoundTrips() != 2 || b.Writes() != 2 {
		t.Error(b.RoundTrips(), b.Writes())
	}
}

func TestItFailsAsTold(t *testing.T) {
	t.Parallel()
	b := pgscript.New(t, pgscript.Options{Kind: pgscript.Tracked})
	b.Define("insert 1", pgscript.Statement{Tag: "INSERT 0 1", Fail: pgscript.FailTimes(pgscript.Parse, 1, pgscript.ServerError("42P01", "no table", "x"))})
	conn := connect(t, b)
	ctx := t.Context()
	var pgErr *pgconn.PgError
	if _, err := conn.PgConn().Prepare(ctx, "s", "insert 1", nil); !errors.As(err, &pgErr) || pgErr.Code != "42P01" {
		t.Fatal(err)
	}
	// PgBouncer keeps the name of a Parse that failed.
	if _, err := conn.PgConn().Prepare(ctx, "s", "insert 1", nil); !errors.As(err, &pgErr) || pgErr.Severity != "FATAL" {
		t.Fatal(err)
	}

	for side, n := range map[pgscript.Side]int{pgscript.FromClient: 4, pgscript.FromServer: 3} {
		conn = connect(t, b)
		trigger := b.Cut(side, n)
		rr := conn.PgConn().ExecParams(ctx, "insert 2", nil, nil, nil, nil)
		if _, err := rr.Close(); err == nil || !trigger.Fired() {
			t.Error(side, err, trigger.Fired())
		}
		<-conn.PgConn().CleanupDone()
		// Before Execute nothing ran; after Sync it stands, whether the client knows or not.
		if ran := b.Committed("insert 2"); (side == pgscript.FromServer) != (ran == 1) {
			t.Error(side, ran)
		}
	}
}
