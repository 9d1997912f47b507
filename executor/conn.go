package executor

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/internal/pgxinternals"
	"github.com/bounceproof/bounceproof/internal/statement"
)

// Conn is one connection of the pool, with the methods of an [Executor]: for what has to run on the same connection. [Executor.Acquire] returns
// it, and Release gives it back. Not safe for concurrent use.
//
// It keeps the executor's promises but one: a connection that died cannot be replaced under a Conn. Then its methods return pgx's error, and
// Release throws the connection away. What may run again on the same connection does.
//
// While a transaction that a Conn began is open, the Conn's own methods run in it, as on a pgx.Conn. The same connection is not the same server
// behind a pooler in transaction mode: session state (SET, advisory locks of the session, temporary tables) is no safer on a Conn than on the
// executor.
//
// After Release or Hijack every method returns [ErrReleased], where those of a pgxpool.Conn panic; Conn and Hijack are described below. A Conn
// that was acquired before the executor was closed works until it is released.
type Conn struct {
	ex     *Executor
	pooled *pgxpool.Conn // nil once it was released or hijacked
	c      *statement.Conn
	tx     *tx // the transaction that was begun last
}

var _ source = (*Conn)(nil)

// Acquire takes a connection from the pool, as pgxpool.Pool.Acquire does. Release it when done.
func (ex *Executor) Acquire(ctx context.Context) (*Conn, error) {
	s, err := ex.acquire(ctx)
	if err != nil {
		return nil, err
	}
	return &Conn{ex: ex, pooled: s.pooled, c: s.c}, nil
}

// AcquireFunc runs f with a connection of its own and releases it afterwards, also when f panics. The error is f's, or Acquire's. As in
// pgxpool, ctx is for acquiring only.
func (ex *Executor) AcquireFunc(ctx context.Context, f func(c *Conn) error) error {
	c, err := ex.Acquire(ctx)
	if err != nil {
		return err
	}
	defer c.Release()
	return f(c)
}

// Release gives the connection back to the pool. Doing it twice, or after Hijack, is no error. A transaction that is still open on it ends
// without being committed: its methods return pgx.ErrTxClosed from now on. As in pgxpool, a connection with an open transaction or open rows
// is closed.
func (c *Conn) Release() {
	if c.pooled == nil {
		return
	}
	if t := c.open(); t != nil {
		t.abandon()
	}
	pooled := c.pooled
	c.pooled = nil
	if !pooled.Conn().PgConn().IsBusy() {
		pooled.Release()
		return
	}
	// pgxpool would close it on a goroutine of its own, beside one that closes the rows now.
	conn := pooled.Hijack()
	if before := c.ex.pool.Config().BeforeClose; before != nil {
		before(conn)
	}
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	_ = conn.Close(ctx)
}

// closeTimeout bounds closing a connection whose server or network does not take the farewell. It is pgxpool's.
const closeTimeout = 15 * time.Second

// Hijack takes the connection out of the pool, as pgxpool.Conn.Hijack does: the caller closes it. What the executor has prepared on it stays
// there. A transaction that is open stays usable. As in pgxpool it panics on a connection that was released or hijacked.
func (c *Conn) Hijack() *pgx.Conn {
	if c.pooled == nil {
		panic("executor: Conn.Hijack: the connection was released or hijacked already")
	}
	conn := c.Conn()
	pooled := c.pooled
	c.pooled = nil
	pooled.Hijack()
	return conn
}

// Conn returns the connection; what runs on it is pgx's own, and not the executor's. If a transaction is open its BEGIN is sent before, see
// [Tx]. It returns nil when the connection was released or hijacked: it is somebody else's then. (pgxpool panics.)
func (c *Conn) Conn() *pgx.Conn {
	if c.pooled == nil {
		return nil
	}
	if t := c.open(); t != nil {
		return t.Conn()
	}
	return c.c.Conn()
}

// take implements [source].
func (c *Conn) take(context.Context) (session, error) {
	if c.pooled == nil {
		return session{}, ErrReleased
	}
	return session{c: c.c, lent: true}, nil
}

// began implements [source].
func (c *Conn) began(t *tx) { c.tx = t }

// open returns the transaction of the executor's that is open on the connection, or nil.
func (c *Conn) open() *tx {
	if c.pooled == nil || c.tx == nil || c.tx.closed {
		return nil
	}
	return c.tx
}

