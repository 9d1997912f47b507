package statement

import (
	"context"
	"fmt"
	"math"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/internal/answer"
)

// maxParams is the protocol's limit: a Bind counts its parameters in an Int16 that PostgreSQL reads as unsigned
// (exec_bind_message, src/backend/tcop/postgres.c).
const maxParams = math.MaxUint16

// Formats is what the caller asked of the result formats; the zero value leaves the choice to pgx's type map.
type Formats struct {
	Positions pgx.QueryResultFormats
	ByOID     pgx.QueryResultFormatsByOID
}

// anyColumns asks for text, which every type has, whatever columns there will be.
var anyColumns = []int16{pgx.TextFormatCode}

// choose returns the formats for a result with these columns; built is pgx's own choice.
func (f Formats) choose(d *Description, fields []pgconn.FieldDescription, built []int16) []int16 {
	switch {
	case f.ByOID != nil: // first, as in pgx
		formats := make([]int16, len(fields))
		for i := range fields {
			formats[i] = f.ByOID[fields[i].DataTypeOID]
		}
		return formats
	case f.Positions != nil:
		return f.Positions
	case d.Utility():
		return anyColumns
	default:
		return built
	}
}

// Execution is one execution of a statement.
type Execution struct {
	Description *Description
	// Strategy is how it goes over the wire. Each is a single Sync group in a single flush; D is Describe(portal), which [Conn.Run] leaves
	// out only where it is told that the connection is direct.
	//
	// Named: Bind D Execute under the statement's name, with Close and Parse in front when this connection has not parsed it.
	// Shared: the same whatever this connection has parsed, with Close and Parse only if Parse says so: the name is a content hash, so the
	// server connection behind it has exactly this statement, or answers 26000 and nothing ran.
	// Unprepared, and Undecided: Parse "" Bind D Execute, with explicit parameter types: right behind every pooler.
	Strategy fallback.Strategy
	// Parse sends Close and Parse in front whatever is known of the name: right on whichever server it lands. In a [Group] every distinct
	// statement is parsed at most once.
	Parse bool
	// Direct is true on a connection that leads to a PostgreSQL backend of its own, where the server refuses a plan whose result has
	// changed since this connection's own Parse. Only there may the Describe be left out.
	Direct bool
	// Tracked is true where a pooler may track statements, and so answer a Parse and a Close itself. It counts in a [Group].
	Tracked bool
	Args    []any
	Formats Formats
}

// encode puts the arguments of e into eqb. sd carries the columns that the result formats are chosen for. On an error nothing has been
// sent; its text is pgx's.
func (e *Execution) encode(c *Conn, eqb *pgx.ExtendedQueryBuilder, sd *pgconn.StatementDescription) error {
	if len(sd.ParamOIDs) != len(e.Args) {
		return fmt.Errorf("expected %d arguments, got %d", len(sd.ParamOIDs), len(e.Args))
	}
	if len(e.Args) > maxParams {
		return fmt.Errorf("extended protocol limited to %d parameters", maxParams)
	}
	return eqb.Build(c.TypeMap(), sd, e.Args)
}

