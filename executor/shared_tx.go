package executor

import (
	"context"
	"strconv"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/internal/statement"
)

// What a transaction and a statement of its own have to do with names on server connections.

// question returns what the transaction has to ask in front of a statement. A missing mark fails its group, so it is asked for only where that
// can be redone.
func (t *tx) question(a *attempt) question {
	switch {
	case a.strategy != fallback.Shared || t.on.pid != 0:
		if t.ex.unverified(t.s.c, a) {
			return askPID
		}
		return askNothing
	case !t.preamble.unused:
		return askPID
	default:
		return t.ex.shared.markQuestion(t.unmarked)
	}
}

// knows reports whether this transaction's server connection is known to have a shared name. While the server connection is not known itself,
// a name is taken for known if the executor has used it anywhere and nothing else of the transaction has run: then a miss is redone.
func (t *tx) knows(name string) bool {
	if t.on.pid == 0 {
		return t.preamble.unused && t.ex.shared.seen(name)
	}
	t.noteForgotten()
	if _, ok := t.here[name]; ok {
		return true
	}
	return t.ex.shared.has(t.on, name)
}

// learntName records that this transaction's server connection has a shared name.
func (t *tx) learntName(name string) {
	t.ex.shared.add(t.on, name)
	if t.on.pid != 0 && t.on.mark == "" { // nothing outlasts the transaction
		if t.here == nil {
			t.here = make(map[string]struct{})
		}
		t.here[name] = struct{}{}
	}
}

// redoUnmarked makes the transaction's opening ride again, with a new mark, after the server connection was found to have none: it is new, or
// somebody has thrown its statements away. Nothing of the transaction has run.
func (t *tx) redoUnmarked(ctx context.Context, a *attempt, err error) bool {
	if t.unmarked || !t.preamble.unused || a.stage != stageSent || a.runs >= maxRuns || t.s.c.PgConn().IsClosed() || !t.ex.shared.isMarkMissing(err) {
		return false
	}
	t.unmarked = true
	if a.strategy == fallback.Shared {
		a.parse, a.forced = true, true
	}
	t.ex.counters.misses.Add(1)
	t.ex.counters.retries.Add(1)
	t.ex.selector.CountShared(ctx, a.decision, true)
	t.ex.cfg.Trace.retried(fallback.ReasonPreparedLost, t.ex.shared.markName)
	t.preamble.restart(t.s.c.PgConn().TxStatus() != 'I')
	t.on = server{}
	return true
}

// forgetBackend drops what is believed of the transaction's server connection, after a name was missing there: whoever took one took all.
func (t *tx) forgetBackend(a *attempt) {
	if a.verdict.Reason == fallback.ReasonPreparedLost {
		t.ex.shared.forget(t.on.pid)
		clear(t.here)
	}
}

// noteForgotten drops what is believed of the transaction's server connection, after the transaction itself has thrown statements away there.
func (t *tx) noteForgotten() {
	if n := t.s.c.Forgotten(); n != t.forgotten {
		t.forgotten = n
		t.ex.shared.forget(t.on.pid)
		clear(t.here)
	}
}

// closeEvicted closes evicted names on the transaction's server connection. Its mark goes with them, so that no other process counts on what is
// gone. A Close cannot fail.
func (t *tx) closeEvicted(ctx context.Context) {
	if pg := t.s.c.PgConn(); t.on.pid == 0 || !t.ex.shared.owes() || pg.TxStatus() != 'T' || pg.IsBusy() {
		return
	}
	if names := t.ex.shared.takeEvicted(t.on.pid); len(names) > 0 {
		_ = t.ex.closeNames(ctx, t.s.c, names, "", "")
		t.on.mark = "" // what is learnt from now on is learnt for this transaction
		clear(t.here)
	}
}

// closeNames closes names and the mark on the server connection that a transaction holds. Where the transaction is the executor's own, a new mark is
// made, and the transaction ended by the text.
func (ex *Executor) closeNames(ctx context.Context, c *statement.Conn, names []string, mark, text string) error {
	p := c.PgConn().StartPipeline(ctx)
	p.SendDeallocate(ex.shared.markName)
	for _, name := range names {
		p.SendDeallocate(name)
	}
	if text != "" {
		p.SendPrepare(ex.shared.markName, mark, nil)
		p.SendQueryParams(text, nil, nil, nil, nil)
	}
	err := p.Sync()
	if closeErr := p.Close(); err == nil {
		err = closeErr
	}
	return err
}

// closeEvicted closes evicted names on the server connection that answers, if there are enough of them. It takes a transaction of its own, since
// otherwise nobody knows which one that is: two round trips for every closeBatch names. In statement mode there is none.
func (ex *Executor) closeEvicted(ctx context.Context, c *statement.Conn) {
	pg := c.PgConn()
	if pg.IsBusy() || ex.statementMode() {
		return
	}
	pid, err := beginAsking(ctx, pg)
	if err == nil {
		err = ex.closeNames(ctx, c, ex.shared.takeEvicted(pid), ex.shared.mark(makeMark).SQL(), "rollback")
	}
	if err != nil && pg.TxStatus() != 'I' {
		_ = pg.Close(ctx) // the call that follows takes another
	}
}

// beginAsking begins a transaction and returns on which server connection it is.
func beginAsking(ctx context.Context, pg *pgconn.PgConn) (pid uint32, err error) {
	p := pg.StartPipeline(ctx)
	p.SendQueryParams("begin", nil, nil, nil, nil)
	p.SendQueryParams(backendText, nil, nil, nil, nil)
	err = p.Sync()
	for err == nil {
		var res any
		if res, err = p.GetResults(); err != nil {
			break
		}
		rr, ok := res.(*pgconn.ResultReader)
		if !ok {
			break
		}
		read := rr.Read()
		if err = read.Err; err == nil && len(read.Rows) == 1 {
			var n uint64
			n, err = strconv.ParseUint(string(read.Rows[0][0]), 10, 32)
			pid = uint32(n)
		}
	}
	if closeErr := p.Close(); err == nil {
		err = closeErr
	}
	return pid, err
}
