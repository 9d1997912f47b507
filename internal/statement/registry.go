package statement

import (
	"slices"
	"strings"

	"github.com/hashicorp/golang-lru/v2/simplelru"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/bounceproof/bounceproof/internal/answer"
	"github.com/bounceproof/bounceproof/internal/pgxinternals"
	"github.com/bounceproof/bounceproof/internal/sqltext"
)

// DefaultCapacity is how many names a connection keeps by default: PgBouncer's own default for max_prepared_statements.
const DefaultCapacity = 200

// customDataKey is where a connection's state lives in pgconn's CustomData: it dies with the connection, so nothing has to be cleaned up.
const customDataKey = "github.com/bounceproof/bounceproof/internal/statement"

// Conn is what is known about one connection: which names it has parsed, each with the row description that came with that Parse,
// and which evicted names are still to be closed. Like the pgx.Conn it belongs to, it is not safe for concurrent use.
type Conn struct {
	conn *pgx.Conn
	pg   *pgconn.PgConn

	queryTracer   pgx.QueryTracer
	batchTracer   pgx.BatchTracer
	prepareTracer pgx.PrepareTracer
	copyTracer    pgx.CopyFromTracer

	names     *simplelru.LRU[string, *entry]
	epochs    map[any]int64
	closes    []string // evicted names; a Close for each rides in front of the next request
	forgotten int64    // how often all names were forgotten
	eqb       pgx.ExtendedQueryBuilder
	wire      answer.Checker
	watched   bool
	leading   int // Closes at the start of the last request

	// Data is the caller's own, kept with the connection.
	Data any
	// Scope tells connections apart on which the same text may mean something else, as the pool's hooks configured them: user, database,
	// search_path, role and options.
	Scope string
	// Direct says that the connection was seen to lead to a backend of its own.
	Direct bool
	// Doubtful says that an error on this connection may be another client's: that of a pooler before PgBouncer 1.21, see [Conn.marks].
	Doubtful bool

	// Parses and Learns count the Parse messages sent for executions and for learning since the caller last took them.
	Parses, Learns int64
}

// entry is a name this connection has parsed. sd.Fields is the row description that came with that very Parse; empty for a statement
// without rows, and then a Describe rides with each execution.
type entry struct {
	sd pgconn.StatementDescription
}

// Attach returns the state of conn, made at its first use. capacity bounds the names it keeps; it counts at the first call only.
func Attach(conn *pgx.Conn, capacity int) *Conn {
	pg := conn.PgConn()
	data := pg.CustomData()
	if c, ok := data[customDataKey].(*Conn); ok && c.conn == conn {
		c.watch()
		return c
	}
	c := &Conn{conn: conn, pg: pg}
	c.wire.Broken = func() { _ = pg.Conn().Close() }
	// pgx finds tracers by type assertion too; Config() copies, so it is asked once a connection.
	cfg := conn.Config()
	tracer := cfg.Tracer
	c.Scope = strings.Join([]string{
		cfg.User, cfg.Database, cfg.RuntimeParams["search_path"], cfg.RuntimeParams["role"], cfg.RuntimeParams["options"],
	}, "\x00")
	c.queryTracer = tracer
	c.batchTracer, _ = tracer.(pgx.BatchTracer)
	c.prepareTracer, _ = tracer.(pgx.PrepareTracer)
	c.copyTracer, _ = tracer.(pgx.CopyFromTracer)
	c.names, _ = simplelru.NewLRU(max(capacity, 1), func(name string, _ *entry) {
		c.closes = append(c.closes, name)
	})
	data[customDataKey] = c
	c.watch()
	return c
}

// watch has every answer on the connection checked, from the first moment on at which nothing is on its way.
func (c *Conn) watch() {
	if !c.watched && !c.pg.IsBusy() && !c.pg.IsClosed() {
		c.watched = pgxinternals.WrapWire(c.pg.Frontend(), c.wire.Wrap)
	}
}

// Disorder returns the first answer on this connection that was out of order, as an *[answer.Error], or nil. The connection is of no use then,
// and what was read from it last may belong to another request.
func (c *Conn) Disorder() error { return c.wire.Err() }

// Of returns what is known of a connection, nil if nothing is.
func Of(pg *pgconn.PgConn) *Conn {
	c, _ := pg.CustomData()[customDataKey].(*Conn)
	return c
}

// ExpectText says that text is sent next, as a simple query of one statement, so that an answer to another command is out of order. It is taken
// back with ForgetText.
func (c *Conn) ExpectText(text string) { c.wire.Expect(answer.Hint{Verb: sqltext.Verb(text)}) }

