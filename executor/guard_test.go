package executor_test

import (
	"context"
	"database/sql"
	"fmt"
	"log/slog"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

func guardedPool(t *testing.T, url string, cfg executor.Config, change ...func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	return newPool(t, url, append(change, func(pc *pgxpool.Config) {
		if err := executor.Guard(pc, cfg); err != nil {
			t.Fatal(err)
		}
	})...)
}

// connMode is the mode that the pool's next connection works in.
func connMode(t *testing.T, pool *pgxpool.Pool) pgx.QueryExecMode {
	t.Helper()
	c, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Release()
	return c.Conn().Config().DefaultQueryExecMode
}

func TestGuardPicksTheModeByWhatThePoolLeadsTo(t *testing.T) {
	t.Parallel()
	s := postgres.Start(t, postgres.Options{})
	db := s.NewDatabase(t)
	b := pgbouncer.Start(t, s, pgbouncer.Options{})
	for _, tc := range []struct {
		url  string
		set  executor.PreparedStatements
		want pgx.QueryExecMode
	}{
		{db.URL, executor.Auto, pgx.QueryExecModeCacheStatement},
		{db.URL, executor.Off, pgx.QueryExecModeCacheDescribe},
		{b.URL(db.Name), executor.Auto, pgx.QueryExecModeCacheDescribe},
		{b.URL(db.Name), executor.Shared, pgx.QueryExecModeCacheDescribe},
		{b.URL(db.Name), executor.On, pgx.QueryExecModeCacheStatement},
	} {
		if got := connMode(t, guardedPool(t, tc.url, executor.Config{PreparedStatements: tc.set})); got != tc.want {
			t.Errorf("%v at %s: mode %v, want %v", tc.set, tc.url, got, tc.want)
		}
	}
}

func TestGuardChainsHooks(t *testing.T) {
	t.Parallel()
	s := postgres.Start(t, postgres.Options{})
	db := s.NewDatabase(t)
	b := pgbouncer.Start(t, s, pgbouncer.Options{})
	for _, legacy := range []bool{false, true} {
		var before, after, prepare, onError, onNotify atomic.Int32
		pool := guardedPool(t, b.URL(db.Name), executor.Config{}, func(pc *pgxpool.Config) {
			pc.BeforeConnect = func(_ context.Context, cc *pgx.ConnConfig) error {
				before.Add(1)
				cc.OnPgError = func(_ *pgconn.PgConn, e *pgconn.PgError) bool { onError.Add(1); return e.Severity != "FATAL" }
				cc.OnNotification = func(*pgconn.PgConn, *pgconn.Notification) { onNotify.Add(1) }
				return nil
			}
			pc.AfterConnect = func(context.Context, *pgx.Conn) error { after.Add(1); return nil }
			if legacy {
				pc.BeforeAcquire = func(context.Context, *pgx.Conn) bool { prepare.Add(1); return true } //nolint:staticcheck // covered
			} else {
				pc.PrepareConn = func(context.Context, *pgx.Conn) (bool, error) { prepare.Add(1); return true, nil }
			}
		})
		if _, err := pool.Exec(t.Context(), "select 1/0"); err == nil {
			t.Fatal("no error")
		}
		err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			_, err := tx.Exec(t.Context(), "listen here; notify here")
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		for name, n := range map[string]*atomic.Int32{
			"BeforeConnect": &before, "AfterConnect": &after, "PrepareConn": &prepare, "OnPgError": &onError, "OnNotification": &onNotify,
		} {
			if n.Load() == 0 {
				t.Errorf("legacy %v: %s was not called", legacy, name)
			}
		}
	}
}

func TestGuardRetiresConnectionsWhenAPoolerAppears(t *testing.T) {
	t.Parallel()
	s := postgres.Start(t, postgres.Options{})
	db := s.NewDatabase(t)
	b := pgbouncer.Start(t, s, pgbouncer.Options{})
	var pooled atomic.Bool
	direct, err := pgx.ParseConfig(db.URL)
	if err != nil {
		t.Fatal(err)
	}
	behind, err := pgx.ParseConfig(b.URL(db.Name))
	if err != nil {
		t.Fatal(err)
	}
	pool := guardedPool(t, db.URL, executor.Config{ReprobeAfter: 1}, func(pc *pgxpool.Config) {
		pc.BeforeConnect = func(_ context.Context, cc *pgx.ConnConfig) error {
			cc.Host, cc.Port = direct.Host, direct.Port
			if pooled.Load() {
				cc.Host, cc.Port = behind.Host, behind.Port
			}
			return nil
		}
	})
	old, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	oldConn := old.Conn()
	pooled.Store(true)
	if got := connMode(t, pool); got != pgx.QueryExecModeCacheDescribe {
		t.Fatalf("a new connection through the pooler works in mode %v", got)
	}
	old.Release()
	for range pool.Config().MaxConns {
		c, err := pool.Acquire(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if c.Conn() == oldConn {
			t.Fatal("a connection made before the pooler appeared was lent again")
		}
		t.Cleanup(c.Release)
	}
}

// The negative control is the same load on a pool without Guard.
func TestGuardedStdlibWorksBehindRawPooler(t *testing.T) {
	t.Parallel()
	s := postgres.Start(t, postgres.Options{})
	db := s.NewDatabase(t)
	b := pgbouncer.Start(t, s, pgbouncer.Options{PoolSize: 3})
	run := func(pool *pgxpool.Pool) error {
		sdb := stdlib.OpenDBFromPool(pool)
		defer sdb.Close()
		sdb.SetMaxOpenConns(8)
		errs := make(chan error, 8)
		for g := range 8 {
			go func() {
				errs <- func() error {
					for i := range 100 {
						var n int
						if err := sdb.QueryRowContext(t.Context(), fmt.Sprintf("select %d + $1::int", i%7), g).Scan(&n); err != nil || n != i%7+g {
							return fmt.Errorf("query: %d, %w", n, err)
						}
						tx, err := sdb.BeginTx(t.Context(), &sql.TxOptions{})
						if err != nil {
							return err
						}
						if _, err := tx.ExecContext(t.Context(), "insert into g (v) values ($1)", []byte(`{"a": 1}`)); err != nil {
							_ = tx.Rollback()
							return err
						}
						if err := tx.Commit(); err != nil {
							return err
						}
					}
					return nil
				}()
			}()
		}
		var first error
		for range 8 {
			if err := <-errs; err != nil && first == nil {
				first = err
			}
		}
		return first
	}
	if _, err := newPool(t, db.URL).Exec(t.Context(), "create table g (v jsonb)"); err != nil {
		t.Fatal(err)
	}
	eight := func(pc *pgxpool.Config) { pc.MaxConns = 8 }
	if err := run(guardedPool(t, b.URL(db.Name), executor.Config{}, eight)); err != nil {
		t.Errorf("guarded: %v", err)
	}
	if err := run(newPool(t, b.URL(db.Name), eight)); err == nil && b.Version() < "1.24" {
		t.Error("a bare pool survived the same load: this test shows nothing")
	}
}
