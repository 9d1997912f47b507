package executor

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/prepare"
)

// session is the connection that a call runs on.
type session struct {
	pooled *pgxpool.Conn
	c      *prepare.Conn
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
	return session{pooled: pooled, c: prepare.Attach(pooled.Conn(), ex.cfg.StatementCapacity)}, nil
}

// replace gives back a connection that died and takes another.
func (ex *Executor) replace(ctx context.Context, s *session) error {
	if s.pooled != nil {
		_ = s.c.PgConn().Close(ctx) // an OnPgError of the caller's may have left it open
		s.pooled.Release()
		s.pooled = nil
	}
	next, err := ex.acquire(ctx)
	if err != nil {
		return err // s.c remains: a closed connection, which answers as one
	}
	*s = next
	return nil
}

// stage is how far an attempt came before it failed.
type stage uint8

const (
	stageLearn  stage = iota // asking for the description: nothing of the statement itself was sent
	stageEncode              // the arguments do not fit the description: nothing was sent
	stageSent
)

// attempt is one run of a call, and what the judgement of its outcome needs to know.
type attempt struct {
	st       *prepare.Statement
	d        *prepare.Description
	strategy prepare.Strategy
	decision *fallback.Decision // what the strategy follows from
	forced   bool               // strategy was set by the judgement of the run before
	fresh    bool               // d was learnt in this call, so it cannot be stale
	unnamed  bool               // never by name
	stage    stage
	runs     int
	verdict  fallback.Verdict // on the last failure
}

// prepareAttempt looks the text up, learns it if need be, and picks the strategy. begin holds texts that have to precede anything that is
// sent.
func (ex *Executor) prepareAttempt(ctx context.Context, c *prepare.Conn, q *call, a *attempt, begin []string) error {
	a.runs++
	a.stage = stageLearn
	if a.st == nil {
		a.st = ex.catalog.Lookup(q.sql, q.stable())
	}
	a.decision = ex.decide(ctx, c, a.st)
	c.Renew(a.decision.Number)
	a.d = a.st.Description()
	if a.d == nil {
		d, err := a.st.Learn(ctx, c, begin)
		if err != nil {
			return err
		}
		a.d, a.fresh = d, true
	}
	if !a.forced {
		a.strategy = ex.strategy(q, a)
	}
	return nil
}

// strategy is the way this execution goes over the wire.
func (ex *Executor) strategy(q *call, a *attempt) prepare.Strategy {
	if a.unnamed || q.unprepared() || !a.st.Stable() {
		return prepare.Unprepared
	}
	switch a.decision.Strategy {
	case fallback.Named:
		return prepare.Named
	case fallback.Shared:
		if ex.shared.seen(a.d.Name()) {
			return prepare.Shared
		}
		return prepare.SharedParse
	case fallback.Undecided, fallback.Unprepared:
	}
	return prepare.Unprepared
}

// execution is what attempt a puts on the wire.
func (ex *Executor) execution(q *call, a *attempt) prepare.Execution {
	return prepare.Execution{
		Description: a.d, Strategy: a.strategy, Direct: !a.decision.Pooled, Args: q.args, Formats: q.formats,
	}
}

// send runs one attempt outside a transaction, up to its row description.
func (ex *Executor) send(ctx context.Context, c *prepare.Conn, q *call, a *attempt) (*pgconn.ResultReader, error) {
	if err := ex.prepareAttempt(ctx, c, q, a, nil); err != nil {
		return nil, err
	}
	a.stage = stageEncode
	e := ex.execution(q, a)
	rr, err := c.Run(ctx, &e)
	if err != nil {
		return nil, err
	}
	a.stage = stageSent
	return rr, nil
}

// exec runs a call to its end, at most twice.
func (ex *Executor) exec(ctx context.Context, s *session, q *call) (pgconn.CommandTag, error) {
	var a attempt
	for {
		var tag pgconn.CommandTag
		rr, err := ex.send(ctx, s.c, q, &a)
		if err == nil {
			tag, err = rr.Close()
		}
		ex.count(s.c)
		if err == nil {
			ex.succeeded(ctx, &a)
			return tag, nil
		}
		again, err := ex.judge(ctx, s, &a, fallback.PhaseAlone, err)
		if !again {
			return tag, err
		}
	}
}

// query runs a call up to its first row, at most twice, and leaves the rest to r.
func (ex *Executor) query(ctx context.Context, s *session, q *call, r *rows) error {
	var a attempt
	for {
		rr, err := ex.send(ctx, s.c, q, &a)
		if err == nil {
			r.inner = pgx.RowsFromResultReader(s.c.TypeMap(), rr)
			err = r.peek()
		}
		ex.count(s.c)
		if err == nil {
			ex.succeeded(ctx, &a)
			return nil
		}
		again, err := ex.judge(ctx, s, &a, fallback.PhaseAlone, err)
		if !again {
			return err
		}
		r.inner, r.err = nil, nil
	}
}

// succeeded counts an execution and remembers what it proves.
func (ex *Executor) succeeded(ctx context.Context, a *attempt) {
	switch a.strategy {
	case prepare.Unprepared:
		ex.counters.unprepared.Add(1)
	case prepare.Named:
		ex.counters.named.Add(1)
	case prepare.Shared, prepare.SharedParse:
		ex.counters.shared.Add(1)
		ex.shared.ran(a.d.Name())
		if a.strategy == prepare.Shared {
			ex.latch.Count(ctx, a.decision, false)
		}
	}
}

// count takes over what the connection counted.
func (ex *Executor) count(c *prepare.Conn) {
	if c.Parses > 0 {
		ex.counters.parses.Add(c.Parses)
		c.Parses = 0
	}
	if c.Learns > 0 {
		ex.counters.learns.Add(c.Learns)
		c.Learns = 0
	}
}
