package executor

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/fallback"
)

// NewPool makes a pool and an executor on it, which owns the pool: [Executor.Close] closes both. The pool is guarded, see [Guard], so that what
// runs past the executor works behind a pooler too: LoadType and RegisterTypes in AfterConnect, code that gets [Executor.Pool]. One look at
// what the connections lead to serves both. pool must come from pgxpool.ParseConfig, and stays as it is: a copy is used. ctx is for pgxpool.NewWithConfig,
// which connects in the background, if at all. It panics on a nil configuration. The errors are those of [New] and of pgxpool.NewWithConfig.
func NewPool(ctx context.Context, pool *pgxpool.Config, cfg Config) (*Executor, error) {
	if pool == nil {
		panic("executor: NewPool: nil pool configuration")
	}
	ex, err := newExecutor(cfg)
	if err != nil {
		return nil, err
	}
	own := pool.Copy()
	g := newGuard(ex.cfg)
	g.found = func(ctx context.Context, top fallback.Topology) {
		ex.counters.probes.Add(1)
		ex.selector.Probed(ctx, top)
	}
	g.install(own)
	if ex.pool, err = pgxpool.NewWithConfig(ctx, own); err != nil {
		return nil, fmt.Errorf("executor: %w", err)
	}
	ex.ownsPool = true
	return ex, nil
}

// closePool closes a pool and waits for its connections until ctx is done.
func closePool(ctx context.Context, pool *pgxpool.Pool) error {
	done := make(chan struct{})
	go func() {
		defer close(done)
		pool.Close()
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("executor: close: connections are still in use: %w", ctx.Err())
	}
}

// Ping takes a connection, sends an empty statement and waits for its answer, as pgxpool.Pool.Ping does.
func (ex *Executor) Ping(ctx context.Context) error {
	s, err := ex.acquire(ctx)
	if err != nil {
		return err
	}
	defer s.release()
	return s.c.Conn().Ping(ctx)
}

// Stat returns the pool's statistics, as pgxpool.Pool.Stat does. The executor's own are in [Executor.Stats].
func (ex *Executor) Stat() *pgxpool.Stat { return ex.pool.Stat() }

// Config returns a copy of the pool's configuration, as pgxpool.Pool.Config does.
func (ex *Executor) Config() *pgxpool.Config { return ex.pool.Config() }

// Reset closes the pool's connections, those that are in use when they are given back, and leaves the pool open, as pgxpool.Pool.Reset does. What
// the executor knows of statements and of the pooler stays: names go with their connections.
func (ex *Executor) Reset() { ex.pool.Reset() }
