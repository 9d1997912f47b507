package executor

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/prepare"
)

// start sends one statement of the transaction, with every text in front that has not been sent yet, up to its row description. The group
// is nil when the statement went alone.
func (t *tx) start(ctx context.Context, q *call, a *attempt) (*pgconn.ResultReader, *prepare.Group, error) {
	if t.statementMode() {
		return nil, nil, ErrStatementMode
	}
	c := t.s.c
	if err := t.prepareAttempt(ctx, q, a, true); err != nil {
		return nil, nil, err
	}
	ask := t.ex.unproven(c, a) || isShared(a.strategy) && t.backend == 0
	a.stage = stageEncode
	e := t.ex.execution(c, q, a)
	if len(t.pending) == 0 && !ask {
		rr, err := c.Run(ctx, &e)
		if err == nil {
			a.stage = stageSent
		}
		return rr, nil, err
	}
	rr, g, backend, err := t.ex.sendGroup(ctx, c, t.pending, ask, a, e)
	if err != nil {
		if a.stage == stageSent {
			t.sent(err)
		}
		return nil, nil, err
	}
	if ask {
		t.backend = backend
	}
	t.begun, t.pending = true, nil
	return rr, g, nil
}

// prepareAttempt is the executor's, with the strategy that suits the transaction's server connection. ride says that the pending texts precede
// what is sent.
func (t *tx) prepareAttempt(ctx context.Context, q *call, a *attempt, ride bool) error {
	c := t.s.c
	var begin []string
	if ride {
		begin = t.pending
	}
	learns := c.Learns
	err := t.ex.prepareAttempt(ctx, c, q, a, begin)
	if ride && c.Learns != learns {
		t.sent(err)
	}
	if err == nil && isShared(a.strategy) && !a.forced {
		a.strategy = t.sharedStrategy(a.d.Name())
	}
	return err
}

// isShared reports whether a strategy uses names that a connection shares with others.
func isShared(s prepare.Strategy) bool { return s == prepare.Shared || s == prepare.SharedParse }

// sent takes note of what became of a request that carried the pending texts: unless nothing was sent, they have arrived, if the server says
// that a transaction is open.
func (t *tx) sent(err error) {
	if (err == nil || !pgconn.SafeToRetry(err)) && t.s.c.PgConn().TxStatus() != 'I' {
		t.begun, t.pending = true, nil
	}
}

// sharedStrategy binds a name that this transaction's server connection is known to have and parses any other. While the server connection is
// not known a name is bound if the executor has used it anywhere and nothing else of the transaction has run: then a miss is redone.
func (t *tx) sharedStrategy(name string) prepare.Strategy {
	known := t.ex.shared.has(t.backend, name)
	if t.backend == 0 {
		known = t.virgin && t.ex.shared.seen(name)
	}
	if known {
		return prepare.Shared
	}
	return prepare.SharedParse
}

// exec runs one statement of the transaction to its end.
func (t *tx) exec(ctx context.Context, q *call) (pgconn.CommandTag, error) {
	a := attempt{unnamed: t.unnamed}
	for {
		var tag pgconn.CommandTag
		rr, g, err := t.start(ctx, q, &a)
		if err == nil {
			tag, err = conclude(rr, g)
		}
		t.ex.count(t.s.c)
		if err == nil {
			t.succeeded(ctx, &a)
			return tag, nil
		}
		again, err := t.judge(ctx, &a, err)
		if !again {
			return tag, err
		}
	}
}

// query runs one statement of the transaction up to its first row and leaves the rest to r.
func (t *tx) query(ctx context.Context, q *call, r *rows) error {
	a := attempt{unnamed: t.unnamed}
	for {
		rr, g, err := t.start(ctx, q, &a)
		if err == nil {
			err = r.open(t.s.c, q, &a, rr, g)
		}
		t.ex.count(t.s.c)
		if err == nil {
			t.succeeded(ctx, &a)
			return nil
		}
		r.inner, r.group = nil, nil
		again, err := t.judge(ctx, &a, err)
		if !again {
			return err
		}
		r.conn = t.s.c.Conn()
	}
}

// succeeded counts an execution and remembers on which server connection its name is.
func (t *tx) succeeded(ctx context.Context, a *attempt) {
	t.virgin, t.lost = false, nil // a loss before it was undone with a savepoint
	t.ex.succeeded(ctx, a)
	if isShared(a.strategy) {
		t.ex.shared.add(t.backend, a.d.Name())
	}
}

// phase is where in the transaction the next statement stands.
func (t *tx) phase() fallback.Phase {
	if t.virgin {
		return fallback.PhaseBegin
	}
	return fallback.PhaseInside
}

// judge decides what a failed statement means for the transaction. While nothing else of the transaction has run the statement is redone
// once, in one group with ROLLBACK and BEGIN in front. Later a lost statement is the transaction's end, reported as
// [*PreparedStatementError].
func (t *tx) judge(ctx context.Context, a *attempt, err error) (again bool, _ error) {
	if errors.Is(err, ErrStatementMode) {
		return false, err
	}
	if t.s.c.PgConn().IsBusy() {
		return false, err // rows or a batch are still open: nothing was sent, and what is open must not be rolled back
	}
	sent := a.stage != stageEncode
	untouched := !sent || (pgconn.SafeToRetry(err) && !t.s.c.PgConn().IsClosed())
	again, err = t.ex.judge(ctx, &t.s, a, t.phase(), err)
	t.disbelieve(a)
	if !again {
		t.virgin = t.virgin && untouched
		return false, t.fail(a, err)
	}
	if sent {
		t.pending = nil
		if t.s.c.PgConn().TxStatus() != 'I' {
			t.pending = append(t.pending, "rollback")
		}
		t.pending = append(t.pending, t.opening...)
		t.begun, t.backend = false, 0
	}
	return true, err
}

// disbelieve drops what is believed of the transaction's server connection, after a name was missing there: whoever took one took all.
func (t *tx) disbelieve(a *attempt) {
	if a.verdict.Reason == fallback.ReasonPreparedLost {
		t.ex.shared.forget(t.backend)
	}
}

// fail gives an error that ends the transaction the form its caller can act on.
func (t *tx) fail(a *attempt, err error) error {
	switch a.verdict.Reason {
	case fallback.ReasonStatementMode:
		return fmt.Errorf("%w: %w", ErrStatementMode, err)
	case fallback.ReasonPreparedLost, fallback.ReasonPoolerPrepared:
		var lost *PreparedStatementError
		if !errors.As(err, &lost) {
			lost = &PreparedStatementError{Reason: a.verdict.Reason, Name: a.verdict.Name, Err: err}
		}
		lost.InTx = true
		t.lost = lost
		return lost
	default:
		return err
	}
}
