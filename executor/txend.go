package executor

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/prepare"
)

// Commit commits the transaction, with everything that was queued in the same round trip, and then runs the OnCommit functions. As in
// pgx, pgx.ErrTxClosed says that it had ended before, and pgx.ErrTxCommitRollback that the server rolled back a failed transaction.
// [ErrCommitUnknown] in the error says that COMMIT was sent and its outcome was not learnt.
func (t *tx) Commit(ctx context.Context) error {
	if t.closed {
		return pgx.ErrTxClosed
	}
	if err := t.commitAndRelease(ctx); err != nil {
		return err
	}
	// Only now: a function may want a connection of its own, and the pool may have a single one.
	for _, f := range t.onCommit {
		f()
	}
	return nil
}

func (t *tx) commitAndRelease(ctx context.Context) error {
	defer t.release()
	return t.commit(ctx)
}

func (t *tx) commit(ctx context.Context) error {
	switch {
	case !t.begun && !t.virgin && t.s.c.PgConn().IsClosed():
		// A statement of the transaction is lost, with its BEGIN. The rest must not commit without it.
		return fmt.Errorf("executor: commit: %w", pgconn.ErrConnClosed)
	case !t.begun && !t.virgin:
		return fmt.Errorf("executor: commit: the transaction could not begin: %w", pgx.ErrTxCommitRollback)
	case !t.begun && len(t.queue) == 0:
		return nil // nothing was ever sent
	case len(t.queue) == 0, t.s.c.PgConn().TxStatus() == 'E':
		return t.commitAlone(ctx) // in a failed transaction it is a rollback, and the queue goes with it
	case t.opts.CommitQuery != "":
		// The caller's own may be several statements, which only a simple query can hold.
		if err := t.runQueue(ctx, &t.queue); err != nil {
			return t.commitEnd(ctx, &attempt{stage: stageEncode}, err)
		}
		return t.commitAlone(ctx)
	default:
		return t.commitQueue(ctx)
	}
}

// commitText is the statement that commits.
func (t *tx) commitText() string {
	if t.opts.CommitQuery != "" {
		return t.opts.CommitQuery
	}
	return "commit"
}

// commitAlone sends COMMIT by itself.
func (t *tx) commitAlone(ctx context.Context) error {
	traced, end := t.traceStart(ctx, t.commitText())
	tag, err := simpleExec(traced, t.s.c.PgConn(), t.commitText())
	end(tag, err)
	if err == nil && tag.String() == "ROLLBACK" {
		return pgx.ErrTxCommitRollback
	}
	if err == nil {
		return nil
	}
	return t.commitFailed(ctx, &attempt{stage: stageSent, runs: maxRuns}, fallback.PhaseCommit, err)
}

// commitQueue sends the queued statements and COMMIT in one flush. Alone in a transaction with default options they need no BEGIN and no
// COMMIT: PostgreSQL runs the Sync group as one implicit transaction.
func (t *tx) commitQueue(ctx context.Context) error {
	implicit := !t.begun && t.opts == (pgx.TxOptions{}) && !slices.ContainsFunc(t.queue, needsBlock)
	if !implicit && t.statementMode() {
		return ErrStatementMode
	}
	phase := fallback.PhaseCommit
	if !t.begun {
		phase = fallback.PhaseAlone // the group is the whole transaction
	}
	attempts := make([]attempt, len(t.queue))
	for i := range attempts {
		attempts[i].unnamed = t.unnamed
	}
	for {
		failed, err := t.sendQueue(ctx, attempts, implicit)
		t.ex.count(t.s.c)
		if err == nil {
			for i := range attempts {
				t.succeeded(ctx, &attempts[i])
			}
			return nil
		}
		if failed == nil {
			failed = &attempt{stage: stageSent, runs: maxRuns}
		}
		if failed.stage == stageLearn {
			phase = t.phase()
		}
		if phase == fallback.PhaseCommit && failed.stage != stageEncode {
			return t.commitFailed(ctx, failed, phase, err)
		}
		again, judged := t.ex.judge(ctx, &t.s, failed, phase, err)
		if !again {
			return t.commitEnd(ctx, failed, judged)
		}
		if failed.stage == stageEncode {
			continue // nothing of the group was sent
		}
		if t.s.c.PgConn().TxStatus() != 'I' {
			if _, err := simpleExec(ctx, t.s.c.PgConn(), "rollback"); err != nil {
				return err
			}
		}
		if failed.forced && failed.strategy == prepare.SharedParse {
			forceParse(attempts)
		}
		if !implicit {
			t.begun, t.pending = false, t.opening
		}
	}
}

// needsBlock reports whether a queued statement cannot run in an implicit transaction: what may commit on its way must not stand beside others
// there, and some are refused outside of BEGIN (25P01) or without effect.
func needsBlock(q call) bool {
	switch prepare.Keyword(q.sql) {
	case "lock", "savepoint", "release", "rollback", "declare", "set":
		return true
	}
	return mayCommit(q.sql)
}

// forceParse makes every shared statement of a group parse: where one name was missing the others may be too.
func forceParse(attempts []attempt) {
	for i := range attempts {
		if attempts[i].strategy == prepare.Shared {
			attempts[i].strategy, attempts[i].forced = prepare.SharedParse, true
		}
	}
}

