package executor_test

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/testenv/place"
)

func newPool(t testing.TB, url string, change ...func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range change {
		f(cfg)
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

func maxConns(n int32) func(*pgxpool.Config) {
	return func(cfg *pgxpool.Config) { cfg.MaxConns = n }
}

// newExecutor returns an executor that logs nowhere unless cfg says where, and ends with the test.
func newExecutor(t testing.TB, pool *pgxpool.Pool, cfg executor.Config) *executor.Executor {
	t.Helper()
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	ex, err := executor.New(pool, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ex.Close(context.Background()) })
	return ex
}

// openServers has the pooler open n server connections, so that a client meets a server that does not know its names at once.
func openServers(t testing.TB, r *place.Running, n int) {
	t.Helper()
	if r.Place.SharesServers() {
		r.OnServers(t, n, "1")
	}
}

// connect returns a pgx connection that ends with the test.
func connect(t testing.TB, url string) *pgx.Conn {
	t.Helper()
	c, err := pgx.Connect(context.Background(), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close(context.Background()) })
	return c
}

func mustExec(t testing.TB, c *pgx.Conn, sql string, args ...any) {
	t.Helper()
	if _, err := c.Exec(context.Background(), sql, args...); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

// one returns the single value of a query as text, NULL if it is null.
func one(t testing.TB, c *pgx.Conn, sql string, args ...any) string {
	t.Helper()
	var text *string
	if err := c.QueryRow(context.Background(), "select ("+sql+")::text", args...).Scan(&text); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	if text == nil {
		return "NULL"
	}
	return *text
}

// lostOnly reports whether err is a *PreparedStatementError as it has to be: with the server's own error in it and a remedy for people.
func lostOnly(err error) bool {
	var lost *executor.PreparedStatementError
	var pgErr *pgconn.PgError
	return errors.As(err, &lost) && errors.As(err, &pgErr) && (pgErr.Code == "26000" || pgErr.Routine == "") &&
		strings.HasPrefix(lost.Name, "bp_") && strings.Contains(err.Error(), "run it again")
}
