package executor

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/internal/statement"
)

// source is where calls get their connection: the executor, which takes one from the pool, or a [Conn], which lends its own.
type source interface {
	take(ctx context.Context) (session, error)
	// began hears of a transaction that is open on what was taken.
	began(t *tx)
}

// session is the connection that a call runs on.
type session struct {
	pooled *pgxpool.Conn // nil once it was given back, and for a connection that is lent
	c      *statement.Conn
	lent   bool // by a Conn: the call does not give it back, and cannot replace it when it dies
}

// take implements [source].
func (ex *Executor) take(ctx context.Context) (session, error) { return ex.acquire(ctx) }

// began implements [source].
func (ex *Executor) began(*tx) {}

// acquire takes a connection from the pool.
func (ex *Executor) acquire(ctx context.Context) (session, error) {
	if ex.closed.Load() {
		return session{}, ErrClosed
	}
	pooled, err := ex.pool.Acquire(ctx)
	if err != nil {
		var hook *hookPanic
		if errors.As(err, &hook) {
			panic(hook.cause)
		}
		return session{}, hookError(poolerBusy(closedPool(err)))
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

// gone reports whether the connection was given back.
func (s *session) gone() bool { return s.pooled == nil && !s.lent }

// release gives the connection back, unless it is lent. Doing it twice is no error.
func (s *session) release() {
	if s.pooled != nil {
		s.pooled.Release()
		s.pooled = nil
	}
}