// sendQueue is one attempt at the group of commitQueue. It returns the attempt that failed, nil when it was none of the queued statements.
func (t *tx) sendQueue(ctx context.Context, attempts []attempt, implicit bool) (*attempt, error) {
	c := t.s.c
	g := c.NewGroup()
	texts := 0
	for i := range t.queue {
		q, a := &t.queue[i], &attempts[i]
		if err := q.rewrite(ctx, c.Conn()); err != nil {
			return &attempt{stage: stageEncode, fresh: true}, err
		}
		if err := t.prepareAttempt(ctx, q, a, !implicit); err != nil {
			return a, err
		}
		a.stage = stageEncode
	}
	if !implicit {
		for _, text := range t.pending {
			g.AddText(text)
			texts++
		}
	}
	for i := range t.queue {
		a := &attempts[i]
		if err := addAsChosen(g, t.ex.execution(c, &t.queue[i], a)); err != nil {
			return a, err
		}
	}
	if !implicit {
		g.AddText(t.commitText())
	}
	for i := range attempts {
		attempts[i].stage = stageSent
	}
	t.traceQueue(ctx, implicit)
	if err := g.Send(ctx); err != nil {
		_ = g.Close()
		return nil, err
	}
	return t.readQueue(ctx, g, attempts, texts, implicit)
}

// readQueue reads the group's results.
func (t *tx) readQueue(ctx context.Context, g *prepare.Group, attempts []attempt, texts int, implicit bool) (*attempt, error) {
	var tag pgconn.CommandTag
	var err error
	for i := 0; err == nil && i < g.Len(); i++ {
		rr, nextErr := g.Next()
		if err = nextErr; err == nil {
			tag, err = rr.Close()
		}
		if err != nil {
			_ = g.Close()
			if k := i - texts; k >= 0 && k < len(attempts) {
				return &attempts[k], err
			}
			return nil, err
		}
	}
	if err := g.Close(); err != nil {
		return nil, err // a deferred constraint, at the end of an implicit transaction
	}
	if !implicit {
		t.begun, t.pending = true, nil
		if tag.String() == "ROLLBACK" {
			return nil, pgx.ErrTxCommitRollback
		}
	}
	return nil, nil
}

// traceQueue shows the queued statements to the tracer.
func (t *tx) traceQueue(ctx context.Context, implicit bool) {
	tracer := t.s.c.QueryTracer()
	if tracer == nil {
		return
	}
	if !implicit {
		t.traceBegin(ctx)
	}
	for i := range t.queue {
		qctx := tracer.TraceQueryStart(ctx, t.s.c.Conn(), pgx.TraceQueryStartData{SQL: t.queue[i].sql, Args: t.queue[i].given})
		tracer.TraceQueryEnd(qctx, t.s.c.Conn(), pgx.TraceQueryEndData{})
	}
	if !implicit {
		t.traceText(ctx, t.commitText(), "COMMIT", nil)
	}
}

// commitFailed judges a failed group that carried COMMIT.
func (t *tx) commitFailed(ctx context.Context, a *attempt, phase fallback.Phase, err error) error {
	if errors.Is(err, pgx.ErrTxCommitRollback) {
		return err
	}
	_, err = t.ex.judge(ctx, &t.s, a, phase, err)
	t.disbelieve(a)
	return t.commitEnd(ctx, a, err)
}

// commitEnd leaves the connection without a transaction and names what is not known.
func (t *tx) commitEnd(ctx context.Context, a *attempt, err error) error {
	if a.stage == stageSent && a.verdict.OutcomeUnknown() {
		return fmt.Errorf("%w: %w", ErrCommitUnknown, err)
	}
	if pg := t.s.c.PgConn(); !pg.IsClosed() && pg.TxStatus() != 'I' {
		// A statement of the group failed, so COMMIT was skipped.
		last, cancel := lastWords(ctx)
		defer cancel()
		if _, rollbackErr := simpleExec(last, pg, "rollback"); rollbackErr != nil {
			_ = pg.Close(ctx)
		}
	}
	return t.fail(a, err)
}

// rollbackPatience is how long a ROLLBACK may take that the caller's context does not bound.
const rollbackPatience = 5 * time.Second

// lastWords is the context of a ROLLBACK that ends a transaction: ctx may be what ended it, and the ROLLBACK has to go out all the same. A
// server that does not answer must not keep the caller; then the connection is closed.
func lastWords(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), rollbackPatience)
}

// Rollback rolls the transaction back and drops what was queued, as in pgx. pgx.ErrTxClosed says that it had ended before.
func (t *tx) Rollback(ctx context.Context) error {
	if t.closed {
		return pgx.ErrTxClosed
	}
	defer t.release()
	t.queue, t.onCommit = nil, nil
	if !t.begun || t.s.pooled == nil {
		return nil
	}
	pg := t.s.c.PgConn()
	traced, end := t.traceStart(ctx, "rollback")
	tag, err := simpleExec(traced, pg, "rollback")
	end(tag, err)
	if err != nil {
		// The connection's state is not known; the pool must not lend it again.
		_ = pg.Close(ctx)
	}
	return err
}
