package executor

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/puddle/v2"

	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/notify"
	"github.com/bounceproof/bounceproof/prepare"
)

// Executor runs statements on a pool. Its methods have pgx's signatures, so that it stands wherever a pool stands: sqlc's DBTX, scany,
// squirrel. Safe for concurrent use. Make one per pool with [New] and Close it when done.
type Executor struct {
	pool     *pgxpool.Pool
	cfg      Config
	catalogs catalogs
	latch    *fallback.Latch
	shared   *sharedNames
	sender   *notify.Sender

	closed      atomic.Bool
	lookAtBegin atomic.Bool // stable statements run in transactions that are open already
	counters    counters
}

// New returns an executor on pool. It sends nothing: the first stable statement looks at what the pool's connections lead to. The pool
// stays the caller's, who closes it after the executor. It panics on a nil pool; the error names a field of cfg.
func New(pool *pgxpool.Pool, cfg Config) (*Executor, error) {
	if pool == nil {
		panic("executor: New: nil pool")
	}
	cfg, err := cfg.resolve()
	if err != nil {
		return nil, err
	}
	ex := &Executor{pool: pool, cfg: cfg}
	ex.shared = newSharedNames(cfg.StatementCapacity)
	ex.latch = ex.newLatch()
	ex.sender, err = ex.newSender()
	return ex, err
}

// Pool returns the wrapped pool.
func (ex *Executor) Pool() *pgxpool.Pool { return ex.pool }

// Close sends what Notify still holds, until ctx is done, and refuses further calls with [ErrClosed]. The pool stays open. Closing twice is
// no error.
func (ex *Executor) Close(ctx context.Context) error {
	if ex.closed.Load() {
		return nil
	}
	err := ex.sender.Close(ctx)
	ex.closed.Store(true)
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
	// A retry may have replaced the connection.
	defer func() {
		if s.pooled != nil {
			s.pooled.Release()
		}
	}()
	q := readCall(sql, args)
	if q.isPgx(true) {
		ex.passes(s.c, q.sql)
		return s.pooled.Exec(ctx, q.sql, q.pgxArgs()...)
	}
	tracer := s.c.QueryTracer()
	if tracer == nil {
		return ex.execCall(ctx, &s, &q)
	}
	ctx = tracer.TraceQueryStart(ctx, s.c.Conn(), pgx.TraceQueryStartData{SQL: sql, Args: args})
	tag, err := ex.execCall(ctx, &s, &q)
	tracer.TraceQueryEnd(ctx, s.c.Conn(), pgx.TraceQueryEndData{CommandTag: tag, Err: err})
	return tag, err
}

func (ex *Executor) execCall(ctx context.Context, s *session, q *call) (pgconn.CommandTag, error) {
	if err := q.rewrite(ctx, s.c.Conn()); err != nil {
		return pgconn.CommandTag{}, err
	}
	if q.isPgx(true) {
		ex.passes(s.c, q.sql)
		return simpleExec(ctx, s.c.PgConn(), q.sql)
	}
	return ex.exec(ctx, s, q)
}

// passes counts a text that goes past the executor.
func (ex *Executor) passes(c *prepare.Conn, sql string) {
	ex.counters.passed.Add(1)
	if kw := prepare.Keyword(sql); kw == "discard" || kw == "deallocate" {
		c.ForgetAll() // the caller throws our statements away with its own
	}
}

// simpleExec runs sql as a simple query, like pgx's Exec without arguments, and without its trace.
func simpleExec(ctx context.Context, pg *pgconn.PgConn, sql string) (tag pgconn.CommandTag, err error) {
	mrr := pg.Exec(ctx, sql)
	for mrr.NextResult() {
		tag, _ = mrr.ResultReader().Close()
	}
	return tag, mrr.Close()
}

// Query runs sql and returns its rows, as pgxpool.Pool.Query does. It returns when the first row is there, or the end: that is how it can
// run a statement again that a pooler lost. The rows hold the connection until they are closed.
func (ex *Executor) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	r := ex.start(ctx, sql, args)
	return r, r.err
}

// QueryRow runs sql and returns its first row, as pgxpool.Pool.QueryRow does. Errors come from Scan.
func (ex *Executor) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return (*row)(ex.start(ctx, sql, args))
}

