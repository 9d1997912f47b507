package executor

import (
	"context"
	"errors"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/internal/txlocal"
)

// Tx is a transaction of an [Executor]. It is a pgx.Tx, with the differences that its methods' comments here state, and not safe for
// concurrent use.
//
// BEGIN is not sent until it is needed: it rides with the first statement. A transaction that never sent anything commits or rolls back
// without traffic. Conn sends what has not been sent, which is a round trip of up to five seconds that no context bounds: what runs on the
// connection it returns is pgx's own. Prepare sends no name: it describes the text and makes the name stand for it in Exec, Query, QueryRow,
// SendBatch and Queue of this transaction.
type Tx interface {
	pgx.Tx

	// Queue adds a statement, with the arguments and options of Exec, that is sent together with COMMIT. Its error is Commit's, and rolls
	// back the transaction. A transaction of nothing but queued statements, with default options, is one round trip without BEGIN and
	// COMMIT, also behind a pooler in statement mode. In a nested transaction the queue moves to the parent on Commit and is dropped on
	// Rollback; if neither was called it goes the way of what has run there, with the Commit or Rollback of the one around. The only error of
	// Queue itself is pgx.ErrTxClosed: the transaction has ended, and nothing will be sent.
	Queue(sql string, args ...any) error

	// OnCommit adds a function that runs after the outermost transaction's confirmed commit, in the order of the calls, on the goroutine of
	// Commit. It is dropped on rollback, and when the outcome of COMMIT is unknown.
	OnCommit(f func())
}

// tx is the outermost transaction.
type tx struct {
	ex   *Executor
	s    session
	opts pgx.TxOptions

	preamble  preamble
	second    int64               // when the second run of InTx began, in Unix nanoseconds, which no lost name and no older description is to end again; else 0
	on        server              // the server connection, where Shared has asked
	unmarked  bool                // a server connection was met that had no mark
	here      map[string]struct{} // names that are there, where there is no mark to keep them under
	forgotten int64               // how often the connection had forgotten its names when the server connection's were last looked at

	queue      []call
	onCommit   []func()
	savepoints int
	nested     []*savepoint      // the open ones, innermost last
	aliases    map[string]string // Prepare's names
	lostErr    error             // the *PreparedStatementError that ended the transaction, unless a savepoint undid it
	path       string            // the last text of the transaction that speaks of search_path, with its arguments
	copyFailed bool              // the connection must not outlive the transaction
	closed     bool
	local      *txlocal.Values // nil until somebody stores something
}

var _ Tx = (*tx)(nil)

// Begin starts a transaction, as pgxpool.Pool.Begin does. The value is a [Tx]. It takes a connection and sends nothing.
func (ex *Executor) Begin(ctx context.Context) (pgx.Tx, error) {
	return ex.BeginTx(ctx, pgx.TxOptions{})
}

// BeginTx starts a transaction with options, as pgxpool.Pool.BeginTx does. The value is a [Tx]. It takes a connection and sends nothing, but for a
// BeginQuery of the options.
func (ex *Executor) BeginTx(ctx context.Context, opts pgx.TxOptions) (pgx.Tx, error) {
	return ex.beginOn(ctx, ex, opts)
}

// beginOn is BeginTx on a connection of from's.
func (ex *Executor) beginOn(ctx context.Context, from source, opts pgx.TxOptions) (pgx.Tx, error) {
	t, err := ex.begin(ctx, from, opts)
	if err != nil {
		return nil, err
	}
	return t, nil
}

// begin starts a transaction. A BeginQuery of the caller's own is sent at once, as in pgx: it may be several statements, which only a simple
// query can hold, and nothing rides with that.
func (ex *Executor) begin(ctx context.Context, from source, opts pgx.TxOptions) (*tx, error) {
	t, err := ex.newTx(ctx, from, opts)
	if err != nil || opts.BeginQuery == "" {
		return t, err
	}
	returned := false
	defer func() {
		if !returned {
			t.release() // the tracer panics, and nobody gets the transaction
		}
	}()
	t.preamble.replaced()
	t.noteSearchPath(opts.BeginQuery, nil)
	traced, end := t.traceStart(ctx, opts.BeginQuery)
	tag, err := simpleExec(traced, t.s.c.PgConn(), opts.BeginQuery)
	end(tag, err)
	t.sent(err)
	if err != nil {
		err = t.failed(ctx, err)
		_ = t.Rollback(context.WithoutCancel(ctx))
		returned = true
		return nil, err
	}
	t.preamble.arrived()
	returned = true
	return t, nil
}