// mayBegin says why no transaction can begin. pgx would send a second BEGIN, which the server takes for a slip: the inner Commit then commits
// what the outer one has done.
func (c *Conn) mayBegin(ctx context.Context) error {
	switch {
	case c.pooled == nil:
		return ErrReleased
	case c.open() != nil:
		return ErrTxOpen
	case c.c.PgConn().IsClosed():
		return fmt.Errorf("executor: begin: %w", pgconn.ErrConnClosed)
	case c.c.PgConn().TxStatus() != 'I':
		return ErrTxOpen
	}
	return ctx.Err() // as when a connection is taken from the pool; pgx would close the connection
}

// single is a call on its way, in the transaction if one is open; exec is true for Exec.
func (c *Conn) single(ctx context.Context, sql string, args []any, exec bool) (*single, error) {
	if t := c.open(); t != nil {
		return t.enter(ctx, t.scope(nil), sql, args, exec)
	}
	s, err := c.take(ctx)
	if err != nil {
		return nil, err
	}
	return c.ex.newSingle(s, sql, args), nil
}

// Exec runs sql, as [Executor.Exec] does.
func (c *Conn) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	x, err := c.single(ctx, sql, args, true)
	if err != nil {
		return pgconn.CommandTag{}, err
	}
	defer x.release()
	return x.exec(ctx)
}

// Query runs sql, as [Executor.Query] does. The next call has to wait until the rows are closed: as in pgx it fails while they are open.
func (c *Conn) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	r := c.query(ctx, sql, args)
	return r, r.err
}

// QueryRow runs sql, as [Executor.QueryRow] does. Errors come from Scan.
func (c *Conn) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return (*row)(c.query(ctx, sql, args))
}

func (c *Conn) query(ctx context.Context, sql string, args []any) *rows {
	x, err := c.single(ctx, sql, args, false)
	if err != nil {
		return &rows{err: err, closed: true}
	}
	return x.query(ctx)
}

// SendBatch sends a batch, as [Executor.SendBatch] does.
func (c *Conn) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	if t := c.open(); t != nil {
		return t.SendBatch(ctx, b)
	}
	if _, begins := pgxinternals.BatchTxOptions(b); begins {
		if err := c.mayBegin(ctx); err != nil {
			return pgx.FailedBatchResults(b, err)
		}
	}
	return c.ex.sendBatch(ctx, c, b)
}

// CopyFrom copies rows into a table, as [Executor.CopyFrom] does: also in that a failed COPY behind a pooler costs the connection.
func (c *Conn) CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, src pgx.CopyFromSource) (int64, error) {
	if t := c.open(); t != nil {
		return t.CopyFrom(ctx, table, columns, src)
	}
	return c.ex.copyOn(ctx, c, table, columns, src)
}

// Begin starts a transaction, as [Executor.Begin] does. The value is a [Tx]. [ErrTxOpen] says that one is open.
func (c *Conn) Begin(ctx context.Context) (pgx.Tx, error) { return c.BeginTx(ctx, pgx.TxOptions{}) }

// BeginTx starts a transaction with options, as [Executor.BeginTx] does. The value is a [Tx]. [ErrTxOpen] says that one is open.
func (c *Conn) BeginTx(ctx context.Context, opts pgx.TxOptions) (pgx.Tx, error) {
	if err := c.mayBegin(ctx); err != nil {
		return nil, err
	}
	return c.ex.beginOn(ctx, c, opts)
}

// InTx runs f in a transaction on this connection, as [Executor.InTx] does. f is not run a second time when the connection died.
func (c *Conn) InTx(ctx context.Context, opts pgx.TxOptions, f func(ctx context.Context, tx Tx) error) error {
	if err := c.mayBegin(ctx); err != nil {
		return err
	}
	return c.ex.inTx(ctx, c, opts, f)
}

// Ping sends an empty statement and waits for its answer, as in pgx.
func (c *Conn) Ping(ctx context.Context) error {
	s, err := c.take(ctx)
	if err != nil {
		return err
	}
	return s.c.Conn().Ping(ctx)
}

// abandon ends a transaction whose connection is given back: nothing of it is committed, and nothing is sent.
func (t *tx) abandon() {
	handOver(t.nested, false)
	t.nested, t.queue, t.onCommit = nil, nil, nil
	t.release()
}
