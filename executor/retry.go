package executor

import (
	"context"
	"errors"

	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/internal/selector"
)

// maxRuns bounds how often a statement is sent. Two is the rule; the third is for a statement that fails for another reason than the first
// time, as when a migration and a lost statement meet.
const maxRuns = 3

// task is something that may have to be sent again: a statement, the queue that rides with COMMIT, a batch.
type task interface {
	// try sends it and reads until the caller can be given something, or the end. It returns the attempt that failed, nil when the failure
	// is that of no statement.
	try(ctx context.Context) (failed *attempt, err error)
	// retry decides after a failure whether try is called again, and prepares that. The error is the caller's if it is not.
	retry(ctx context.Context, failed *attempt, err error) (again bool, _ error)
	// succeeded takes note that try has succeeded.
	succeeded(ctx context.Context)
}

// run sends a task until it succeeds or must not be sent again. It is the only loop of its kind: how often something is sent, and that what
// may have run is not, is decided in [Executor.decideRetry].
func (ex *Executor) run(ctx context.Context, s *session, t task) error {
	for {
		failed, err := t.try(ctx)
		err = inOrder(s.c, err)
		ex.countMessages(s.c)
		if err == nil {
			t.succeeded(ctx)
			return nil
		}
		again, err := t.retry(ctx, failed, err)
		if !again {
			return err
		}
	}
}

// decideRetry decides after a failed attempt whether the statement is run again, and prepares that: what proved wrong is invalidated, the
// selector hears of it, and a dead connection is replaced. Only what provably did not execute is run again. The error is what the caller gets
// if it is not.
func (ex *Executor) decideRetry(ctx context.Context, s *session, a *attempt, phase fallback.Phase, err error) (again bool, _ error) {
	if a.stage == stageEncode {
		// Nothing was sent. A description that a migration has overtaken refuses good arguments too.
		a.verdict = fallback.Verdict{}
		if a.fresh || a.runs >= maxRuns {
			return false, err
		}
		a.st.Forget(a.d)
		if phase == fallback.PhaseInside || s.c.PgConn().IsBusy() {
			return false, err // to learn may fail, and must not end a sound transaction; the next use learns
		}
		return true, err
	}
	err = inOrder(s.c, err) // also what was read after the error, to the end of its group
	before := a.verdict
	a.verdict = fallback.Classify(err, ex.classifyContext(ctx, s, a, phase))
	v := a.verdict
	err = poolerBusy(err)
	if a.stage == stageLearn && v.Executed == fallback.Maybe && v.Reason != fallback.ReasonUnknown {
		v.Executed = fallback.No // a Parse executes nothing
	}
	ex.selector.Observe(ctx, a.decided(ex), v)
	if a.d != nil {
		ex.invalidate(ctx, s.c, a, v)
	}
	if isLost(v) && ex.cfg.PreparedStatements == On {
		return false, &PreparedStatementError{Reason: v.Reason, Name: v.Name, Err: err}
	}
	if isLost(v) && a.strategy == fallback.Shared && a.parse && (v.Action == fallback.Reparse || v.Action == fallback.RunUnprepared) {
		v.Action, before.Reason = fallback.RunUnprepared, fallback.ReasonNone // parsing it once more would fail the same way
	}
	if v.Executed != fallback.No || a.runs >= maxRuns || (a.runs > 1 && v.Reason == before.Reason) {
		return false, err
	}
	switch v.Action {
	case fallback.RunUnprepared:
		a.strategy, a.parse, a.forced = fallback.Unprepared, false, true
	case fallback.Reparse:
		a.strategy, a.parse, a.forced = fallback.Shared, true, true
	case fallback.Relearn, fallback.RunElsewhere:
		// The same way, forced if it was: what an earlier failure taught holds for other types and on another connection too. A name that
		// was missing on one server after a migration is missing, or stale, on the next one as well.
	case fallback.Return, fallback.RunLater, fallback.RerunTx:
		return false, err
	}
	if v.Connection == fallback.Dead {
		if s.lent {
			return false, err
		}
		if replaceErr := ex.replace(ctx, s); replaceErr != nil {
			return false, errors.Join(err, replaceErr)
		}
	}
	ex.counters.retries.Add(1)
	ex.cfg.Trace.retried(v.Reason, v.Name)
	return true, err
}

// isLost reports whether a prepared statement was lost.
func isLost(v fallback.Verdict) bool {
	return v.Reason == fallback.ReasonPreparedLost || v.Reason == fallback.ReasonPoolerPrepared
}

// overtaken reports whether a statement was refused because a migration has overtaken its plan or its description.
func overtaken(v fallback.Verdict) bool {
	return v.Executed == fallback.No && (v.Reason == fallback.ReasonStalePlan || v.Reason == fallback.ReasonStaleShape)
}

// classifyContext is what the executor knows of a failed attempt.
func (ex *Executor) classifyContext(ctx context.Context, s *session, a *attempt, phase fallback.Phase) fallback.Context {
	c := fallback.Context{
		Strategy: a.strategy, Topology: a.decided(ex).Topology, Phase: phase,
		Alive: !s.c.PgConn().IsClosed(), CtxErr: ctx.Err(), Learnt: !a.fresh,
	}
	if a.d != nil {
		c.ParamOIDs, c.Columns = a.d.ParamOIDs(), len(a.d.Fields())
		if a.strategy == fallback.Named || a.strategy == fallback.Shared {
			c.Name, c.Text = a.d.Name(), a.d.SQL()
		}
	}
	if a.stage == stageLearn {
		c.Strategy, c.Name, c.Learnt = fallback.Unprepared, "", false
	}
	return c
}

// decided is the decision the attempt ran under. An attempt that failed while it learnt had not asked for one.
func (a *attempt) decided(ex *Executor) *selector.Decision {
	if a.decision != nil {
		return a.decision
	}
	return ex.selector.Decision()
}
