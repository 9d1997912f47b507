package executor_test

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/internal/await"
	"github.com/bounceproof/bounceproof/internal/pgscript"
	"github.com/bounceproof/bounceproof/prepare"
)

// scripted is an executor in front of a scripted backend.
type scripted struct {
	b    *pgscript.Backend
	pool *pgxpool.Pool
	ex   *executor.Executor
}

// newScripted returns one that knows the pooler. It ends with the test, or before when end is called, which loops do.
func newScripted(t testing.TB, o pgscript.Options, cfg executor.Config, change ...func(*pgxpool.Config)) (s *scripted, end func()) {
	t.Helper()
	s = &scripted{b: pgscript.New(t, o)}
	poolCfg, err := pgxpool.ParseConfig(pgscript.URL)
	if err != nil {
		t.Fatal(err)
	}
	s.b.Use(poolCfg.ConnConfig)
	for _, f := range change {
		f(poolCfg)
	}
	if s.pool, err = pgxpool.NewWithConfig(context.Background(), poolCfg); err != nil {
		t.Fatal(err)
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if s.ex, err = executor.New(s.pool, cfg); err != nil {
		t.Fatal(err)
	}
	end = func() {
		_ = s.ex.Close(context.Background())
		s.pool.Close()
		s.b.Close()
	}
	t.Cleanup(end)
	if cfg.PreparedStatements != executor.Off {
		if _, err := s.ex.Topology(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	s.b.Reset()
	return s, end
}

// scene is a kind of backend and a policy, which together make a strategy.
type scene struct {
	name   string
	o      pgscript.Options
	policy executor.PreparedStatements
}

var scenes = []scene{
	{"named, direct", pgscript.Options{}, executor.Auto},
	{"named, tracked", pgscript.Options{Kind: pgscript.Tracked}, executor.Auto},
	{"unprepared", pgscript.Options{Kind: pgscript.Raw, Servers: 2}, executor.Auto},
	{"shared", pgscript.Options{Kind: pgscript.Raw, Servers: 2}, executor.Shared},
}

// givenBack waits until no connection of the pool is in use: a dead one is taken out on a goroutine of the pool's.
func givenBack(pool *pgxpool.Pool) error {
	for deadline := time.Now().Add(await.Deadline); ; time.Sleep(100 * time.Microsecond) {
		n := pool.Stat().AcquiredConns()
		if n == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%d connections were not given back", n)
		}
	}
}

// sane checks that nothing is kept and that the next statements on the pool give their own answers.
func (s *scripted) sane(ctx context.Context) error {
	if err := givenBack(s.pool); err != nil {
		return err
	}
	for i, sql := range []string{"select $1", "select $1, 2", "select $1"} {
		var n int
		err := s.ex.QueryRow(ctx, sql, prepare.Stable, 700+i).Scan(&n)
		if err != nil || n != 700+i {
			return fmt.Errorf("the next statement on the pool: %d, %w", n, err)
		}
	}
	return s.ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
		var n int
		if err := tx.QueryRow(ctx, "select $1", prepare.Stable, 800).Scan(&n); err != nil || n != 800 {
			return fmt.Errorf("the next transaction on the pool: %d, %w", n, err)
		}
		return nil
	})
}
