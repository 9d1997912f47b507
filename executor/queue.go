package executor

import (
	"context"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/internal/sqltext"
	"github.com/bounceproof/bounceproof/internal/statement"
)

// commitQueue sends the queued statements and COMMIT in one flush. Alone in a transaction with default options they need no BEGIN and no
// COMMIT: PostgreSQL runs the Sync group as one implicit transaction.
func (t *tx) commitQueue(ctx context.Context) error {
	m := queueCommit{t: t, items: make(items, len(t.queue)), phase: fallback.PhaseCommit}
	for i := range m.items {
		it := &m.items[i]
		it.q, it.a.unnamed, it.a.since, it.a.path = &t.queue[i], t.second != 0, t.second, t.path
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
	items    items
	phase    fallback.Phase
	implicit bool // no BEGIN and no COMMIT
}

// succeeded implements [task].
func (m *queueCommit) succeeded(ctx context.Context) {
	for i := range m.items {
		m.t.succeeded(ctx, &m.items[i].a)
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
	m.items.beside(t.ex, t.s.c, failed)
	if !m.implicit {
		t.preamble.restart(false)
	}
	return true, nil
}

// try implements [task]. The attempt that failed is nil when it was none of the queued statements.
func (m *queueCommit) try(ctx context.Context) (*attempt, error) {
	t, c := m.t, m.t.s.c
	g := c.NewGroup()
	texts := 0
	for i := range m.items {
		if err := m.items[i].q.rewrite(ctx, c.Conn()); err != nil {
			return &attempt{stage: stageEncode, fresh: true}, err
		}
	}
	decision := m.items.decide(ctx, t.ex, c)
	if failed, err := m.learn(ctx); err != nil {
		return failed, err
	}
	for i := range m.items {
		it := &m.items[i]
		if err := t.prepareAttempt(ctx, it.q, &it.a, decision, !m.implicit); err != nil {
			return &it.a, err
		}
		it.a.stage = stageEncode
	}
	if !m.implicit {
		for _, text := range t.preamble.unsent {
			g.AddText(text)
			texts++
		}
	}
	forgotten := false
	for i := range m.items {
		it := &m.items[i]
		forgotten = it.a.behind(forgotten)
		if err := it.a.add(g, t.ex.execution(c, it.q, &it.a)); err != nil {
			return &it.a, err
		}
	}
	m.items.sent()
	m.trace(ctx)
	if !t.preamble.unused {
		// A rewriter, an encoder or a tracer may have run a statement in the transaction meanwhile.
		m.implicit, m.phase = false, fallback.PhaseCommit
	}
	if !m.implicit {
		t.traceText(ctx, t.commitText(), "COMMIT", nil)
		g.AddText(t.commitText())
	}
	if err := g.Send(ctx); err != nil {
		_ = g.Close()
		return nil, err
	}
	return m.read(g, texts)
}

// learn asks for all descriptions that are missing in one round trip.
func (m *queueCommit) learn(ctx context.Context) (*attempt, error) {
	t := m.t
	var begin *[]string
	if !m.implicit {
		begin = &t.preamble.unsent
	}
	sent, failed, err := m.items.learn(ctx, t.ex, t.s.c, begin)
	if sent && !m.implicit {
		t.sent(err)
	}
	return failed, err
}

// read reads the group's results, those of the texts in front first.
func (m *queueCommit) read(g *statement.Group, texts int) (*attempt, error) {
	var tag pgconn.CommandTag
	var err error
	for i := 0; err == nil && i < g.Len(); i++ {
		failed := i
		rr, nextErr := g.Next()
		if err = nextErr; err == nil {
			tag, err = rr.Close()
		} else {
			failed = g.Failed()
		}
		if err != nil {
			_ = g.Close()
			return m.items.at(failed - texts), err
		}
	}
	if err := g.Close(); err != nil {
		return nil, err // a deferred constraint, at the end of an implicit transaction
	}
	if !m.implicit {
		m.t.preamble.arrived()
		if tag.String() == "ROLLBACK" {
			return nil, pgx.ErrTxCommitRollback
		}
	}
	return nil, nil
}

// trace shows the queued statements to the tracer.
func (m *queueCommit) trace(ctx context.Context) {
	t := m.t
	tracer := t.s.c.QueryTracer()
	if tracer == nil {
		return
	}
	if !m.implicit {
		t.traceBegin(ctx)
	}
	for i := range m.items {
		q := m.items[i].q
		qctx := tracer.TraceQueryStart(ctx, t.s.c.Conn(), pgx.TraceQueryStartData{SQL: q.givenSQL, Args: q.given})
		tracer.TraceQueryEnd(qctx, t.s.c.Conn(), pgx.TraceQueryEndData{})
	}
}
