package executor

import (
	"context"

	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/internal/selector"
	"github.com/bounceproof/bounceproof/internal/statement"
)

// item is one statement of several that are sent in one group: a batch's, or a queue's.
type item struct {
	q    *call
	a    attempt
	text bool // goes as it is, without being learnt
}

// items are sent together, under one decision and in one way: what one of them taught holds for the others too.
type items []item

// decide looks all statements up and asks for the decision that they are sent under.
func (is items) decide(ctx context.Context, ex *Executor, c *statement.Conn) *selector.Decision {
	stable := false
	for i := range is {
		if it := &is[i]; !it.text {
			stable = ex.lookup(c, it.q, &it.a).Stable() || stable
		}
	}
	return ex.decide(ctx, c, stable)
}

// learn asks in one round trip, with begin in front, for the descriptions that are missing, and those that have become old. It reports whether it
// has sent anything, and returns the attempt that failed.
func (is items) learn(ctx context.Context, ex *Executor, c *statement.Conn, begin *[]string) (sent bool, failed *attempt, err error) {
	var missing []*statement.Statement
	var whose []*attempt
	var seen map[*statement.Statement]bool
	idle := c.PgConn().TxStatus() == 'I'
	for i := range is {
		a := &is[i].a
		switch {
		case is[i].text:
			continue
		case seen[a.st]:
			a.fresh = true
			continue
		case a.st.Description() != nil && !a.st.LearntBefore(a.since) && (!idle || !a.st.NeedsRefresh(descriptionAge)):
			continue
		}
		a.fresh, a.stage = true, stageLearn
		if seen == nil {
			seen = make(map[*statement.Statement]bool)
		}
		seen[a.st] = true
		missing, whose = append(missing, a.st), append(whose, a)
	}
	if len(missing) == 0 {
		return false, nil, nil
	}
	learnt, err := c.LearnAll(ctx, missing, begin)
	ex.countMessages(c)
	if err != nil {
		failed = whose[min(len(learnt), len(whose)-1)]
		failed.runs++ // prepareAttempt counts the others
	}
	return true, failed, err
}

// sent notes that nothing of the items can be taken back any more.
func (is items) sent() {
	for i := range is {
		is[i].a.stage = stageSent
	}
}

// beside tells the others of one that failed, after its failure and before all are sent again. What a migration has overtaken is taken back for all
// ([Executor.invalidateBeside]). Where one name was missing the others may be too, and they are in the same request: they go the way that the
// failed one is to go. What goes without a name anyway stays as it is, but keeps that: it may have gone so for want of a place.
func (is items) beside(ex *Executor, c *statement.Conn, failed *attempt) {
	for i := range is {
		a := &is[i].a
		if is[i].text || a == failed {
			continue
		}
		ex.invalidateBeside(c, a, failed)
		if failed.forced && (failed.strategy == fallback.Unprepared || a.strategy == fallback.Named || a.strategy == fallback.Shared) {
			a.strategy, a.parse, a.forced = failed.strategy, failed.parse, true
		}
	}
}

// at returns the attempt of item i, nil for a text and beyond the ends.
func (is items) at(i int) *attempt {
	if i < 0 || i >= len(is) || is[i].text {
		return nil
	}
	return &is[i].a
}

// add puts the attempt into a group. Where the group has no place for its Parse it goes without a name.
func (a *attempt) add(g *statement.Group, e statement.Execution) error {
	if err := g.Add(e); err != nil {
		return err
	}
	if s := g.Strategy(g.Len() - 1); s != a.strategy {
		a.strategy, a.parse = s, false
	}
	return nil
}
