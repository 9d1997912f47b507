package executor

import (
	"context"

	"github.com/jackc/pgx/v5/pgxpool"
)

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