// start is Query; what failed is in the rows, which are closed then.
func (ex *Executor) start(ctx context.Context, sql string, args []any) *rows {
	s, err := ex.acquire(ctx)
	if err != nil {
		return &rows{err: err, closed: true}
	}
	r := s.newRows()
	r.conn, r.pooled = s.c.Conn(), s.pooled
	q := readCall(sql, args)
	if q.isPgx(false) {
		ex.passes(s.c, q.sql)
		inner, err := s.pooled.Query(ctx, q.sql, q.pgxArgs()...)
		r.inner = inner
		if err != nil {
			r.fail(err)
		}
		return r
	}
	if r.tracer = s.c.QueryTracer(); r.tracer != nil {
		ctx = r.tracer.TraceQueryStart(ctx, r.conn, pgx.TraceQueryStartData{SQL: sql, Args: args})
		r.ctx = ctx
	}
	err = q.rewrite(ctx, r.conn)
	if err == nil {
		err = ex.query(ctx, &s, &q, r)
	}
	r.pooled = s.pooled
	if s.pooled != nil {
		r.conn = s.c.Conn()
	}
	if err != nil {
		r.fail(err)
	}
	return r
}

// Topology looks at what the pool's connections lead to, or returns what an earlier look found. It fails when the server cannot be
// reached within Config.ProbeTimeout; the executor then runs unprepared and looks again later.
func (ex *Executor) Topology(ctx context.Context) (fallback.Topology, error) {
	if top := ex.latch.Decision().Topology; top.Known() {
		return top, nil
	}
	if ex.closed.Load() {
		return fallback.Topology{}, ErrClosed
	}
	return ex.probe(ctx)
}

// decide returns the present way of sending stable statements. The first caller, and later one whenever it is time to look again, probes
// under its own context; others go on meanwhile as it was decided, at first unprepared. It is asked before anything of the call is sent,
// and never looks from within an open transaction: a pooler's only server would be the one that the transaction holds. The next Begin
// looks instead.
func (ex *Executor) decide(ctx context.Context, c *prepare.Conn, st *prepare.Statement) *fallback.Decision {
	if !st.Stable() {
		return ex.latch.Decision()
	}
	if c.PgConn().TxStatus() == 'I' {
		ex.look(ctx)
	} else if !ex.lookAtBegin.Load() {
		ex.lookAtBegin.Store(true)
	}
	return ex.latch.Decision()
}

// look probes if it is time to. What it found out, or that it did not, is with the latch.
func (ex *Executor) look(ctx context.Context) {
	if ex.latch.Due() {
		_, _ = ex.probe(ctx)
	}
}

// statementMode reports whether the pooler is known to refuse transactions.
func (ex *Executor) statementMode() bool {
	return ex.latch.Decision().Topology.Mode == fallback.ModeStatement
}

// probe looks at the pooler on connections of its own.
func (ex *Executor) probe(ctx context.Context) (fallback.Topology, error) {
	probeCtx := ctx
	if ex.cfg.ProbeTimeout > 0 {
		var cancel context.CancelFunc
		probeCtx, cancel = context.WithTimeout(ctx, ex.cfg.ProbeTimeout)
		defer cancel()
	}
	ex.counters.probes.Add(1)
	start := time.Now()
	top, err := fallback.Probe(probeCtx, ex.dial)
	ex.cfg.Trace.probed(top, time.Since(start), err)
	if err != nil {
		ex.latch.Fail(ctx, err)
		return fallback.Topology{}, fmt.Errorf("executor: probe: %w", err)
	}
	ex.latch.Settle(ctx, top)
	return top, nil
}

// newLatch returns the latch of a new executor.
func (ex *Executor) newLatch() *fallback.Latch {
	return fallback.NewLatch(fallback.LatchConfig{
		Policy: ex.cfg.PreparedStatements, Logger: ex.cfg.Logger, ReprobeAfter: ex.cfg.ReprobeAfter,
		OnChange: func(c fallback.Change) {
			switch {
			case c.To == fallback.Unprepared:
				ex.counters.downgrades.Add(1)
			case c.From == fallback.Unprepared:
				ex.counters.upgrades.Add(1)
			}
			ex.cfg.Trace.changed(c)
		},
	})
}

// dial opens a connection as the pool would, but not one of the pool's: a pool may have a single connection, or none free.
func (ex *Executor) dial(ctx context.Context) (*pgconn.PgConn, error) {
	return fallback.Dialer(func(ctx context.Context) (*pgconn.Config, error) {
		cfg := ex.pool.Config()
		if cfg.BeforeConnect != nil {
			if err := cfg.BeforeConnect(ctx, cfg.ConnConfig); err != nil {
				return nil, err
			}
		}
		return &cfg.ConnConfig.Config, nil
	})(ctx)
}
