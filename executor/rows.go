package executor

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/internal/statement"
)

// rows is the result of one query: pgx's own rows over the reader, and what belongs to their end: reading to the end of the Sync group,
// where a deferred constraint fails, the trace, and the connection's release. Not safe for concurrent use.
type rows struct {
	inner pgx.Rows        // nil when the query failed before it had a reader
	c     *statement.Conn // whose answers they are; nil for one result of a batch, which looks itself
	conn  *pgx.Conn
	tag   pgconn.CommandTag
	err   error

	pooled *pgxpool.Conn    // to release; nil inside a transaction
	group  *statement.Group // to close; nil for a single statement
	tracer pgx.QueryTracer
	ctx    context.Context // for the tracer only
	// onClose, for one result of a batch, is called once with the outcome known.
	onClose func(r *rows)

	peeked bool // a first row was read by Query and is still to be handed out
	closed bool
}

var _ pgx.Rows = (*rows)(nil)

// slabSize bounds what a row that a caller keeps for long holds in memory with it.
const slabSize = 64

// newRows returns rows for a query on the session's connection.
func (s *session) newRows() *rows {
	d := dataOf(s.c)
	if len(d.slab) == 0 {
		d.slab = make([]rows, slabSize)
	}
	r := &d.slab[0]
	d.slab = d.slab[1:]
	return r
}

// open takes over the answer to a statement and reads its first row. After an error the group is closed.
func (r *rows) open(c *statement.Conn, q *call, a *attempt, rr *pgconn.ResultReader, g *statement.Group) error {
	r.inner, r.group = pgx.RowsFromResultReader(c.TypeMap(), rr), g
	err := a.readable(c, q, rr.FieldDescriptions())
	if err == nil {
		err = r.peek()
	} else {
		r.inner.Close()
	}
	if err != nil && g != nil {
		_ = g.Close()
	}
	return err
}

// peek reads the first row. It is how Query learns whether the statement was refused, while it can still run it again: what the server
// refuses at Parse or Bind shows before any row. The error is that of the statement.
func (r *rows) peek() error {
	r.peeked = r.inner.Next()
	if r.peeked {
		return nil
	}
	return r.inner.Err()
}

// Next prepares the next row, as in pgx.
func (r *rows) Next() bool {
	if r.closed {
		return false
	}
	if r.peeked {
		r.peeked = false
		return true
	}
	if r.inner.Next() {
		return true
	}
	r.Close()
	return false
}

// Close reads to the end and frees the connection, as in pgx.
func (r *rows) Close() {
	if r.closed {
		return
	}
	r.closed = true
	defer r.release() // also when the tracer panics
	if r.inner != nil {
		r.inner.Close()
		r.tag = r.inner.CommandTag()
		if r.err == nil {
			r.err = r.inner.Err()
		}
	}
	if r.group != nil {
		if err := r.group.Close(); r.err == nil {
			r.err = err
		}
	}
	if r.c != nil {
		r.err = inOrder(r.c, r.err)
		r.c = nil
	}
	if r.onClose != nil {
		r.onClose(r)
	}
	if r.err != nil {
		r.err = poolerBusy(r.err)
	}
	if r.tracer != nil {
		r.tracer.TraceQueryEnd(r.ctx, r.conn, pgx.TraceQueryEndData{CommandTag: r.tag, Err: r.err})
	}
}

// release gives the connection back, which the pool closes if something is still to be read. It drops what the rows of a long-lived caller
// would keep alive.
func (r *rows) release() {
	pooled := r.pooled
	r.closed = true
	r.ctx, r.group, r.tracer, r.pooled, r.onClose = nil, nil, nil, nil, nil
	if pooled != nil {
		pooled.Release()
	}
}

// closeUnless closes the rows unless *returned: something of the caller's that decodes a value panics.
func (r *rows) closeUnless(returned *bool) {
	if !*returned {
		r.fail(errors.New("the rows end with a panic"))
	}
}

// fail closes the rows with an error.
func (r *rows) fail(err error) {
	if r.err == nil {
		r.err = err
	}
	r.Close()
}

// Err returns the first error, as in pgx.
func (r *rows) Err() error {
	if r.err != nil || r.inner == nil || r.closed {
		return r.err
	}
	return r.inner.Err()
}

// CommandTag returns the command tag once the rows are closed, as in pgx.
func (r *rows) CommandTag() pgconn.CommandTag { return r.tag }

// FieldDescriptions describes the columns as they came with these rows, as in pgx.
func (r *rows) FieldDescriptions() []pgconn.FieldDescription {
	if r.inner == nil {
		return nil
	}
	return r.inner.FieldDescriptions()
}

// Scan reads the current row, as in pgx.
func (r *rows) Scan(dest ...any) error {
	if r.inner == nil || r.closed {
		return errors.New("rows is closed")
	}
	returned := false
	defer r.closeUnless(&returned)
	err := r.scan(dest)
	returned = true
	if err != nil {
		r.fail(err)
	}
	return err
}

func (r *rows) scan(dest []any) error {
	if len(dest) == 1 {
		// Here and not in the inner rows, which know no Conn.
		if rs, ok := dest[0].(pgx.RowScanner); ok {
			return rs.ScanRow(r)
		}
	}
	return r.inner.Scan(dest...)
}

// Values returns the decoded current row, as in pgx.
func (r *rows) Values() ([]any, error) {
	if r.inner == nil || r.closed {
		return nil, errors.New("rows is closed")
	}
	returned := false
	defer r.closeUnless(&returned)
	values, err := r.inner.Values()
	returned = true
	if err != nil {
		r.fail(err)
	}
	return values, err
}

// RawValues returns the bytes of the current row, as in pgx.
func (r *rows) RawValues() [][]byte {
	if r.inner == nil {
		return nil
	}
	return r.inner.RawValues()
}

// Conn returns the connection the query ran on, as in pgx.
func (r *rows) Conn() *pgx.Conn { return r.conn }

// TypeMap returns the connection's types, as in pgx.
func (r *rows) TypeMap() *pgtype.Map {
	if r.conn == nil {
		return nil
	}
	return r.conn.TypeMap()
}

// row is the result of QueryRow. It is rows under another method set, so that it costs no allocation.
type row rows

// Scan reads the first row, as in pgx: pgx.ErrNoRows if there is none.
func (r *row) Scan(dest ...any) error {
	rs := (*rows)(r)
	defer rs.Close()
	if err := rs.Err(); err != nil {
		return err
	}
	for _, d := range dest {
		if _, ok := d.(*pgtype.DriverBytes); ok {
			return errors.New("cannot scan into *pgtype.DriverBytes from QueryRow")
		}
	}
	if !rs.Next() {
		if err := rs.Err(); err != nil {
			return err
		}
		return pgx.ErrNoRows
	}
	_ = rs.Scan(dest...) // kept in Err
	rs.Close()
	return rs.Err()
}
