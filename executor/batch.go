package executor

import (
	"context"
	"errors"
	"reflect"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/prepare"
)

// SendBatch sends all queued queries in one flush, as pgxpool.Pool.SendBatch does, after learning the texts the executor does not know in
// one round trip more. Items take prepare.Stable and a QueryRewriter as leading arguments. Batch.BeginTx is honoured: the transaction of
// BatchResults.Tx is a [Tx].
//
// A batch is run again unseen, once, when a prepared statement was lost, as long as no result has reached the caller and no item is
// transaction control. That covers a failure of the first item, and with Close as the only call any item's.
func (ex *Executor) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	opts, begins := batchTx(b)
	if begins {
		if ex.statementMode() {
			return pgx.FailedBatchResults(b, ErrStatementMode)
		}
		t, err := ex.newTx(ctx, opts)
		if err != nil {
			return pgx.FailedBatchResults(b, err)
		}
		// The batch's first item is BEGIN itself, and the batch is no first statement that could be redone.
		t.opening, t.pending, t.unshown, t.virgin = nil, nil, nil, false
		br := &batchResults{ex: ex, t: t, begins: true, s: &t.s, b: b, ctx: ctx}
		br.start()
		return br
	}
	s, err := ex.acquire(ctx)
	if err != nil {
		return pgx.FailedBatchResults(b, err)
	}
	br := &batchResults{ex: ex, s: &s, b: b, ctx: ctx}
	br.start()
	return br
}

// SendBatch sends a batch in the transaction, as in pgx.
func (t *tx) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	return t.sendBatch(ctx, t.scope(nil), b)
}

func (t *tx) sendBatch(ctx context.Context, queue *[]call, b *pgx.Batch) pgx.BatchResults {
	_, begins := batchTx(b)
	switch {
	case t.closed:
		return pgx.FailedBatchResults(b, pgx.ErrTxClosed)
	case begins:
		return pgx.FailedBatchResults(b, errors.New("Batch.BeginTx cannot be used within a transaction"))
	case t.statementMode():
		return pgx.FailedBatchResults(b, ErrStatementMode)
	}
	for _, item := range b.QueuedQueries {
		if err := t.beforeText(ctx, queue, item.SQL, false); err != nil {
			return pgx.FailedBatchResults(b, err)
		}
	}
	t.traceBegin(ctx)
	br := &batchResults{ex: t.ex, t: t, s: &t.s, b: b, ctx: ctx}
	br.start()
	return br
}

// batchTx returns the options that Batch.BeginTx was called with. pgx keeps them to itself; reading them by reflection is the only way to
// honour the call, and a pgx that renames the field makes the test of BeginTx fail.
func batchTx(b *pgx.Batch) (opts pgx.TxOptions, begins bool) {
	f := reflect.ValueOf(b).Elem().FieldByName("txOptions")
	if !f.IsValid() || f.IsNil() {
		return opts, false
	}
	opts.BeginQuery = b.QueuedQueries[0].SQL
	opts.CommitQuery = f.Elem().FieldByName("CommitQuery").String()
	return opts, true
}

// batchItem is one query of a batch; a text goes as it is, without being learnt.
type batchItem struct {
	q    call
	a    attempt
	text bool
}

// batchResults are the results of a batch. Not safe for concurrent use.
type batchResults struct {
	ex     *Executor
	t      *tx // nil outside a transaction
	begins bool
	tries  int // how often it was sent, or tried to be
	s      *session
	b      *pgx.Batch
	ctx    context.Context
	tracer pgx.BatchTracer

	items     []batchItem
	g         *prepare.Group
	first     *pgconn.ResultReader // the first result, read ahead
	last      *rows                // the rows handed out last
	next      int                  // the item whose result is next
	delivered bool                 // a result has reached the caller
	control   bool                 // an item is transaction control, or may commit
	err       error
	closed    bool
}

var _ pgx.BatchResults = (*batchResults)(nil)

// start sends the batch and reads up to the first result, at most twice.
func (br *batchResults) start() {
	if len(br.b.QueuedQueries) == 0 {
		return // not traced, as in pgx
	}
	if br.tracer = br.s.c.BatchTracer(); br.tracer != nil {
		br.ctx = br.tracer.TraceBatchStart(br.ctx, br.s.c.Conn(), pgx.TraceBatchStartData{Batch: br.b})
	}
	br.items = make([]batchItem, len(br.b.QueuedQueries))
	for i, item := range br.b.QueuedQueries {
		it := &br.items[i]
		it.q = readCall(item.SQL, item.Arguments)
		if err := it.q.rewrite(br.ctx, br.s.c.Conn()); err != nil {
			br.fail(err)
			return
		}
		if br.t != nil {
			it.q.sql = br.t.alias(it.q.sql)
			it.a.unnamed = br.t.unnamed
		}
		it.text = len(it.q.args) == 0 && isControl(it.q.sql)
		br.control = br.control || it.text || mayCommit(it.q.sql)
	}
	for {
		failed, err := br.send()
		if err == nil {
			br.first, err = br.g.Next()
			failed = br.attemptAt(0)
			br.ex.count(br.s.c)
		}
		if err == nil {
			return
		}
		if !br.again(failed, err) {
			return
		}
	}
}

// attemptAt returns the attempt of item i, nil for a text and beyond the end.
func (br *batchResults) attemptAt(i int) *attempt {
	if i < 0 || i >= len(br.items) || br.items[i].text {
		return nil
	}
	return &br.items[i].a
}