// Run sends one execution and reads until its row description, or until it ended without one. The reader must be closed before the
// connection is used again; after a failure its Close returns the error. Run itself returns an error only for arguments that cannot be
// encoded, and then nothing was sent.
//
// When it returns, a name that was parsed successfully is known to the connection. What throws statements away makes all names unknown.
func (c *Conn) Run(ctx context.Context, e *Execution) (*pgconn.ResultReader, error) {
	d := e.Description
	sd := &d.sd
	known := false
	if e.Strategy == fallback.Named {
		if ent, ok := c.names.Get(d.sd.Name); ok {
			known = true
			if e.Direct && len(ent.sd.Fields) > 0 && !d.Utility() {
				sd = &ent.sd
			}
		}
	}
	if err := e.encode(c, &c.eqb, sd); err != nil {
		return nil, err
	}
	formats := e.Formats.choose(d, sd.Fields, c.eqb.ResultFormats)

	named := e.Strategy == fallback.Named
	byName := named || e.Strategy == fallback.Shared
	parse := byName && (e.Parse || named && !known)
	// A prefix is written only when the call below is sure to flush it: one that is left in the buffer by a call that returned early would
	// be answered in front of the next statement's own answer.
	wrote := false
	closes := len(c.closes)
	if parse {
		closes++
	}
	marks := c.marks(closes)
	if prefix := closes+marks > 0; prefix && ctx.Err() != nil {
		ctx = doneContext{ctx}
	} else if prefix && !c.pg.IsBusy() && !c.pg.IsClosed() {
		wrote = true
		for range marks {
			c.pg.Frontend().SendClose(&pgproto3.Close{ObjectType: 'S', Name: markName})
		}
		c.sendCloses()
		if parse {
			c.sendCloseParse(d)
		}
	}
	hint := answer.Hint{Verb: d.verb}
	if sd != &d.sd {
		hint.Columns = len(sd.Fields)
	}
	c.wire.Expect(hint)
	var rr *pgconn.ResultReader
	switch {
	case !byName:
		c.Parses++
		rr = c.pg.ExecParams(ctx, d.sd.SQL, c.eqb.ParamValues, d.sd.ParamOIDs, c.eqb.ParamFormats, formats)
	case sd != &d.sd:
		rr = c.pg.ExecStatement(ctx, sd, c.eqb.ParamValues, c.eqb.ParamFormats, formats)
	default:
		rr = c.pg.ExecPrepared(ctx, d.sd.Name, c.eqb.ParamValues, c.eqb.ParamFormats, formats)
	}
	c.wire.ForgetHints() // a request that was not sent has no answer
	if !c.pg.IsBusy() && wrote {
		// It never started, or the connection is lost. In the first case the prefix is still in the buffer, and nobody can take it out.
		if _, err := rr.Close(); err != nil && pgconn.SafeToRetry(err) {
			_ = c.pg.Close(ctx)
		}
		return rr, nil
	}
	if parse && wrote && named {
		// Not for shared names: what a connection has parsed says nothing about the server that it meets next, and to close an evicted name
		// there would take it from everybody.
		c.confirmParse(d, rr)
	}
	if d.ForgetsStatements() {
		c.ForgetAll()
	}
	return rr, nil
}

// doneContext is a context that has ended in its Done as well. A context that is being cancelled on another goroutine shows that in Err first,
// and pgconn asks Done: it would go on without the prefix, and bind a name that was never parsed.
type doneContext struct{ context.Context }

var closedChan = func() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}()

// Done returns a closed channel.
func (doneContext) Done() <-chan struct{} { return closedChan }

// confirmParse makes the name of a Parse known if the Parse is proven: by the row description that followed, or, for a statement without rows,
// by its success. Anything else leaves it unknown, so that the next execution sends Close and Parse.
func (c *Conn) confirmParse(d *Description, rr *pgconn.ResultReader) {
	// A row may have no columns; then the slice is empty, and not nil.
	if fields := rr.FieldDescriptions(); fields != nil {
		c.learned(d, fields)
		return
	}
	// Without a row description the reader has already read to the end of the command.
	if _, err := rr.Close(); err == nil {
		c.learned(d, nil)
	}
}

// sendCloses puts a Close for every evicted name in front of the request.
func (c *Conn) sendCloses() {
	for _, name := range c.closes {
		c.pg.Frontend().SendClose(&pgproto3.Close{ObjectType: 'S', Name: name})
	}
	c.closes = c.closes[:0]
}

// sendCloseParse puts Close and Parse in front of the request. The Close is harmless for an unknown name everywhere, while a re-Parse
// without it, after a Parse whose fate is unknown, is FATAL "prepared statement name is already in use" on a tracking PgBouncer
// (src/prepare.c) and 42P05 on PostgreSQL.
func (c *Conn) sendCloseParse(d *Description) {
	c.Parses++
	c.pg.Frontend().SendClose(&pgproto3.Close{ObjectType: 'S', Name: d.sd.Name})
	c.pg.Frontend().SendParse(&pgproto3.Parse{Name: d.sd.Name, Query: d.sd.SQL, ParameterOIDs: d.sd.ParamOIDs})
}
