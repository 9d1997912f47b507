package executor

import (
	"context"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/internal/pgxinternals"
	"github.com/bounceproof/bounceproof/internal/txlocal"
)

// nestable is what a nested transaction hands to the one around it when it commits.
type nestable interface {
	adopt(queue []call, onCommit []func())
	TxLocal() *txlocal.Values
}

// savepoint is a nested transaction. Its SAVEPOINT rides with its first statement. Statements run on the outermost transaction.
type savepoint struct {
	root     *tx
	parent   nestable
	name     string
	queue    []call
	onCommit []func()
	closed   bool
	local    *txlocal.Values // nil until somebody stores something
}

var _ Tx = (*savepoint)(nil)

func (t *tx) adopt(queue []call, onCommit []func()) {
	t.queue = append(t.queue, queue...)
	t.onCommit = append(t.onCommit, onCommit...)
}

func (sp *savepoint) adopt(queue []call, onCommit []func()) {
	sp.queue = append(sp.queue, queue...)
	sp.onCommit = append(sp.onCommit, onCommit...)
}

// done reports whether the transaction has ended, by itself or with one around it.
func (sp *savepoint) done() bool {
	return sp.closed || sp.root.closed || !slices.Contains(sp.root.nested, sp)
}

// end takes the transaction, and those within it, off the open ones, and returns them all, innermost last.
func (sp *savepoint) end() (ended []*savepoint) {
	sp.closed = true
	i := slices.Index(sp.root.nested, sp)
	ended = sp.root.nested[i:]
	sp.root.nested = sp.root.nested[:i]
	return ended
}

// handOver gives what transactions that have ended hold to the one around each, if it is kept, and drops it if not. Those that nobody has
// ended are no exception: RELEASE and COMMIT keep what has run in them.
func handOver(ended []*savepoint, kept bool) {
	for _, sp := range slices.Backward(ended) {
		sp.local.End(kept)
		if kept {
			sp.parent.adopt(sp.queue, sp.onCommit)
		}
		sp.queue, sp.onCommit = nil, nil
	}
}

// Begin starts a transaction within this one.
func (sp *savepoint) Begin(context.Context) (pgx.Tx, error) {
	if sp.done() {
		return nil, pgx.ErrTxClosed
	}
	return sp.root.nest(), nil
}

// Queue implements [Tx].
func (sp *savepoint) Queue(sql string, args ...any) error {
	if sp.done() {
		return pgx.ErrTxClosed
	}
	sp.queue = append(sp.queue, sp.root.readCall(sql, args))
	return nil
}

// OnCommit implements [Tx].
func (sp *savepoint) OnCommit(f func()) {
	if !sp.done() {
		sp.onCommit = append(sp.onCommit, f)
	}
}

// Commit releases the savepoint and hands what was queued to the transaction around it.
func (sp *savepoint) Commit(ctx context.Context) error {
	if sp.done() {
		return pgx.ErrTxClosed
	}
	// A failed transaction has nothing left but to be rolled back. Any other keeps what has run within the savepoint, even if RELEASE cannot be
	// sent.
	handOver(sp.end(), sp.root.s.c.PgConn().TxStatus() != 'E')
	if sp.root.preamble.takeBack("savepoint " + sp.name) {
		return nil
	}
	return sp.root.control(ctx, "release savepoint "+sp.name)
}

// Rollback rolls back to the savepoint and drops what was queued.
func (sp *savepoint) Rollback(ctx context.Context) error {
	if sp.done() {
		return pgx.ErrTxClosed
	}
	handOver(sp.end(), false)
	if sp.root.preamble.takeBack("savepoint " + sp.name) {
		return nil
	}
	err := sp.root.control(ctx, "rollback to savepoint "+sp.name)
	if err == nil {
		sp.root.lostErr = nil // undone with the rest
	}
	return err
}

// Exec runs sql in the transaction, as in pgx.
func (sp *savepoint) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	if sp.done() {
		return pgconn.CommandTag{}, pgx.ErrTxClosed
	}
	return sp.root.exec(ctx, sp.root.scope(sp), sql, args)
}

// Query runs sql in the transaction, as in pgx.
func (sp *savepoint) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if sp.done() {
		r := &rows{}
		r.fail(pgx.ErrTxClosed)
		return r, r.err
	}
	r := sp.root.query(ctx, sp.root.scope(sp), sql, args)
	return r, r.err
}

// QueryRow runs sql in the transaction, as in pgx.
func (sp *savepoint) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	if sp.done() {
		r := &rows{}
		r.fail(pgx.ErrTxClosed)
		return (*row)(r)
	}
	return (*row)(sp.root.query(ctx, sp.root.scope(sp), sql, args))
}

// SendBatch sends a batch in the transaction, as in pgx.
func (sp *savepoint) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	if sp.done() {
		return pgx.FailedBatchResults(b, pgx.ErrTxClosed)
	}
	return sp.root.sendBatch(ctx, sp.root.scope(sp), b)
}

// CopyFrom copies rows into a table in the transaction, as in pgx.
func (sp *savepoint) CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, src pgx.CopyFromSource) (int64, error) {
	if sp.done() {
		return 0, pgx.ErrTxClosed
	}
	return sp.root.CopyFrom(ctx, table, columns, src)
}

// Prepare describes sql and makes name stand for it, see the outermost transaction's.
func (sp *savepoint) Prepare(ctx context.Context, name, sql string) (*pgconn.StatementDescription, error) {
	if sp.done() {
		return nil, pgx.ErrTxClosed
	}
	return sp.root.Prepare(ctx, name, sql)
}

// LargeObjects returns pgx's large objects.
func (sp *savepoint) LargeObjects() pgx.LargeObjects { return pgxinternals.LargeObjects(sp) }

// Conn returns the connection, after sending BEGIN and SAVEPOINT.
func (sp *savepoint) Conn() *pgx.Conn { return sp.root.Conn() }