// newTx makes a transaction that has sent nothing.
func (ex *Executor) newTx(ctx context.Context, from source, opts pgx.TxOptions) (*tx, error) {
	if ex.probeAtBegin.Load() && !ex.closed.Load() {
		ex.probeIfDue(ctx, nil)
	}
	s, err := from.take(ctx)
	if err != nil {
		return nil, err
	}
	t := &tx{ex: ex, s: s, opts: opts, preamble: newPreamble(beginText(opts), s.c.QueryTracer() != nil), forgotten: s.c.Forgotten()}
	from.began(t)
	return t, nil
}

// InTx runs f in a transaction and commits it, or rolls it back if f fails or panics. f is run a second time, once, when the transaction was
// lost to a [*PreparedStatementError], that is, to a prepared statement that a pooler lost or to a statement that a migration has overtaken: so
// what f does outside the database has to bear that. What the first run queued and its OnCommit functions are dropped with it. Nothing else is
// run again, serialization failures (40001) included. Under On it never runs f twice.
//
// The error is f's own, or Commit's.
func (ex *Executor) InTx(ctx context.Context, opts pgx.TxOptions, f func(ctx context.Context, tx Tx) error) error {
	return ex.inTx(ctx, ex, opts, f)
}

// inTx is InTx on connections of from's.
func (ex *Executor) inTx(ctx context.Context, from source, opts pgx.TxOptions, f func(ctx context.Context, tx Tx) error) error {
	var first error
	for run := 1; ; run++ {
		t, err := ex.begin(ctx, from, opts)
		if err != nil {
			return errors.Join(first, err)
		}
		if run == 2 {
			t.second = time.Now().UnixNano()
		}
		err = t.do(ctx, f)
		first = err
		if err == nil || t.lostErr == nil || errors.Is(err, ErrCommitUnknown) || run == 2 || ex.cfg.PreparedStatements == On || ctx.Err() != nil {
			return err
		}
		if t.s.lent && t.s.c.PgConn().IsClosed() {
			return err // there is no other connection to run it on
		}
		ex.counters.retries.Add(1)
		var lost *PreparedStatementError
		errors.As(t.lostErr, &lost)
		ex.cfg.Trace.retried(lost.Reason, lost.Name)
	}
}

// do runs f and ends the transaction.
func (t *tx) do(ctx context.Context, f func(ctx context.Context, tx Tx) error) error {
	// Also when f panics or calls runtime.Goexit.
	defer func() {
		if t.closed {
			return
		}
		rollbackCtx, cancel := rollbackContext(ctx)
		defer cancel()
		_ = t.Rollback(rollbackCtx)
	}()
	if err := f(ctx, t); err != nil {
		return err
	}
	return t.Commit(ctx)
}

// beginText is the statement that begins a transaction with these options, as pgx writes it.
func beginText(o pgx.TxOptions) string {
	if o.BeginQuery != "" {
		return o.BeginQuery
	}
	text := "begin"
	if o.IsoLevel != "" {
		text += " isolation level " + string(o.IsoLevel)
	}
	if o.AccessMode != "" {
		text += " " + string(o.AccessMode)
	}
	if o.DeferrableMode != "" {
		text += " " + string(o.DeferrableMode)
	}
	return text
}

// Queue implements [Tx].
func (t *tx) Queue(sql string, args ...any) error {
	if t.closed {
		return pgx.ErrTxClosed
	}
	t.queue = append(t.queue, t.readCall(sql, args))
	return nil
}

// OnCommit implements [Tx].
func (t *tx) OnCommit(f func()) {
	if !t.closed {
		t.onCommit = append(t.onCommit, f)
	}
}

// Exec runs sql in the transaction, as in pgx.
func (t *tx) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	return t.exec(ctx, t.scope(nil), sql, args)
}

