package executor

import (
	"context"
	"fmt"
	"strconv"
	"time"

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

// descriptionAge is how old a description may be before the text is learnt again, in a round trip of its own.
const descriptionAge = 5 * time.Minute

// prepareAttempt looks the text up, learns it if need be, and picks the strategy. begin holds texts that have to precede anything that is
// sent.
func (ex *Executor) prepareAttempt(ctx context.Context, c *prepare.Conn, q *call, a *attempt, begin []string) error {
	a.runs++
	a.stage = stageLearn
	if a.st == nil {
		a.st = ex.statement(c, q.sql, q.stable())
	}
	a.decision = ex.decide(ctx, c, a.st)
	ex.renew(c, a.decision)
	a.d = a.st.Description()
	if a.d == nil || (c.PgConn().TxStatus() == 'I' && a.st.Doubt(descriptionAge)) {
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
func (ex *Executor) execution(c *prepare.Conn, q *call, a *attempt) prepare.Execution {
	return prepare.Execution{
		Description: a.d, Strategy: a.strategy, Direct: !a.decision.Pooled && c.Proven, Args: q.args, Formats: q.formats,
	}
}

// send runs one attempt outside a transaction, up to its row description. The group is nil when the statement went alone.
func (ex *Executor) send(ctx context.Context, c *prepare.Conn, q *call, a *attempt) (*pgconn.ResultReader, *prepare.Group, error) {
	if err := ex.prepareAttempt(ctx, c, q, a, nil); err != nil {
		return nil, nil, err
	}
	a.stage = stageEncode
	e := ex.execution(c, q, a)
	if ex.unproven(c, a) {
		rr, g, _, err := ex.sendGroup(ctx, c, nil, true, a, e)
		return rr, g, err
	}
	rr, err := c.Run(ctx, &e)
	if err != nil {
		return nil, nil, err
	}
	a.stage = stageSent
	return rr, nil, nil
}

// backendText asks which server connection a statement runs on. It is one cheap row; asking pg_prepared_statements costs 50 to 440 µs.
const backendText = "select pg_backend_pid()"

// unproven reports whether the execution should ask for its server connection because it would count on a direct one. A pooler can be put in
// front of a server without any error, and then every new connection leads to it: so each is looked at once, in the round trip of its first
// named statement.
func (ex *Executor) unproven(c *prepare.Conn, a *attempt) bool {
	return a.strategy == prepare.Named && !a.decision.Pooled && !c.Proven && !a.d.Utility()
}

// sendGroup sends texts, the question for the server connection if ask is set, and the statement in one flush, and reads up to the statement's
// row description. It returns the server connection's process id if it asked. After an error the group is closed.
func (ex *Executor) sendGroup(
	ctx context.Context, c *prepare.Conn, texts []string, ask bool, a *attempt, e prepare.Execution,
) (*pgconn.ResultReader, *prepare.Group, uint32, error) {
	g := c.NewGroup()
	for _, text := range texts {
		g.AddText(text)
	}
	if ask {
		g.AddText(backendText)
	}
	if err := addAsChosen(g, e); err != nil {
		return nil, nil, 0, err
	}
	a.stage = stageSent
	if err := g.Send(ctx); err != nil {
		_ = g.Close()
		return nil, nil, 0, err
	}
	rr, backend, err := readOpening(g, len(texts), ask)
	if err != nil {
		_ = g.Close()
		return nil, nil, 0, err
	}
	if ask && !a.decision.Pooled && !c.Proven {
		ex.prove(ctx, c, a, backend)
	}
	return rr, g, backend, nil
}

// addAsChosen adds an execution whose strategy was chosen with regard to its server connection: [prepare.Shared] is bound, and not parsed.
func addAsChosen(g *prepare.Group, e prepare.Execution) error {
	if e.Strategy == prepare.Shared {
		return g.AddBound(e)
	}
	return g.Add(e)
}

// conclude reads the answer to a statement to its end, and that of the group it rode in, if any.
func conclude(rr *pgconn.ResultReader, g *prepare.Group) (pgconn.CommandTag, error) {
	tag, err := rr.Close()
	if g != nil {
		if groupErr := g.Close(); err == nil {
			err = groupErr
		}
	}
	return tag, err
}

// readOpening reads the results of what rode in front, and then the statement's.
func readOpening(g *prepare.Group, texts int, ask bool) (rr *pgconn.ResultReader, backend uint32, err error) {
	for range texts {
		if rr, err = g.Next(); err == nil {
			_, err = rr.Close()
		}
		if err != nil {
			return nil, 0, err
		}
	}
	if ask {
		if rr, err = g.Next(); err != nil {
			return nil, 0, err
		}
		if rr.NextRow() {
			pid, err := strconv.ParseUint(string(rr.Values()[0]), 10, 32)
			if err != nil {
				return nil, 0, fmt.Errorf("executor: %s: %w", backendText, err)
			}
			backend = uint32(pid)
		}
		if _, err := rr.Close(); err != nil {
			return nil, 0, err
		}
	}
	rr, err = g.Next()
	return rr, backend, err
}

// prove compares the server connection with what the server said at the start of this one. They are the same on a direct connection, and with a
// pooler in between they are not.
func (ex *Executor) prove(ctx context.Context, c *prepare.Conn, a *attempt, backend uint32) {
	if backend == c.PgConn().PID() {
		c.Proven = true
		return
	}
	ex.latch.Trip(ctx, a.decision, fallback.Verdict{
		Reason: fallback.ReasonNone, Executed: fallback.No, Connection: fallback.Alive, Evidence: true, PoolerMade: true,
	})
}

// readable returns an error when rows came with a type that is unknown to pgx, in a binary form that was asked for because the column was of
// another type when the statement was learnt: what a caller scanned would be garbage. It also makes the next execution learn again.
func (a *attempt) readable(c *prepare.Conn, q *call, fields []pgconn.FieldDescription) error {
	if a.d.Matches(fields) || fields == nil {
		return nil
	}
	a.st.Forget(a.d)
	if q.formats.Positions != nil || q.formats.ByOID != nil {
		return nil // the caller's own choice
	}
	for i := range fields {
		if fields[i].Format != pgx.BinaryFormatCode {
			continue
		}
		if typ, ok := c.TypeMap().TypeForOID(fields[i].DataTypeOID); !ok || !typ.Codec.FormatSupported(pgx.BinaryFormatCode) {
			return fmt.Errorf("executor: column %q has changed its type, and pgx knows no binary form of the new one; "+
				"the statement was executed, and the next execution will read it", fields[i].Name)
		}
	}
	return nil
}

// exec runs a call to its end, at most twice.
func (ex *Executor) exec(ctx context.Context, s *session, q *call) (pgconn.CommandTag, error) {
	var a attempt
	for {
		var tag pgconn.CommandTag
		rr, g, err := ex.send(ctx, s.c, q, &a)
		if err == nil {
			tag, err = conclude(rr, g)
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
		rr, g, err := ex.send(ctx, s.c, q, &a)
		if err == nil {
			err = r.open(s.c, q, &a, rr, g)
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
		r.inner, r.group, r.err = nil, nil, nil
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