// again judges a failure and reports whether the batch is to be sent once more; if not, the failure is kept.
func (br *batchResults) again(failed *attempt, err error) bool {
	if br.g != nil {
		_ = br.g.Close()
		br.g = nil
		if br.t != nil {
			br.t.sent(err)
		}
	}
	br.first = nil
	if br.tries++; failed == nil || br.tries >= maxRuns {
		last := attempt{stage: stageSent}
		if failed != nil {
			last = *failed
		}
		last.runs = maxRuns
		failed = &last
	}
	phase := fallback.PhaseAlone
	switch {
	case br.t != nil && (br.t.begun || !br.begins):
		phase = br.t.phase()
	case br.control:
		phase = fallback.PhaseInside
	}
	if phase == fallback.PhaseBegin || br.begins {
		phase = fallback.PhaseInside // only a single first statement is redone
	}
	again, err := br.ex.judge(br.ctx, br.s, failed, phase, err)
	if !again {
		if br.t != nil {
			br.t.virgin = false
			err = br.t.fail(failed, err)
		}
		br.fail(err)
		return false
	}
	if failed.forced {
		for i := range br.items {
			if a := &br.items[i].a; a.strategy != prepare.Unprepared {
				a.strategy, a.forced = failed.strategy, true
			}
		}
	}
	return true
}

// send learns what is not known, fills the group and flushes it. It returns the attempt that failed.
func (br *batchResults) send() (*attempt, error) {
	c := br.s.c
	if a, err := br.learn(); err != nil {
		return a, err
	}
	g := c.NewGroup()
	if br.t != nil {
		for _, text := range br.t.pending {
			g.AddText(text)
		}
	}
	for i := range br.items {
		it := &br.items[i]
		if it.text {
			g.AddText(it.q.sql)
			continue
		}
		it.a.stage = stageLearn
		if err := br.ex.prepareAttempt(br.ctx, c, &it.q, &it.a, nil); err != nil {
			return &it.a, err
		}
		it.a.stage = stageEncode
		e := br.ex.execution(c, &it.q, &it.a)
		e.Reparse = br.reparse(i, &it.a)
		if err := g.Add(e); err != nil {
			return &it.a, err
		}
	}
	for i := range br.items {
		br.items[i].a.stage = stageSent
	}
	br.g = g
	if err := g.Send(br.ctx); err != nil {
		return nil, err
	}
	if br.t == nil {
		return nil, nil
	}
	br.t.virgin = false
	for range br.t.pending {
		rr, err := g.Next()
		if err == nil {
			_, err = rr.Close()
		}
		if err != nil {
			return nil, err
		}
	}
	br.t.begun, br.t.pending = !br.begins, nil
	return nil, nil
}

// reparse reports whether item i is to be parsed though the connection knows its name. Behind a pooler that forwards names: always. Behind one
// that tracks them it need not be, as long as the first item is named too: a pooler that stops tracking loses all names at once, so the first
// item tells while nothing has been handed out. In a batch with transaction control nothing is run again anyway.
func (br *batchResults) reparse(i int, a *attempt) bool {
	if !a.decision.Pooled || !a.decision.Topology.Tracks {
		return a.decision.Pooled
	}
	first := br.attemptAt(0)
	return i > 0 && !br.control && br.t == nil && (first == nil || first.strategy != prepare.Named)
}

// learn asks for all descriptions that are missing in one round trip.
func (br *batchResults) learn() (*attempt, error) {
	var missing []*prepare.Statement
	var whose []*attempt
	seen := map[*prepare.Statement]bool{}
	for i := range br.items {
		it := &br.items[i]
		if it.text {
			continue
		}
		if it.a.st == nil {
			it.a.st = br.ex.statement(br.s.c, it.q.sql, it.q.stable())
		}
		br.ex.decide(br.ctx, br.s.c, it.a.st)
		if it.a.st.Description() != nil {
			continue
		}
		it.a.fresh, it.a.stage = true, stageLearn
		if seen[it.a.st] {
			continue
		}
		seen[it.a.st] = true
		missing = append(missing, it.a.st)
		whose = append(whose, &it.a)
	}
	if len(missing) == 0 {
		return nil, nil
	}
	var begin []string
	if br.t != nil {
		begin = br.t.pending
	}
	learnt, err := br.s.c.LearnAll(br.ctx, missing, begin)
	br.ex.count(br.s.c)
	if br.t != nil {
		br.t.sent(err)
	}
	return whose[min(len(learnt), len(whose)-1)], err
}

// mayCommit reports whether a statement may commit on its way, and with itself what its Sync group ran before it: a procedure and a DO
// block can, as can what PostgreSQL runs in transactions of its own. What such a group did is not taken back by a later item's failure.
func mayCommit(sql string) bool {
	switch prepare.Keyword(sql) {
	case "call", "do", "vacuum", "analyze", "cluster", "reindex", "create", "drop", "alter":
		return true
	}
	return false
}

// isControl reports whether a text begins, ends or cuts a transaction, or sets something for it: what is sent as it is, in its place.
func isControl(sql string) bool {
	switch prepare.Keyword(sql) {
	case "begin", "start", "commit", "end", "rollback", "abort", "savepoint", "release", "prepare", "set":
		return true
	}
	return false
}