// exec is Exec; queue is what the text may cut off.
func (t *tx) exec(ctx context.Context, queue *[]call, sql string, args []any) (pgconn.CommandTag, error) {
	x, err := t.enter(ctx, queue, sql, args, true)
	if err != nil {
		return pgconn.CommandTag{}, err
	}
	defer x.release()
	return x.exec(ctx)
}

// Query runs sql in the transaction, as in pgx.
func (t *tx) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	r := t.query(ctx, t.scope(nil), sql, args)
	return r, r.err
}

// QueryRow runs sql in the transaction, as in pgx.
func (t *tx) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return (*row)(t.query(ctx, t.scope(nil), sql, args))
}

// query is Query; queue is what the text may cut off.
func (t *tx) query(ctx context.Context, queue *[]call, sql string, args []any) *rows {
	x, err := t.enter(ctx, queue, sql, args, false)
	if err != nil {
		r := &rows{err: err, closed: true}
		if !t.closed {
			r.conn = t.s.c.Conn() // afterwards it is somebody else's
		}
		return r
	}
	return x.query(ctx)
}

// Begin starts a nested transaction: a SAVEPOINT that rides with its first statement.
func (t *tx) Begin(context.Context) (pgx.Tx, error) {
	if t.closed {
		return nil, pgx.ErrTxClosed
	}
	return t.nest(), nil
}

// nest makes a nested transaction. It is part of the innermost one that is open, whichever was asked: that is where its SAVEPOINT stands.
func (t *tx) nest() *savepoint {
	var parent nestable = t
	if n := len(t.nested); n > 0 {
		parent = t.nested[n-1]
	}
	t.savepoints++
	sp := &savepoint{root: t, parent: parent, name: "sp_" + strconv.Itoa(t.savepoints)}
	t.nested = append(t.nested, sp)
	t.preamble.add("savepoint "+sp.name, t.s.c.QueryTracer() != nil)
	return sp
}

// statementMode is the executor's.
func (t *tx) statementMode() bool {
	return t.ex.statementMode()
}

// failed takes an error that came without an attempt.
func (t *tx) failed(ctx context.Context, err error) error {
	a := attempt{stage: stageSent, runs: maxRuns}
	untouched := pgconn.SafeToRetry(err) && !t.s.c.PgConn().IsClosed()
	_, err = t.ex.decideRetry(ctx, &t.s, &a, t.phase(), err)
	if !untouched {
		t.preamble.use()
	}
	return t.fail(&a, err)
}

// release gives the connection back. After a COPY that failed it is closed, however the transaction ended: a PgBouncer up to 1.25 may take the
// rows that were still on their way for a request that was never answered, and keep the server connection for this client for as long as it stays
// (pgbouncer#1470).
func (t *tx) release() {
	t.closed = true
	t.noteForgotten()
	if t.copyFailed && t.ex.selector.Decision().Pooled {
		ctx, cancel := rollbackContext(context.Background())
		_ = t.s.c.PgConn().Close(ctx)
		cancel()
	}
	t.s.release()
}

// traceBegin shows BEGIN and SAVEPOINTs to the tracer, in front of the statement they ride with.
func (t *tx) traceBegin(ctx context.Context) {
	texts, tags := t.preamble.trace()
	for i := range texts {
		t.traceText(ctx, texts[i], tags[i], nil)
	}
}

// traceText shows to the tracer a text of the executor's own that rides with something else.
func (t *tx) traceText(ctx context.Context, sql, tag string, err error) {
	_, end := t.traceStart(ctx, sql)
	if err != nil {
		tag = ""
	}
	end(pgconn.NewCommandTag(tag), err)
}

// traceStart shows the tracer that a text of the executor's own begins. The context that comes back is for running it.
func (t *tx) traceStart(ctx context.Context, sql string) (_ context.Context, end func(pgconn.CommandTag, error)) {
	tracer := t.s.c.QueryTracer()
	if tracer == nil {
		return ctx, func(pgconn.CommandTag, error) {}
	}
	conn := t.s.c.Conn()
	ctx = tracer.TraceQueryStart(ctx, conn, pgx.TraceQueryStartData{SQL: sql})
	return ctx, func(tag pgconn.CommandTag, err error) {
		tracer.TraceQueryEnd(ctx, conn, pgx.TraceQueryEndData{CommandTag: tag, Err: err})
	}
}
