package executor

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/internal/selector"
	"github.com/bounceproof/bounceproof/internal/statement"
)

// stage is how far an attempt came before it failed.
type stage uint8

const (
	stageLearn  stage = iota // asking for the description: nothing of the statement itself was sent
	stageEncode              // the arguments do not fit the description: nothing was sent
	stageSent
)

// attempt is one run of a call, and what the decision about another one needs to know.
type attempt struct {
	st       *statement.Statement
	d        *statement.Description
	strategy fallback.Strategy
	parse    bool               // Close and Parse go in front, whatever is known of the name
	decision *selector.Decision // what the strategy follows from
	forced   bool               // strategy and parse were set after the failure of the run before
	fresh    bool               // d was learnt in this call, so it cannot be stale
	unnamed  bool               // never by name
	path     string             // what the transaction has said of search_path, see [Executor.lookup]
	since    int64              // in Unix nanoseconds: a description has to be younger; 0 is any
	stage    stage
	runs     int
	verdict  fallback.Verdict // on the last failure
}

// descriptionAge is how old a description may be before the text is learnt again, in a round trip of its own.
const descriptionAge = 5 * time.Minute

// lookup finds the statement of a call. A text that was found to mean other types in another schema has a statement for each search_path that
// transactions set, named differently, as the catalogs of differently configured connections are.
func (ex *Executor) lookup(c *statement.Conn, q *call, a *attempt) *statement.Statement {
	if a.st == nil {
		a.st = ex.statement(c, q.sql, q.stable())
		if a.path != "" && a.st.DependsOnSearchPath() {
			a.st = ex.statementUnder(c, a.path, q.sql, q.stable())
		}
		if q.describesEachTime() {
			a.since = time.Now().UnixNano()
		}
	}
	return a.st
}

// prepareAttempt looks the text up, learns it if need be, and picks the strategy. decision is that of the request the statement rides in; nil
// asks for one. begin holds texts that have to precede anything that is sent.
func (ex *Executor) prepareAttempt(
	ctx context.Context, c *statement.Conn, q *call, a *attempt, decision *selector.Decision, begin *[]string,
) error {
	a.runs++
	a.stage = stageLearn
	st := ex.lookup(c, q, a)
	if decision == nil {
		decision = ex.decide(ctx, c, st.Stable())
	}
	a.decision = decision
	c.Doubtful = decision.Pooled && !decision.Topology.Tracks
	ex.resetNames(c, decision)
	a.d = st.Description()
	if a.d == nil || a.st.LearntBefore(a.since) || (c.PgConn().TxStatus() == 'I' && st.NeedsRefresh(descriptionAge)) {
		d, err := st.Learn(ctx, c, begin)
		if err != nil {
			return err
		}
		a.d, a.fresh = d, true
	}
	if !a.forced {
		a.strategy, a.parse = ex.strategy(q, a)
	}
	if c.PgConn().TxStatus() == 'E' && (begin == nil || len(*begin) == 0) {
		// The server refuses every Parse now, and obeys every Close: with a name the statement would be gone, for other processes too.
		a.strategy, a.parse = fallback.Unprepared, false
	}
	return nil
}

// strategy is the way this execution goes over the wire.
func (ex *Executor) strategy(q *call, a *attempt) (strategy fallback.Strategy, parse bool) {
	if a.unnamed || q.unprepared() || !a.st.Stable() {
		return fallback.Unprepared, false
	}
	switch a.decision.Strategy {
	case fallback.Named:
		return fallback.Named, false
	case fallback.Shared:
		return fallback.Shared, !ex.shared.seen(a.d.Name())
	case fallback.Undecided, fallback.Unprepared:
	}
	return fallback.Unprepared, false
}

// execution is what attempt a puts on the wire.
func (ex *Executor) execution(c *statement.Conn, q *call, a *attempt) statement.Execution {
	return statement.Execution{
		Description: a.d, Strategy: a.strategy, Parse: a.parse, Args: q.args, Formats: q.formats,
		Direct: !a.decision.Pooled && c.Direct,
		// A connection that has not been verified may lead to any pooler.
		Tracked: a.decision.Topology.Tracks || !a.decision.Pooled && !c.Direct,
	}
}

// behind makes the attempt go without a name if a statement in front of it, in the same group, throws statements away: by the time a pooler that
// tracks them sees that, it has taken a Parse behind it for one that the server has already, and left it out (PgBouncer 1.24). It reports
// whether what stands behind this one has to go without a name.
func (a *attempt) behind(forgotten bool) bool {
	if forgotten {
		a.strategy, a.parse = fallback.Unprepared, false
	}
	return forgotten || a.d.ForgetsStatements()
}

// backendText asks which server connection a statement runs on. It is one cheap row; asking pg_prepared_statements costs 50 to 440 µs.
const backendText = "select pg_backend_pid()"

// unverified reports whether the execution should ask for its server connection because it would count on a direct one. A pooler can be put in
// front of a server without any error, and then every new connection leads to it: so each is looked at once, in the round trip of its first
// named statement.
func (ex *Executor) unverified(c *statement.Conn, a *attempt) bool {
	return a.strategy == fallback.Named && !a.decision.Pooled && !c.Direct && !a.d.Utility()
}

// verifyDirect compares the process id that answered a connection with what the server said at the start of this one. They are the same on a
// direct connection, and with a pooler in between they are not.
func (ex *Executor) verifyDirect(ctx context.Context, c *statement.Conn, a *attempt, backend uint32) {
	switch backend {
	case 0:
		return // no answer says nothing
	case c.PgConn().PID():
		c.Direct = true
		return
	}
	ex.selector.Observe(ctx, a.decision, fallback.Verdict{
		Reason: fallback.ReasonNone, Executed: fallback.No, Connection: fallback.Alive, Evidence: true, PoolerMade: true,
	})
}

// sendGroup sends texts, the question for the server connection, and the statement in one flush, and reads up to the statement's row description. It
// returns the server connection if it asked, also where the statement then failed. After an error the group is closed.
func (ex *Executor) sendGroup(
	ctx context.Context, c *statement.Conn, texts []string, ask question, a *attempt, e statement.Execution,
) (*pgconn.ResultReader, *statement.Group, server, error) {
	g := c.NewGroup()
	for _, text := range texts {
		g.AddText(text)
	}
	switch ask {
	case askNothing:
	case askPID:
		g.AddText(backendText)
	case askMark, makeMark:
		mark := statement.Execution{Description: ex.shared.mark(ask), Strategy: fallback.Shared, Parse: ask == makeMark}
		if err := g.Add(mark); err != nil {
			return nil, nil, server{}, err
		}
	}
	if err := a.add(g, e); err != nil {
		return nil, nil, server{}, err
	}
	a.stage = stageSent
	if err := g.Send(ctx); err != nil {
		_ = g.Close()
		return nil, nil, server{}, err
	}
	if ask == makeMark {
		c.Parses-- // it is no statement of the caller's
	}
	rr, on, err := readOpening(g, len(texts), ask != askNothing)
	if err != nil {
		_ = g.Close()
		return nil, nil, on, err
	}
	if ask == askPID && !a.decision.Pooled && !c.Direct {
		ex.verifyDirect(ctx, c, a, on.pid)
	}
	return rr, g, on, nil
}
