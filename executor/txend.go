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
	"github.com/bounceproof/bounceproof/internal/sqltext"
	"github.com/bounceproof/bounceproof/internal/statement"
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
	case !t.preamble.begun && !t.preamble.unused && t.s.c.PgConn().IsClosed():
		// A statement of the transaction is lost, with its BEGIN. The rest must not commit without it.
		return fmt.Errorf("executor: commit: %w", pgconn.ErrConnClosed)
	case !t.preamble.begun && !t.preamble.unused:
		return fmt.Errorf("executor: commit: the transaction could not begin: %w", pgx.ErrTxCommitRollback)
	case !t.preamble.begun && len(t.queue) == 0:
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
	m := queueCommit{t: t, attempts: make([]attempt, len(t.queue)), phase: fallback.PhaseCommit}
	for i := range m.attempts {
		m.attempts[i].unnamed = t.unnamed
	}
	m.implicit = !t.preamble.begun && t.opts == (pgx.TxOptions{}) && !slices.ContainsFunc(t.queue, needsBlock)
	if !m.implicit && t.statementMode() {
		return ErrStatementMode
	}
	if !t.preamble.begun {
		m.phase = fallback.PhaseAlone // the group is the whole transaction
	}
	return t.ex.run(ctx, &t.s, &m)
}

// needsBlock reports whether a queued statement cannot run in an implicit transaction: what may commit on its way must not stand beside others
// there, and some are refused outside of BEGIN (25P01) or without effect.
func needsBlock(q call) bool {
	return sqltext.Of(q.sql)&(sqltext.NeedsBlock|sqltext.MayCommit) != 0
}

// queueCommit is the queue of a transaction on its way, with COMMIT. It is a [task].
type queueCommit struct {
	t        *tx
	attempts []attempt
	phase    fallback.Phase
	implicit bool // no BEGIN and no COMMIT
}

// try implements [task].
func (m *queueCommit) try(ctx context.Context) (*attempt, error) {
	return m.t.sendQueue(ctx, m.attempts, m.implicit)
}

// succeeded implements [task].
func (m *queueCommit) succeeded(ctx context.Context) {
	for i := range m.attempts {
		m.t.succeeded(ctx, &m.attempts[i])
	}
}

// retry implements [task].
func (m *queueCommit) retry(ctx context.Context, failed *attempt, err error) (bool, error) {
	t := m.t
	if failed == nil {
		failed = &attempt{stage: stageSent, runs: maxRuns}
	}
	if failed.stage == stageLearn {
		m.phase = t.phase()
	}
	if m.phase == fallback.PhaseCommit && failed.stage != stageEncode {
		return false, t.commitFailed(ctx, failed, m.phase, err)
	}
	again, err := t.ex.decideRetry(ctx, &t.s, failed, m.phase, err)
	if !again {
		return false, t.commitEnd(ctx, failed, err)
	}
	if failed.stage == stageEncode {
		return true, nil // nothing of the group was sent
	}
	if t.s.c.PgConn().TxStatus() != 'I' {
		if _, err := simpleExec(ctx, t.s.c.PgConn(), "rollback"); err != nil {
			return false, err
		}
	}
	if failed.forced && failed.strategy == fallback.Shared {
		// Where one name was missing the others may be too.
		for i := range m.attempts {
			if a := &m.attempts[i]; a.strategy == fallback.Shared {
				a.parse, a.forced = true, true
			}
		}
	}
	if !m.implicit {
		t.preamble.restart(false)
	}
	return true, nil
}

// sendQueue is one attempt at the group of commitQueue. It returns the attempt that failed, nil when it was none of the queued statements.
func (t *tx) sendQueue(ctx context.Context, attempts []attempt, implicit bool) (*attempt, error) {
	c := t.s.c
	g := c.NewGroup()
	texts := 0
	stable := false
	for i := range t.queue {
		q, a := &t.queue[i], &attempts[i]
		if err := q.rewrite(ctx, c.Conn()); err != nil {
			return &attempt{stage: stageEncode, fresh: true}, err
		}
		stable = t.ex.lookup(c, q, a).Stable() || stable
	}
	decision := t.ex.decide(ctx, c, stable)
	for i := range t.queue {
		q, a := &t.queue[i], &attempts[i]
		if err := t.prepareAttempt(ctx, q, a, decision, !implicit); err != nil {
			return a, err
		}
		a.stage = stageEncode
	}
	if !implicit {
		for _, text := range t.preamble.unsent {
			g.AddText(text)
			texts++
		}
	}
	for i := range t.queue {
		a := &attempts[i]
		if err := g.Add(t.ex.execution(c, &t.queue[i], a)); err != nil {
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
func (t *tx) readQueue(ctx context.Context, g *statement.Group, attempts []attempt, texts int, implicit bool) (*attempt, error) {
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
		t.preamble.arrived()
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

// commitFailed takes the error of a failed group that carried COMMIT.
func (t *tx) commitFailed(ctx context.Context, a *attempt, phase fallback.Phase, err error) error {
	if errors.Is(err, pgx.ErrTxCommitRollback) {
		return err
	}
	_, err = t.ex.decideRetry(ctx, &t.s, a, phase, err)
	t.forgetBackend(a)
	return t.commitEnd(ctx, a, err)
}

// commitEnd leaves the connection without a transaction and names what is not known.
func (t *tx) commitEnd(ctx context.Context, a *attempt, err error) error {
	if a.stage == stageSent && a.verdict.OutcomeUnknown() {
		return fmt.Errorf("%w: %w", ErrCommitUnknown, err)
	}
	if pg := t.s.c.PgConn(); !pg.IsClosed() && pg.TxStatus() != 'I' {
		// A statement of the group failed, so COMMIT was skipped.
		rollbackCtx, cancel := rollbackContext(ctx)
		defer cancel()
		if _, rollbackErr := simpleExec(rollbackCtx, pg, "rollback"); rollbackErr != nil {
			_ = pg.Close(ctx)
		}
	}
	return t.fail(a, err)
}

// rollbackTimeout is how long a ROLLBACK may take that the caller's context does not bound.
const rollbackTimeout = 5 * time.Second

// rollbackContext is the context of a ROLLBACK that ends a transaction: ctx may be what ended it, and the ROLLBACK has to go out all the same. A
// server that does not answer must not keep the caller; then the connection is closed.
func rollbackContext(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)
}

// Rollback rolls the transaction back and drops what was queued, as in pgx. pgx.ErrTxClosed says that it had ended before.
func (t *tx) Rollback(ctx context.Context) error {
	if t.closed {
		return pgx.ErrTxClosed
	}
	defer t.release()
	t.queue, t.onCommit = nil, nil
	if !t.preamble.begun || t.s.pooled == nil {
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
