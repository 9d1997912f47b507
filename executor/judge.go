package executor

import (
	"context"
	"errors"

	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/prepare"
)

// maxRuns bounds how often a statement is sent. Two is the rule; the third is for a statement that fails for another reason than the first
// time, as when a migration and a lost statement meet.
const maxRuns = 3

// judge decides after a failed attempt whether the statement is run again, and prepares that: it forgets what proved wrong, tells the latch,
// and replaces a dead connection. Only what provably did not execute is run again. The error is what the caller gets if it is not.
func (ex *Executor) judge(ctx context.Context, s *session, a *attempt, phase fallback.Phase, err error) (again bool, _ error) {
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
		a.forced = false
		return true, err
	}
	before := a.verdict
	a.verdict = fallback.Classify(err, ex.context(ctx, s, a, phase))
	v := a.verdict
	if a.stage == stageLearn && v.Executed == fallback.Maybe && v.Reason != fallback.ReasonUnknown {
		v.Executed = fallback.No // a Parse executes nothing
	}
	lost := v.Reason == fallback.ReasonPreparedLost || v.Reason == fallback.ReasonPoolerPrepared
	ex.latch.Trip(ctx, a.decided(ex), v)
	if a.d != nil {
		ex.correct(ctx, s, a, v)
	}
	if lost && ex.cfg.PreparedStatements == On {
		return false, &PreparedStatementError{Reason: v.Reason, Name: v.Name, Err: err}
	}
	if v.Executed != fallback.No || a.runs >= maxRuns || (a.runs > 1 && v.Reason == before.Reason) {
		return false, err
	}
	switch v.Action {
	case fallback.RunUnprepared:
		a.strategy, a.forced = prepare.Unprepared, true
	case fallback.Reparse:
		a.strategy, a.forced = prepare.SharedParse, true
	case fallback.Relearn, fallback.NextGeneration:
		a.forced = false
	case fallback.RunElsewhere:
		// The same way: what an earlier failure taught holds on another connection too.
	case fallback.Return, fallback.RunLater, fallback.RerunTx:
		return false, err
	}
	if v.Connection == fallback.Dead {
		if replaceErr := ex.replace(ctx, s); replaceErr != nil {
			return false, errors.Join(err, replaceErr)
		}
	}
	ex.counters.retries.Add(1)
	ex.cfg.Trace.retried(v.Reason, v.Name)
	return true, err
}

// context is what the executor knows of a failed attempt.
func (ex *Executor) context(ctx context.Context, s *session, a *attempt, phase fallback.Phase) fallback.Context {
	c := fallback.Context{
		Strategy: classOf(a.strategy), Topology: a.decided(ex).Topology, Phase: phase,
		Alive: !s.c.PgConn().IsClosed(), CtxErr: ctx.Err(), Learnt: !a.fresh,
	}
	if a.d != nil {
		c.ParamOIDs, c.Columns = a.d.ParamOIDs(), len(a.d.Fields())
		if a.strategy != prepare.Unprepared {
			c.Name = a.d.Name()
		}
	}
	if a.stage == stageLearn {
		c.Strategy, c.Name, c.Learnt = fallback.Unprepared, "", false
	}
	return c
}

// decided is the decision the attempt ran under. An attempt that failed while it learnt had not asked for one.
func (a *attempt) decided(ex *Executor) *fallback.Decision {
	if a.decision != nil {
		return a.decision
	}
	return ex.latch.Decision()
}

// classOf names a wire strategy in the terms of package fallback.
func classOf(s prepare.Strategy) fallback.Strategy {
	switch s {
	case prepare.Named:
		return fallback.Named
	case prepare.Shared, prepare.SharedParse:
		return fallback.Shared
	case prepare.Unprepared:
	}
	return fallback.Unprepared
}

// correct takes back what the error proved wrong: about the name on this connection, or about the text for everybody.
func (ex *Executor) correct(ctx context.Context, s *session, a *attempt, v fallback.Verdict) {
	switch v.Reason { //nolint:exhaustive // the others prove nothing about a statement
	case fallback.ReasonPreparedLost, fallback.ReasonPoolerPrepared:
		s.c.Forget(a.d.Name())
		if a.strategy == prepare.Shared {
			ex.counters.misses.Add(1)
			ex.latch.Count(ctx, a.decision, true)
		}
	case fallback.ReasonStalePlan:
		s.c.Forget(a.d.Name())
		if !a.decision.Pooled {
			// Close and Parse cure it here, and the result has changed: learn again.
			a.st.Forget(a.d)
		} else {
			a.st.NextGeneration(a.d)
		}
	case fallback.ReasonStaleShape:
		s.c.Forget(a.d.Name())
		a.st.Forget(a.d)
	case fallback.ReasonNone:
		// PostgreSQL 13 does not say of a value it cannot read that it is an argument's, so the statement may have run and is not run
		// again. If it was the description that is stale, the caller's next try learns a new one.
		if v.PgError != nil && mayBeStale(v.PgError.Code) {
			a.st.Forget(a.d)
		}
	}
}

// mayBeStale reports whether an error that proves nothing may come from a description that a migration has overtaken: a value that is none of
// the type it was learnt with, or a result type that has no binary form.
func mayBeStale(code string) bool {
	switch code {
	case "22P02", "22P03", "22003", "22007", "22008", "22023", "42883":
		return true
	}
	return false
}
