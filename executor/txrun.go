package executor

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/internal/selector"
	"github.com/bounceproof/bounceproof/internal/statement"
)

// enter makes the transaction ready for a call; queue is what its text may cut off, exec is true for Exec.
func (t *tx) enter(ctx context.Context, queue *[]call, sql string, args []any, exec bool) (*single, error) {
	if t.closed {
		return nil, pgx.ErrTxClosed
	}
	q := t.readCall(sql, args)
	// What a rewriter leaves without arguments, Exec sends as a simple query too.
	if err := t.beforeText(ctx, queue, q.sql, q.isPgx(exec) || exec && q.rewriter != nil); err != nil {
		return nil, err
	}
	t.traceBegin(ctx)
	return t.singleOf(q), nil
}

// singleOf is a call on its way in the transaction.
func (t *tx) singleOf(q call) *single {
	x := t.s.reusableSingle()
	x.ex, x.s, x.route, x.q = t.ex, &t.s, t, q
	x.a.unnamed, x.a.since, x.a.path = t.second != 0, t.second, t.path
	return x
}

// send implements [route]: one statement of the transaction, with every text in front that has not been sent yet.
func (t *tx) send(ctx context.Context, q *call, a *attempt) (*pgconn.ResultReader, *statement.Group, error) {
	if t.statementMode() {
		return nil, nil, ErrStatementMode
	}
	c := t.s.c
	if err := t.prepareAttempt(ctx, q, a, nil, true); err != nil {
		return nil, nil, err
	}
	if a.strategy == fallback.Shared {
		t.closeEvicted(ctx)
	}
	ask := t.question(a)
	a.stage = stageEncode
	e := t.ex.execution(c, q, a)
	t.noteSearchPath(q.sql, q.args)
	if len(t.preamble.unsent) == 0 && ask == askNothing {
		rr, err := c.Run(ctx, &e)
		if err == nil {
			a.stage = stageSent
		}
		return rr, nil, err
	}
	rr, g, on, err := t.ex.sendGroup(ctx, c, t.preamble.unsent, ask, a, e)
	if ask != askNothing {
		t.on = on // also where the statement was missing: retry then knows on which server
	}
	if err != nil {
		if a.stage == stageSent {
			t.sent(err)
		}
		return nil, nil, err
	}
	t.preamble.arrived()
	return rr, g, nil
}

// prepareAttempt is the executor's, with the strategy that suits the transaction's server connection. ride says that the unsent texts precede
// what is sent.
func (t *tx) prepareAttempt(ctx context.Context, q *call, a *attempt, decision *selector.Decision, ride bool) error {
	c := t.s.c
	var begin *[]string
	if ride {
		begin = &t.preamble.unsent
	}
	learns := c.Learns
	err := t.ex.prepareAttempt(ctx, c, q, a, decision, begin)
	if ride && c.Learns != learns {
		t.sent(err)
	}
	if err == nil && a.strategy == fallback.Shared && !a.forced {
		a.parse = !t.knows(a.d.Name())
	}
	return err
}

// sent takes note of what became of a request that carried the unsent texts: unless nothing was sent, they have arrived, if the server says
// that a transaction is open.
func (t *tx) sent(err error) {
	if (err == nil || !pgconn.SafeToRetry(err)) && t.s.c.PgConn().TxStatus() != 'I' {
		t.preamble.arrived()
	}
}

// succeeded implements [route]: it counts an execution and remembers on which server connection its name is.
func (t *tx) succeeded(ctx context.Context, a *attempt) {
	t.lostErr = nil // a loss before it was undone with a savepoint
	if a == nil {
		return
	}
	t.preamble.use()
	t.ex.succeeded(ctx, a)
	if a.strategy == fallback.Shared {
		t.learntName(a.d.Name())
	}
}

// pass implements [route].
func (t *tx) pass(ctx context.Context, sql string) error {
	if err := t.flush(ctx); err != nil {
		return err
	}
	t.preamble.use()
	t.ex.passes(t.s.c, sql)
	t.noteSearchPath(sql, nil)
	return nil
}

// noteSearchPath keeps what a text of the transaction says of search_path, be it SET or set_config.
func (t *tx) noteSearchPath(sql string, args []any) {
	if !speaksOfSearchPath(sql) {
		return
	}
	t.path = sql
	if len(args) > 0 {
		t.path = fmt.Sprintf("%s %q", sql, args)
	}
}

// speaksOfSearchPath reports whether a text has the word in it, as it is usually written.
func speaksOfSearchPath(sql string) bool {
	return strings.Contains(sql, "search_path") || strings.Contains(sql, "SEARCH_PATH")
}

// otherSchema reports whether arguments that did not fit a description may fit that of another schema, and makes the attempt find it.
func (a *attempt) otherSchema() bool {
	if a.stage != stageEncode || a.path == "" || a.fresh || a.st == nil || a.st.DependsOnSearchPath() {
		return false
	}
	a.st.FoundBySearchPath()
	a.st, a.d = nil, nil
	return true
}

// phase is where in the transaction the next statement stands.
func (t *tx) phase() fallback.Phase {
	if t.preamble.unused {
		return fallback.PhaseBegin
	}
	return fallback.PhaseInside
}

// retry implements [route]: it decides what a failed statement means for the transaction. While nothing else of the transaction has run the
// statement is redone once, in one group with ROLLBACK and BEGIN in front. Later a lost statement is the transaction's end, reported as
// [*PreparedStatementError].
func (t *tx) retry(ctx context.Context, a *attempt, err error) (again bool, _ error) {
	if errors.Is(err, ErrStatementMode) {
		return false, err
	}
	if t.s.c.PgConn().IsBusy() {
		return false, err // rows or a batch are still open: nothing was sent, and what is open must not be rolled back
	}
	if t.redoUnmarked(ctx, a, err) {
		return true, err
	}
	if a.otherSchema() {
		return true, err // nothing was sent
	}
	sent := a.stage != stageEncode
	untouched := !sent || (pgconn.SafeToRetry(err) && !t.s.c.PgConn().IsClosed())
	again, err = t.ex.decideRetry(ctx, &t.s, a, t.phase(), err)
	t.forgetBackend(a)
	if !again {
		if !untouched {
			t.preamble.use()
		}
		return false, t.fail(a, err)
	}
	if sent {
		t.preamble.restart(t.s.c.PgConn().TxStatus() != 'I')
		t.on = server{}
	}
	return true, err
}

// fail gives an error that ends the transaction the form its caller can act on.
func (t *tx) fail(a *attempt, err error) error {
	switch v := a.verdict; {
	case v.Reason == fallback.ReasonStatementMode:
		return fmt.Errorf("%w: %w", ErrStatementMode, err)
	case isLost(v), v.Action == fallback.RerunTx:
		if a.path != "" && a.st != nil && overtaken(v) {
			a.st.FoundBySearchPath()
		}
		var lost *PreparedStatementError
		if !errors.As(err, &lost) {
			lost = &PreparedStatementError{Reason: a.verdict.Reason, Name: a.verdict.Name, Err: err}
		}
		lost.InTx = true
		t.lostErr = lost
		return lost
	default:
		return err
	}
}
