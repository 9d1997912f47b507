package executor

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/internal/sqltext"
	"github.com/bounceproof/bounceproof/internal/statement"
)

// route is where a single statement runs: on a connection of its own, or in a transaction.
type route interface {
	// send is one attempt, up to the statement's row description. The group is nil when the statement went alone.
	send(ctx context.Context, q *call, a *attempt) (*pgconn.ResultReader, *statement.Group, error)
	// retry decides after a failed attempt whether there is another, and prepares it. The error is the caller's if there is none.
	retry(ctx context.Context, a *attempt, err error) (again bool, _ error)
	// succeeded takes note of an execution; a is nil for a text that went past the executor.
	succeeded(ctx context.Context, a *attempt)
	// pass makes ready for a text that goes past the executor.
	pass(ctx context.Context, sql string) error
}

// single is one Exec, Query or QueryRow on its way. It is a [task].
type single struct {
	ex    *Executor
	own   alone    // the route of a call outside a transaction
	s     *session // the route's connection
	route route
	q     call
	a     attempt
	r     *rows // what the answer of Query goes into; nil for Exec
	tag   pgconn.CommandTag
}

// reusableSingle returns a single that is free. A connection runs one statement at a time, so it keeps one in stock and a call allocates none;
// only a tracer that runs a statement itself, on the same connection, gets another.
func (s *session) reusableSingle() *single {
	if d := dataOf(s.c); d.single.ex == nil {
		return &d.single
	}
	return new(single)
}

// newSingle is a call on its way, outside a transaction of the executor's.
func (ex *Executor) newSingle(s session, sql string, args []any) *single {
	x := s.reusableSingle()
	x.ex, x.own = ex, alone{ex: ex, s: s}
	if s.c.PgConn().TxStatus() != 'I' {
		x.own.phase = fallback.PhaseInside
	}
	x.s, x.route = &x.own.s, &x.own
	x.q = readCall(sql, args)
	return x
}

// release gives back the single, and the connection if it is the call's own. In this order: whoever gets the connection next uses the single.
func (x *single) release() {
	pooled := x.own.s.pooled
	*x = single{}
	if pooled != nil {
		pooled.Release()
	}
}

// exec runs the call to its end.
func (x *single) exec(ctx context.Context) (pgconn.CommandTag, error) {
	if x.q.isPgx(true) {
		if err := x.route.pass(ctx, x.q.sql); err != nil {
			return pgconn.CommandTag{}, err
		}
		// What a rewriter, a tracer or an argument of the caller's sends would be next.
		expect := x.q.rewriter == nil && x.s.c.QueryTracer() == nil && onlyData(x.q.args)
		if expect {
			x.s.c.ExpectQuery(x.q.sql)
		}
		tag, err := x.s.c.Conn().Exec(ctx, x.q.sql, x.q.pgxArgs()...)
		if expect {
			x.s.c.ForgetText()
		}
		if err = inOrder(x.s.c, err); err == nil {
			x.route.succeeded(ctx, nil)
			return tag, nil
		}
		return tag, poolerBusy(err)
	}
	tracer := x.s.c.QueryTracer()
	if tracer == nil {
		return x.execUntraced(ctx)
	}
	ctx = tracer.TraceQueryStart(ctx, x.s.c.Conn(), pgx.TraceQueryStartData{SQL: x.q.givenSQL, Args: x.q.given})
	tag, err := x.execUntraced(ctx)
	tracer.TraceQueryEnd(ctx, x.s.c.Conn(), pgx.TraceQueryEndData{CommandTag: tag, Err: err})
	return tag, err
}

func (x *single) execUntraced(ctx context.Context) (pgconn.CommandTag, error) {
	if err := x.q.rewrite(ctx, x.s.c.Conn()); err != nil {
		return pgconn.CommandTag{}, err
	}
	if x.q.isPgx(true) { // what the rewriter has made of it
		if err := x.route.pass(ctx, x.q.sql); err != nil {
			return pgconn.CommandTag{}, err
		}
		tag, err := simpleExec(ctx, x.s.c.PgConn(), x.q.sql)
		return tag, poolerBusy(err)
	}
	err := x.ex.run(ctx, x.s, x)
	return x.tag, err
}

// query runs the call up to its first row and gives the single back. What failed is in the rows, which are closed then.
func (x *single) query(ctx context.Context) *rows {
	r, err := x.start(ctx)
	if err != nil {
		r.fail(err)
	}
	return r
}

func (x *single) start(ctx context.Context) (r *rows, err error) {
	r = x.s.newRows()
	r.c, r.conn = x.s.c, x.s.c.Conn()
	x.r = r
	returned := false
	// Before the rows release the connection, see release.
	defer func() {
		r.pooled = x.own.s.pooled
		*x = single{}
		if !returned {
			r.release() // something of the caller's panics, and nobody gets the rows
		}
	}()
	err = x.queryInto(ctx, r)
	returned = true
	return r, err
}

