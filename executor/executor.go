package executor

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/puddle/v2"

	"github.com/bounceproof/bounceproof/internal/pgxinternals"
	"github.com/bounceproof/bounceproof/internal/selector"
	"github.com/bounceproof/bounceproof/notify"
)

// Executor runs statements on a pool. Its methods have the signatures of the pool's, but for three: Acquire and AcquireFunc give a [Conn] of
// the executor's, and Close takes a context and returns an error. So it stands where code asks for an interface, such as sqlc's DBTX or scany's
// Querier. What asks for a *pgxpool.Pool by name, such as River's driver, gets [Executor.Pool].
//
// Safe for concurrent use. Make one per database with [NewPool], or with [New] on a pool you have, and Close it when done.
type Executor struct {
	pool     *pgxpool.Pool
	ownsPool bool // Close closes it
	cfg      Config
	catalogs catalogs
	selector *selector.Selector
	shared   *sharedNames
	sender   *notify.Sender

	closed       atomic.Bool
	probeAtBegin atomic.Bool // stable statements run in transactions that are open already
	counters     counters
	settings     settings

	longestValue int // that CopyFrom sends: maxValue, but in a test
}

// New returns an executor on a pool you have. It sends nothing: the first stable statement looks at what the pool's connections lead to. The
// pool stays the caller's, who closes it after the executor. What runs on the pool past the executor, its own hooks included, is guarded only if
// [Guard] was called on its configuration; [NewPool] does that. It panics on a nil pool. The error names a field of cfg, or says that this version
// of pgx has changed what the executor relies on.
func New(pool *pgxpool.Pool, cfg Config) (*Executor, error) {
	if pool == nil {
		panic("executor: New: nil pool")
	}
	ex, err := newExecutor(cfg)
	if err != nil {
		return nil, err
	}
	ex.pool = pool
	return ex, nil
}

// newExecutor returns an executor that has no pool yet.
func newExecutor(cfg Config) (*Executor, error) {
	if err := pgxinternals.Check(); err != nil {
		return nil, fmt.Errorf("executor: %w", err)
	}
	cfg, err := cfg.resolve()
	if err != nil {
		return nil, err
	}
	ex := &Executor{cfg: cfg, longestValue: maxValue}
	ex.shared = newSharedNames(cfg.StatementCapacity, cfg.StatementSalt)
	ex.selector = ex.newSelector()
	ex.sender, err = notify.NewSender(ex, cfg.Sender)
	if err != nil {
		return nil, fmt.Errorf("executor: Config.Sender: %w", err)
	}
	return ex, nil
}

// Pool returns the wrapped pool.
func (ex *Executor) Pool() *pgxpool.Pool { return ex.pool }

// Close sends what Notify still holds, until ctx is done, and refuses further calls with [ErrClosed]. A pool that [NewPool] made is closed with
// it: Close then waits until every connection was given back, or ctx is done; the error says that some were not, and they are closed when they are. A
// pool that was handed to [New] stays open. Closing twice is no error.
func (ex *Executor) Close(ctx context.Context) error {
	var err error
	if !ex.closed.Load() {
		err = ex.sender.Close(ctx)
		ex.closed.Store(true)
	}
	if ex.ownsPool {
		err = errors.Join(err, closePool(ctx, ex.pool))
	}
	return err
}

// closedPool names the executor's own state when the pool was closed under it.
func closedPool(err error) error {
	if errors.Is(err, puddle.ErrClosedPool) {
		return fmt.Errorf("%w: %w", ErrClosed, err)
	}
	return err
}

// Exec runs sql and returns its command tag, as pgxpool.Pool.Exec does. Without arguments and without prepare.Stable it is pgx's simple
// query, which may hold several statements.
func (ex *Executor) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	s, err := ex.acquire(ctx)
	if err != nil {
		return pgconn.CommandTag{}, err
	}
	x := ex.newSingle(s, sql, args)
	defer x.release()
	return x.exec(ctx)
}

// Query runs sql and returns its rows, as pgxpool.Pool.Query does. It returns when the first row is there, or the end: that is how it can
// run a statement again that a pooler lost. The rows hold the connection until they are closed.
func (ex *Executor) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	r := ex.query(ctx, sql, args)
	return r, r.err
}

// QueryRow runs sql and returns its first row, as pgxpool.Pool.QueryRow does. Errors come from Scan.
func (ex *Executor) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return (*row)(ex.query(ctx, sql, args))
}

// query is Query; what failed is in the rows, which are closed then.
func (ex *Executor) query(ctx context.Context, sql string, args []any) *rows {
	s, err := ex.acquire(ctx)
	if err != nil {
		return &rows{err: err, closed: true}
	}
	return ex.newSingle(s, sql, args).query(ctx)
}
