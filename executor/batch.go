package executor

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/internal/pgxinternals"
	"github.com/bounceproof/bounceproof/internal/selector"
	"github.com/bounceproof/bounceproof/internal/sqltext"
	"github.com/bounceproof/bounceproof/internal/statement"
)

// SendBatch sends all queued queries in one flush, as pgxpool.Pool.SendBatch does, after learning the texts the executor does not know in
// one round trip more. Items take prepare.Stable and a QueryRewriter as leading arguments. Batch.BeginTx is honoured: the transaction of
// BatchResults.Tx is a [Tx].
//
// A batch is run again unseen when a prepared statement was lost, as long as no result has reached the caller and no item is
// transaction control. That covers a failure of the first item, and with Close as the only call any item's.
func (ex *Executor) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	return ex.sendBatch(ctx, ex, b)
}

// sendBatch is SendBatch on a connection of from's.
func (ex *Executor) sendBatch(ctx context.Context, from source, b *pgx.Batch) pgx.BatchResults {
	opts, begins := pgxinternals.BatchTxOptions(b)
	if begins {
		if ex.statementMode() {
			return pgx.FailedBatchResults(b, ErrStatementMode)
		}
		t, err := ex.newTx(ctx, from, opts)
		if err != nil {
			return pgx.FailedBatchResults(b, err)
		}
		// The batch's first item is BEGIN itself, and the batch is no first statement that could be redone.
		t.preamble.replaced()
		br := &batchResults{ex: ex, t: t, begins: true, s: &t.s, b: b, ctx: ctx}
		br.start()
		return br
	}
	s, err := from.take(ctx)
	if err != nil {
		return pgx.FailedBatchResults(b, err)
	}
	br := &batchResults{ex: ex, s: &s, b: b, ctx: ctx, control: s.c.PgConn().TxStatus() != 'I'}
	br.start()
	return br
}

// SendBatch sends a batch in the transaction, as in pgx.
func (t *tx) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	return t.sendBatch(ctx, t.scope(nil), b)
}

func (t *tx) sendBatch(ctx context.Context, queue *[]call, b *pgx.Batch) pgx.BatchResults {
	_, begins := pgxinternals.BatchTxOptions(b)
	switch {
	case t.closed:
		return pgx.FailedBatchResults(b, pgx.ErrTxClosed)
	case begins:
		return pgx.FailedBatchResults(b, errors.New("Batch.BeginTx cannot be used within a transaction"))
	case t.statementMode():
		return pgx.FailedBatchResults(b, ErrStatementMode)
	}
	for _, item := range b.QueuedQueries {
		if err := t.beforeText(ctx, queue, t.alias(item.SQL), false); err != nil {
			return pgx.FailedBatchResults(b, err)
		}
	}
	t.traceBegin(ctx)
	br := &batchResults{ex: t.ex, t: t, s: &t.s, b: b, ctx: ctx}
	br.start()
	return br
}

// batchResults are the results of a batch. Not safe for concurrent use.
type batchResults struct {
	ex     *Executor
	t      *tx // nil outside a transaction
	begins bool
	runs   int // how often it was sent, or tried to be
	s      *session
	b      *pgx.Batch
	ctx    context.Context
	tracer pgx.BatchTracer

	items     items
	front     int                  // how many texts the group has in front of the items
	decision  *selector.Decision   // one for the whole batch
	g         *statement.Group     // nil until it is sent, and when it is to be sent anew
	first     *pgconn.ResultReader // the first result, read ahead
	last      *rows                // the rows handed out last
	next      int                  // the item whose result is next
	delivered bool                 // a result has reached the caller
	silent    bool                 // none has, and none will before the end: try reads all of them
	control   bool                 // an item is transaction control, may commit, or does what a rollback does not undo
	err       error
	closed    bool
}

var _ pgx.BatchResults = (*batchResults)(nil)

// start sends the batch and reads up to the first result.
func (br *batchResults) start() {
	if len(br.b.QueuedQueries) == 0 {
		return // not traced, as in pgx
	}
	returned := false
	defer func() {
		if !returned {
			br.release() // something of the caller's panics, and nobody gets the results
		}
	}()
	br.begin()
	returned = true
}

// begin is start, within what gives the connection back after a panic.
func (br *batchResults) begin() {
	if br.tracer = br.s.c.BatchTracer(); br.tracer != nil {
		br.ctx = br.tracer.TraceBatchStart(br.ctx, br.s.c.Conn(), pgx.TraceBatchStartData{Batch: br.b})
	}
	br.items = make(items, len(br.b.QueuedQueries))
	calls := make([]call, len(br.b.QueuedQueries))
	for i, queued := range br.b.QueuedQueries {
		it := &br.items[i]
		calls[i] = readCall(queued.SQL, queued.Arguments)
		it.q = &calls[i]
		if err := it.q.rewrite(br.ctx, br.s.c.Conn()); err != nil {
			br.fail(err)
			return
		}
		if br.t != nil {
			it.q.sql = br.t.alias(it.q.sql)
			it.a.unnamed, it.a.since, it.a.path = br.t.second != 0, br.t.second, br.t.path
		}
		kind := sqltext.Of(it.q.sql)
		it.text = len(it.q.args) == 0 && kind&sqltext.Control != 0
		br.control = br.control || it.text || kind&(sqltext.MayCommit|sqltext.ForgetsStatements) != 0
	}
	if err := br.ex.run(br.ctx, br.s, br); err != nil {
		br.fail(err)
	}
}

