package executor

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/fallback"
)

// Commit commits the transaction, with everything that was queued in the same round trip, and then runs the OnCommit functions. As in
// pgx, pgx.ErrTxClosed says that it had ended before, and pgx.ErrTxCommitRollback that the server rolled back a failed transaction.
// [ErrCommitUnknown] in the error says that COMMIT was sent and its outcome was not learnt.
func (t *tx) Commit(ctx context.Context) error {
	if t.closed {
		return pgx.ErrTxClosed
	}
	handOver(t.nested, true)
	t.nested = nil
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
	if !t.preamble.begun || t.s.gone() {
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
