package executor

import (
	"context"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/internal/statement"
)

// session is the connection that a call runs on.
type session struct {
	pooled *pgxpool.Conn // nil once it was given back
	c      *statement.Conn
}

// acquire takes a connection from the pool.
func (ex *Executor) acquire(ctx context.Context) (session, error) {
	if ex.closed.Load() {
		return session{}, ErrClosed
	}
	pooled, err := ex.pool.Acquire(ctx)
	if err != nil {
		return session{}, closedPool(err)
	}
	return session{pooled: pooled, c: statement.Attach(pooled.Conn(), ex.cfg.StatementCapacity)}, nil
}

// replace gives back a connection that died and takes another.
func (ex *Executor) replace(ctx context.Context, s *session) error {
	if s.pooled != nil {
		_ = s.c.PgConn().Close(ctx) // an OnPgError of the caller's may have left it open
		s.release()
	}
	next, err := ex.acquire(ctx)
	if err != nil {
		return err // s.c remains: a closed connection, which answers as one
	}
	*s = next
	return nil
}

// release gives the connection back. Doing it twice is no error.
func (s *session) release() {
	if s.pooled != nil {
		s.pooled.Release()
		s.pooled = nil
	}
}
