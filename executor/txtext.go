package executor

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/internal/pgxinternals"
	"github.com/bounceproof/bounceproof/internal/sqltext"
)

// control runs a text of the executor's own that is no statement of the caller's: it leaves the queue alone.
func (t *tx) control(ctx context.Context, sql string) error {
	if err := t.flush(ctx); err != nil {
		return err
	}
	t.preamble.use()
	_, err := t.s.c.Conn().Exec(ctx, sql)
	return err
}

// alias replaces a name that Prepare gave by its text.
func (t *tx) alias(sql string) string {
	if text, ok := t.aliases[sql]; ok {
		return text
	}
	return sql
}

// readCall reads a call of the transaction, which may be by a name that Prepare gave.
func (t *tx) readCall(sql string, args []any) call {
	q := readCall(t.alias(sql), args)
	q.givenSQL = sql
	return q
}

// flush sends what is pending by itself, for what follows goes past the executor.
func (t *tx) flush(ctx context.Context) error {
	if len(t.preamble.unsent) == 0 {
		return nil
	}
	if t.statementMode() {
		return ErrStatementMode
	}
	g := t.s.c.NewGroup()
	for _, text := range t.preamble.unsent {
		g.AddText(text)
	}
	if err := g.Send(ctx); err != nil {
		_ = g.Close()
		return err
	}
	err := g.Close()
	t.sent(err)
	if err != nil {
		return t.failed(ctx, err)
	}
	t.preamble.arrived()
	return nil
}

// beforeText flushes the queue in front of a text that ends or cuts the transaction in a way the executor does not see: a queued statement
// would outlive a savepoint that is rolled back. queue is that of the innermost open transaction, or nil: what was queued outside of a nested
// transaction must not share its fate. simple says that the text may hold several statements.
func (t *tx) beforeText(ctx context.Context, queue *[]call, sql string, simple bool) error {
	if queue == nil || len(*queue) == 0 || !cutsTransaction(sql, simple) {
		return nil
	}
	if t.s.c.PgConn().IsBusy() {
		return nil // rows are open: the text will be refused, and a queued statement would break them
	}
	if t.s.c.PgConn().TxStatus() == 'E' {
		// Only ROLLBACK (TO) does anything here, and it takes with it what would have run before the failure.
		*queue = nil
		return nil
	}
	return t.runQueue(ctx, queue)
}

// scope returns the queue that belongs to a method of sp, or of the outermost transaction for nil: none while a transaction within it is open.
func (t *tx) scope(sp *savepoint) *[]call {
	switch {
	case len(t.nested) == 0 && sp == nil:
		return &t.queue
	case len(t.nested) > 0 && t.nested[len(t.nested)-1] == sp:
		return &sp.queue
	default:
		return nil
	}
}

// cutsTransaction reports whether the text is, or if simple may contain, SAVEPOINT, RELEASE, ROLLBACK (TO), PREPARE TRANSACTION, COMMIT, END
// or ABORT.
func cutsTransaction(sql string, simple bool) bool {
	kind := sqltext.Of(sql)
	if simple {
		kind = sqltext.OfScript(sql)
	}
	return kind&sqltext.Cuts != 0
}

// runQueue runs queued statements now. One that fails stays, with those behind it: if it was not sent the caller may go on, and COMMIT must not
// leave it out.
func (t *tx) runQueue(ctx context.Context, queue *[]call) error {
	for len(*queue) > 0 {
		if err := t.runQueued(ctx, (*queue)[0]); err != nil {
			return err
		}
		*queue = (*queue)[1:]
	}
	return nil
}

// runQueued runs one of them as Exec would have.
func (t *tx) runQueued(ctx context.Context, q call) error {
	t.traceBegin(ctx)
	x := t.singleOf(q)
	defer x.release()
	_, err := x.exec(ctx)
	return err
}

// Conn returns the connection, after sending BEGIN: what runs on it is pgx's, and not the executor's. If BEGIN failed the connection is
// closed, so that nothing runs outside the transaction.
func (t *tx) Conn() *pgx.Conn {
	if !t.closed {
		ctx, cancel := rollbackContext(context.Background())
		defer cancel()
		t.traceBegin(ctx)
		t.preamble.use()
		if err := t.flush(ctx); err != nil {
			// Nobody may take for a transaction what is none.
			_ = t.s.c.Conn().Close(ctx)
		}
	}
	return t.s.c.Conn()
}

// LargeObjects returns pgx's large objects. Their functions are called by statements of this transaction.
func (t *tx) LargeObjects() pgx.LargeObjects { return pgxinternals.LargeObjects(t) }

// Prepare returns the description of sql and makes name stand for it in this transaction. Nothing is prepared under the name on the server,
// where behind a pooler it would be left behind.
func (t *tx) Prepare(ctx context.Context, name, sql string) (*pgconn.StatementDescription, error) {
	if t.closed {
		return nil, pgx.ErrTxClosed
	}
	if t.statementMode() {
		return nil, ErrStatementMode
	}
	st := t.ex.statement(t.s.c, sql, true)
	d := st.Description()
	if d == nil {
		t.traceBegin(ctx)
		var err error
		d, err = st.Learn(ctx, t.s.c, &t.preamble.unsent)
		t.sent(err)
		t.ex.countMessages(t.s.c)
		if err != nil {
			return nil, t.failed(ctx, err)
		}
	}
	if name != "" {
		if t.aliases == nil {
			t.aliases = make(map[string]string)
		}
		t.aliases[name] = sql
	}
	return &pgconn.StatementDescription{Name: name, SQL: sql, ParamOIDs: d.ParamOIDs(), Fields: d.Fields()}, nil
}