// try implements [task]. It reads the first result: what the server refuses at Parse or Bind of the first item shows there, while the batch can
// still be sent anew.
func (br *batchResults) try(context.Context) (*attempt, error) {
	if br.g == nil {
		if failed, err := br.send(); err != nil {
			return failed, err
		}
	}
	if br.silent {
		return br.readAll()
	}
	var err error
	if br.first, err = br.g.Next(); err != nil {
		return br.items.at(br.g.Failed() - br.front), err
	}
	return nil, nil
}

// succeeded implements [task].
func (br *batchResults) succeeded(ctx context.Context) {
	for i := range br.items {
		if a := br.items.at(i); a != nil && br.silent {
			br.ex.succeeded(ctx, a)
		}
	}
}

// retry implements [task].
func (br *batchResults) retry(ctx context.Context, failed *attempt, err error) (bool, error) {
	if br.g != nil {
		_ = br.g.Close()
		br.g = nil
		if br.t != nil {
			br.t.sent(err)
		}
	}
	br.first, br.next = nil, 0
	if br.runs++; failed == nil || br.runs >= maxRuns {
		last := attempt{stage: stageSent}
		if failed != nil {
			last = *failed
		}
		last.runs = maxRuns
		failed = &last
	}
	phase := fallback.PhaseAlone
	switch {
	case br.t != nil && (br.t.preamble.begun || !br.begins):
		phase = br.t.phase()
	case br.control:
		phase = fallback.PhaseInside
	}
	if phase == fallback.PhaseBegin || br.begins {
		phase = fallback.PhaseInside // only a single first statement is redone
	}
	again, err := br.ex.decideRetry(ctx, br.s, failed, phase, err)
	if !again {
		if br.t != nil {
			br.t.preamble.use()
			err = br.t.fail(failed, err)
		}
		return false, err
	}
	br.items.beside(br.ex, br.s.c, failed)
	return true, err
}

// send learns what is not known, fills the group and flushes it. It returns the attempt that failed.
func (br *batchResults) send() (*attempt, error) {
	c := br.s.c
	if a, err := br.learn(); err != nil {
		return a, err
	}
	g := c.NewGroup()
	br.front = 0
	if br.t != nil {
		for _, text := range br.t.preamble.unsent {
			g.AddText(text)
		}
		br.front = len(br.t.preamble.unsent)
	}
	forgotten := false
	for i := range br.items {
		it := &br.items[i]
		if it.text {
			g.AddText(it.q.sql)
			continue
		}
		it.a.stage = stageLearn
		if err := br.ex.prepareAttempt(br.ctx, c, it.q, &it.a, br.decision, nil); err != nil {
			return &it.a, err
		}
		it.a.stage = stageEncode
		forgotten = it.a.behind(forgotten)
		e := br.ex.execution(c, it.q, &it.a)
		e.Parse = it.a.strategy == fallback.Shared || br.reparse(i, &it.a) // in a group nothing is bound on trust
		if err := it.a.add(g, e); err != nil {
			return &it.a, err
		}
	}
	br.items.sent()
	br.g = g
	if err := g.Send(br.ctx); err != nil {
		return nil, err
	}
	if br.t == nil {
		return nil, nil
	}
	br.t.preamble.use()
	for range br.t.preamble.unsent {
		rr, err := g.Next()
		if err == nil {
			_, err = rr.Close()
		}
		if err != nil {
			return nil, err
		}
	}
	if !br.begins {
		br.t.preamble.arrived()
	}
	return nil, nil
}

// reparse reports whether item i is to be parsed though the connection knows its name. Behind a pooler that forwards names: always. Behind one
// that tracks them it need not be, as long as the first item is named too: a pooler that stops tracking loses all names at once, so the first
// item tells while nothing has been handed out. In a batch with transaction control nothing is run again anyway.
func (br *batchResults) reparse(i int, a *attempt) bool {
	if !a.decision.Pooled || !a.decision.Topology.Tracks {
		return a.decision.Pooled
	}
	first := br.items.at(0)
	return i > 0 && !br.control && br.t == nil && (first == nil || first.strategy != fallback.Named)
}

// learn asks for all descriptions that are missing in one round trip.
func (br *batchResults) learn() (*attempt, error) {
	br.decision = br.items.decide(br.ctx, br.ex, br.s.c)
	var begin *[]string
	if br.t != nil {
		begin = &br.t.preamble.unsent
	}
	sent, failed, err := br.items.learn(br.ctx, br.ex, br.s.c, begin)
	if sent && br.t != nil {
		br.t.sent(err)
	}
	return failed, err
}