// ExpectQuery is ExpectText for a text that may hold several statements, of which nothing is expected.
func (c *Conn) ExpectQuery(text string) {
	if !strings.Contains(text, ";") {
		c.ExpectText(text)
	}
}

// ExpectCopyFrom is ExpectText for a COPY from the client.
func (c *Conn) ExpectCopyFrom() { c.wire.Expect(answer.Hint{Verb: "COPY", CopyIn: true}) }

// ForgetText takes back what [Conn.ExpectText] and [Conn.ExpectCopyFrom] said, in case that the text was not sent.
func (c *Conn) ForgetText() { c.wire.ForgetHints() }

// markName is the name of no statement.
const markName = "bp_mark"

// marks returns how many Closes of no statement go in front of a request that begins with closes of its own.
//
// An error is an answer to anything, also one that a pooler has left for another client. The answer to what was sent is then still to come, and
// would be taken for that to the next request. So behind such a pooler the request after an error begins with another number of
// CloseCompletes than the one before, and what comes next is told from what was left.
func (c *Conn) marks(closes int) (marks int) {
	if c.Doubtful && c.wire.Failed() {
		if marks = 1; closes+marks == c.leading {
			marks++
		}
	}
	c.leading = closes + marks
	return marks
}

// Conn returns the connection itself.
func (c *Conn) Conn() *pgx.Conn { return c.conn }

// PgConn returns the connection's protocol layer.
func (c *Conn) PgConn() *pgconn.PgConn { return c.pg }

// TypeMap returns the connection's types.
func (c *Conn) TypeMap() *pgtype.Map { return c.conn.TypeMap() }

// QueryTracer returns the connection's tracer for single statements, or nil.
func (c *Conn) QueryTracer() pgx.QueryTracer { return c.queryTracer }

// BatchTracer returns the connection's tracer for batches, or nil.
func (c *Conn) BatchTracer() pgx.BatchTracer { return c.batchTracer }

// CopyFromTracer returns the connection's tracer for CopyFrom, or nil.
func (c *Conn) CopyFromTracer() pgx.CopyFromTracer { return c.copyTracer }

// PrepareTracer returns the connection's tracer for Prepare, or nil.
func (c *Conn) PrepareTracer() pgx.PrepareTracer { return c.prepareTracer }

// Knows reports whether this connection has parsed the name and nothing since has put that in doubt.
func (c *Conn) Knows(name string) bool { return c.names.Contains(name) }

// Known returns how many names the connection keeps.
func (c *Conn) Known() int { return c.names.Len() }

// learned records that a Parse of d's name succeeded, with the row description that followed. fields is copied: pgconn reuses its slice.
func (c *Conn) learned(d *Description, fields []pgconn.FieldDescription) {
	// A Close that is still owed would close the new one.
	c.closes = slices.DeleteFunc(c.closes, func(name string) bool { return name == d.sd.Name })
	c.names.Add(d.sd.Name, &entry{sd: pgconn.StatementDescription{
		Name: d.sd.Name, SQL: d.sd.SQL, ParamOIDs: d.sd.ParamOIDs, Fields: slices.Clone(fields),
	}})
}

// Forget makes a name unknown: its next execution sends Close and Parse. Nothing is sent now, and no Close is owed: every Parse is
// preceded by one.
func (c *Conn) Forget(name string) {
	if !c.names.Contains(name) {
		return
	}
	n := len(c.closes)
	c.names.Remove(name)
	c.closes = c.closes[:n]
}

// Reset makes every name unknown when epoch is another one than at owner's last call: names that were parsed while a pooler worked in one
// way mean nothing to it once it works in another. Each owner counts for itself.
func (c *Conn) Reset(owner any, epoch int64) {
	if last, ok := c.epochs[owner]; ok && last == epoch {
		return
	} else if ok {
		c.ForgetAll()
	}
	if c.epochs == nil {
		c.epochs = make(map[any]int64, 1)
	}
	c.epochs[owner] = epoch
}

// ForgetAll makes every name unknown, as after a session was reset by someone else. Names that were evicted before still get the Close
// that they are owed: what reset the session may have been a DEALLOCATE of one name, or have reached another server.
func (c *Conn) ForgetAll() {
	n := len(c.closes)
	c.names.Purge()
	c.closes = c.closes[:n]
	c.forgotten++
}

// Forgotten counts how often all names were forgotten.
func (c *Conn) Forgotten() int64 { return c.forgotten }
