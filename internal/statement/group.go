package statement

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/internal/answer"
	"github.com/bounceproof/bounceproof/internal/sqltext"
)

// Group is several statements in one Sync group and one flush: BEGIN and a statement, a batch, a queue and COMMIT. Fill it with AddText
// and Add, then Send, then Next for each result in order, then Close. Not safe for concurrent use.
//
// It is a pgconn pipeline and writes nothing by hand: a hand-written prefix in front of a group that begins a transaction loses the row
// without an error. A steady state of single statements belongs to [Conn.Run], which allocates half as much.
type Group struct {
	c        *Conn
	items    []groupItem
	names    map[string]struct{} // parsed by an item
	front    int                 // the first statement's place: where the Parses stand that are moved forward
	answered int                 // how many bytes answer what precedes the next Parse there
	fixed    bool                // an item may change what a text means, so no Parse moves in front of it
	parses   []int               // the items whose Parse has not been answered, in the order they were sent
	p        *pgconn.Pipeline
	next     int
	err      error // the first failure
	failed   int   // the item it belongs to
	sent     bool
	closed   bool
}

type groupItem struct {
	text    string // sent unnamed and without arguments; empty for a statement
	e       Execution
	eqb     *pgx.ExtendedQueryBuilder
	formats []int16
	name    string
	parse   bool // Parse under name
	moved   bool // in front of the first statement, and not of this one
	params  bool // Parse "" and Bind in one
}

// trackedWindow is how many bytes of answers may precede a named Parse or a Close behind a pooler that tracks statements.
//
// PgBouncer answers a Close itself, and a Parse too where its server has the statement. It puts that answer behind the one before as soon as
// it has read that one's header, and so into the middle of it when the rest has not arrived (sbuf_process_pending in src/sbuf.c and the loop over
// RA_FAKE in handle_server_work, src/server.c; 1.24.1 and 1.26.1). PostgreSQL sends what it has buffered when there are 8 kB of it
// (PqSendBufferSize, src/backend/libpq/pqcomm.c), and a network cuts that into segments; the first of them is larger than this everywhere.
const trackedWindow = 1024

// textAnswer is more than the answer to BEGIN, a SAVEPOINT or the question for the server connection takes.
const textAnswer = 96

// NewGroup returns an empty group on the connection.
func (c *Conn) NewGroup() *Group { return &Group{c: c} }

// Len returns how many results the group will have.
func (g *Group) Len() int { return len(g.items) }

// AddText adds a text without arguments, such as BEGIN. It has a result like any other.
func (g *Group) AddText(sql string) {
	switch {
	case g.front == len(g.items):
		g.front++
		g.answered += textAnswer
	case g.c.pg.TxStatus() == 'I' && beginsOrCommits(sql):
		// These change no text's meaning, unless they end a transaction that was open before, and what SET LOCAL has set there.
	default:
		g.fixed = true
	}
	g.items = append(g.items, groupItem{text: sql})
}

func beginsOrCommits(sql string) bool {
	verb := sqltext.Verb(sql)
	return verb == "BEGIN" || verb == "COMMIT"
}

// Add adds an execution. An error means that the arguments cannot be encoded; nothing has been sent.
//
// Where a pooler may track statements (Execution.Tracked), an execution that would have to be parsed under its name goes without one if there is
// no place for that Parse; [Group.Strategy] says so.
func (g *Group) Add(e Execution) error {
	it := groupItem{eqb: &pgx.ExtendedQueryBuilder{}, name: e.Description.sd.Name}
	if err := e.encode(g.c, it.eqb, &e.Description.sd); err != nil {
		return err
	}
	it.formats = e.Formats.choose(e.Description, e.Description.sd.Fields, it.eqb.ResultFormats)
	if e.Strategy == fallback.Named || e.Strategy == fallback.Shared {
		if _, parsed := g.names[it.name]; !parsed {
			it.parse = e.Parse || e.Strategy == fallback.Named && !g.c.Knows(it.name)
			it.moved = it.parse && e.Tracked
		}
		if it.moved && !g.moveForward(e.Description) {
			it.parse, it.moved, e.Strategy = false, false, fallback.Unprepared
		}
	}
	if it.parse {
		if g.names == nil {
			g.names = make(map[string]struct{})
		}
		g.names[it.name] = struct{}{}
	}
	if e.Strategy != fallback.Named && e.Strategy != fallback.Shared {
		// The unnamed statement lasts until the next Parse of one: a run of the same statement needs it once.
		it.name = ""
		it.params = !g.lastUnnamed(e.Description)
	}
	g.fixed = g.fixed || e.Description.kind&(sqltext.MayCommit|sqltext.ForgetsStatements|sqltext.Control) != 0
	it.e = e
	g.items = append(g.items, it)
	return nil
}

// moveForward reports whether d can be parsed in front of the first statement, and keeps its place there.
func (g *Group) moveForward(d *Description) bool {
	if g.fixed || g.answered > trackedWindow {
		return false
	}
	g.answered += d.answerSize()
	return true
}

// Strategy returns how item i goes.
func (g *Group) Strategy(i int) fallback.Strategy { return g.items[i].e.Strategy }

// lastUnnamed reports whether the unnamed statement is still d's after the items so far.
func (g *Group) lastUnnamed(d *Description) bool {
	if len(g.items) == 0 {
		return false
	}
	last := &g.items[len(g.items)-1]
	return last.text == "" && last.name == "" && last.e.Description == d
}