func (x *single) queryInto(ctx context.Context, r *rows) (err error) {
	if x.q.isPgx(false) {
		if err := x.route.pass(ctx, x.q.sql); err != nil {
			return err
		}
		r.inner, err = x.s.c.Conn().Query(ctx, x.q.sql, x.q.pgxArgs()...) //nolint:gocritic // r closes them
		return err
	}
	if r.tracer = x.s.c.QueryTracer(); r.tracer != nil {
		ctx = r.tracer.TraceQueryStart(ctx, r.conn, pgx.TraceQueryStartData{SQL: x.q.givenSQL, Args: x.q.given})
		r.ctx = ctx
	}
	if err := x.q.rewrite(ctx, r.conn); err != nil {
		return err
	}
	return x.ex.run(ctx, x.s, x)
}

// try implements [task].
func (x *single) try(ctx context.Context) (*attempt, error) {
	if x.r != nil {
		x.r.c, x.r.conn = x.s.c, x.s.c.Conn() // a retry may have replaced it
	}
	rr, g, err := x.route.send(ctx, &x.q, &x.a)
	switch {
	case err != nil:
	case x.r == nil:
		x.tag, err = conclude(rr, g)
	default:
		err = x.r.open(x.s.c, &x.q, &x.a, rr, g)
	}
	return &x.a, err
}

// retry implements [task].
func (x *single) retry(ctx context.Context, a *attempt, err error) (bool, error) {
	if x.r != nil {
		x.r.inner, x.r.group = nil, nil
	}
	return x.route.retry(ctx, a, err)
}

// succeeded implements [task].
func (x *single) succeeded(ctx context.Context) { x.route.succeeded(ctx, &x.a) }

// alone is the route of a statement outside a transaction of the executor's.
type alone struct {
	ex    *Executor
	s     session
	phase fallback.Phase // PhaseInside if a text of the caller's has begun a transaction, on a Conn
}

func (r *alone) send(ctx context.Context, q *call, a *attempt) (*pgconn.ResultReader, *statement.Group, error) {
	c := r.s.c
	if err := r.ex.prepareAttempt(ctx, c, q, a, nil, nil); err != nil {
		return nil, nil, err
	}
	a.stage = stageEncode
	e := r.ex.execution(c, q, a)
	if r.ex.unverified(c, a) {
		rr, g, _, err := r.ex.sendGroup(ctx, c, nil, askPID, a, e)
		return rr, g, err
	}
	rr, err := c.Run(ctx, &e)
	if err != nil {
		return nil, nil, err
	}
	a.stage = stageSent
	return rr, nil, nil
}

func (r *alone) retry(ctx context.Context, a *attempt, err error) (bool, error) {
	if r.s.lent && r.s.c.PgConn().IsBusy() {
		return false, err // rows or a batch of the Conn are still open: nothing was sent
	}
	again, err := r.ex.decideRetry(ctx, &r.s, a, r.phase, err)
	if !again && r.phase == fallback.PhaseInside {
		t := tx{ex: r.ex, s: r.s}
		err = t.fail(a, err)
	}
	return again, err
}

func (r *alone) succeeded(ctx context.Context, a *attempt) {
	if a != nil {
		r.ex.succeeded(ctx, a)
	}
}

func (r *alone) pass(_ context.Context, sql string) error {
	r.ex.passes(r.s.c, sql)
	return nil
}

// passes counts a text that goes past the executor.
func (ex *Executor) passes(c *statement.Conn, sql string) {
	ex.counters.passed.Add(1)
	if sqltext.OfScript(sql)&sqltext.ForgetsStatements != 0 {
		c.ForgetAll() // the caller throws our statements away with its own
	}
}

// onlyData reports whether no argument runs code of the caller's when it is encoded.
func onlyData(args []any) bool {
	for _, arg := range args {
		switch arg.(type) {
		case nil, bool, int, int16, int32, int64, float32, float64, string, []byte, time.Time:
		default:
			return false
		}
	}
	return true
}

// simpleExec runs sql as a simple query, like pgx's Exec without arguments, and without its trace.
func simpleExec(ctx context.Context, pg *pgconn.PgConn, sql string) (tag pgconn.CommandTag, err error) {
	c := statement.Of(pg)
	if c != nil {
		c.ExpectQuery(sql)
	}
	mrr := pg.Exec(ctx, sql)
	if c != nil {
		c.ForgetText()
	}
	for mrr.NextResult() {
		tag, _ = mrr.ResultReader().Close()
	}
	err = mrr.Close()
	if c != nil {
		err = inOrder(c, err)
	}
	return tag, err
}