// Send writes the group in one flush and reads nothing. An error for which pgconn.SafeToRetry holds means that nothing was sent.
func (g *Group) Send(ctx context.Context) error {
	c := g.c
	g.sent = true
	g.p = c.pg.StartPipeline(ctx)
	closes := len(c.closes)
	for i := range g.items {
		if g.closesInFront(i) || i == 0 && g.items[i].parse {
			closes++
		}
	}
	for range c.marks(closes) {
		g.p.SendDeallocate(markName)
	}
	for _, name := range c.closes {
		g.p.SendDeallocate(name)
	}
	for i := range g.items {
		if g.closesInFront(i) {
			g.p.SendDeallocate(g.items[i].name)
		}
	}
	for i := range g.items {
		if i == g.front {
			for k := range g.items {
				if g.items[k].moved {
					g.sendParse(k)
				}
			}
		}
		it := &g.items[i]
		switch {
		case it.text != "":
			// In its place: BEGIN ISOLATION LEVEL fails after anything that took a snapshot (25001), and a Parse takes one.
			g.p.SendQueryParams(it.text, nil, nil, nil, nil)
			continue
		case it.params:
			c.Parses++
			g.p.SendQueryParams(it.e.Description.sd.SQL, it.eqb.ParamValues, it.e.Description.sd.ParamOIDs, it.eqb.ParamFormats, it.formats)
			continue
		case it.parse && !it.moved:
			g.sendParse(i)
		}
		g.p.SendQueryPrepared(it.name, it.eqb.ParamValues, it.eqb.ParamFormats, it.formats)
	}
	for i := range g.items {
		c.wire.Expect(g.items[i].hint())
	}
	err := g.p.Sync()
	c.wire.ForgetHints() // a request that was not sent has no answer
	if err != nil {
		g.fail(err)
		return err
	}
	// Not before it is sent: with a context that is done the pipeline writes nothing, and the names would stay on the server.
	c.closes = c.closes[:0]
	return nil
}

// closesInFront reports whether the Close of item i goes in front of the group, where no answer is outstanding: Pgpool-II answers a Close at once, whatever
// is still unanswered before it. A Close takes no snapshot, and a transaction that has failed takes it too (PostgreSQL
// src/backend/tcop/postgres.c). Not that of a shared name: where an item in front fails, its Parse would be skipped, and the Close would have
// taken the name from everybody.
func (g *Group) closesInFront(i int) bool {
	return g.items[i].parse && g.items[i].e.Strategy == fallback.Named
}

// sendParse sends Parse for item i, and Close if that was not sent in front.
func (g *Group) sendParse(i int) {
	it := &g.items[i]
	g.c.Parses++
	if !g.closesInFront(i) {
		g.p.SendDeallocate(it.name)
	}
	g.p.SendPrepare(it.name, it.e.Description.sd.SQL, it.e.Description.sd.ParamOIDs)
	g.parses = append(g.parses, i)
}

// hint is what is known of the item's answer.
func (it *groupItem) hint() answer.Hint {
	if it.text == "" {
		return answer.Hint{Verb: it.e.Description.verb}
	}
	return answer.Hint{Verb: sqltext.Verb(it.text)}
}

// Next returns the next item's result. The reader is valid until the next call. After a failure every call returns the first error: the
// server skipped what followed.
func (g *Group) Next() (*pgconn.ResultReader, error) {
	for g.err == nil {
		if g.next >= len(g.items) {
			return nil, errors.New("statement: group: no more results")
		}
		it := &g.items[g.next]
		res, err := g.p.GetResults()
		if err != nil {
			g.fail(err)
			break
		}
		switch res := res.(type) {
		case *pgconn.ResultReader:
			g.next++
			if it.text == "" && it.e.Description.ForgetsStatements() {
				g.c.ForgetAll() // here, and not when all is well: what follows may fail, and nothing brings the statements back
			}
			return res, nil
		case *pgconn.StatementDescription:
			parsed := &g.items[g.parses[0]]
			if g.parses = g.parses[1:]; parsed.e.Strategy == fallback.Named {
				g.c.learned(parsed.e.Description, res.Fields)
			}
		case *pgconn.CloseComplete:
		default:
			g.fail(errors.New("statement: group: the answer ended early"))
		}
	}
	return nil, g.err
}

// Failed returns the item that the error of the last [Group.Next] belongs to: not the next one where it is that of a Parse that stands in front.
func (g *Group) Failed() int { return g.failed }

// fail keeps the first failure.
func (g *Group) fail(err error) {
	if g.err == nil {
		g.err, g.failed = err, g.next
		if len(g.parses) > 0 && g.next >= g.front && g.items[g.parses[0]].moved {
			g.failed = g.parses[0]
		}
	}
}

// Close reads the rest of the answer up to the end of the group, whose own error (a deferred constraint fails there) counts like an
// item's, and frees the connection. It returns the group's first error. Calling it again returns the same.
func (g *Group) Close() error {
	if g.closed || !g.sent {
		return g.err
	}
	g.closed = true
	for g.err == nil && g.next < len(g.items) {
		rr, err := g.Next()
		if err != nil {
			break
		}
		if _, err := rr.Close(); err != nil {
			g.fail(err)
		}
	}
	if err := g.p.Close(); err != nil {
		g.fail(err)
	} else if err := g.c.Disorder(); err != nil {
		g.fail(err) // what was read may have been somebody else's
	}
	return g.err
}
