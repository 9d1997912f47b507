package statement

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/fallback"
)

// Group is several statements in one Sync group and one flush: BEGIN and a statement, a batch, a queue and COMMIT. Fill it with AddText
// and Add, then Send, then Next for each result in order, then Close. Not safe for concurrent use.
//
// It is a pgconn pipeline and writes nothing by hand: a hand-written prefix in front of a group that begins a transaction loses the row
// without an error. A steady state of single statements belongs to [Conn.Run], which allocates half as much.
type Group struct {
	c      *Conn
	items  []groupItem
	names  map[string]struct{} // parsed by an item
	p      *pgconn.Pipeline
	next   int
	err    error // the first failure
	sent   bool
	closed bool
}

type groupItem struct {
	text    string // sent unnamed and without arguments; empty for a statement
	e       Execution
	eqb     *pgx.ExtendedQueryBuilder
	formats []int16
	name    string
	parse   bool // Parse under name in front
	params  bool // Parse "" and Bind in one
}

// NewGroup returns an empty group on the connection.
func (c *Conn) NewGroup() *Group { return &Group{c: c} }

// Len returns how many results the group will have.
func (g *Group) Len() int { return len(g.items) }

// AddText adds a text without arguments, such as BEGIN. It has a result like any other.
func (g *Group) AddText(sql string) { g.items = append(g.items, groupItem{text: sql}) }

// Add adds an execution. An error means that the arguments cannot be encoded; nothing has been sent.
func (g *Group) Add(e Execution) error {
	it := groupItem{e: e, eqb: &pgx.ExtendedQueryBuilder{}, name: e.Description.sd.Name}
	if err := e.encode(g.c, it.eqb, &e.Description.sd); err != nil {
		return err
	}
	it.formats = e.Formats.choose(e.Description, e.Description.sd.Fields, it.eqb.ResultFormats)
	switch e.Strategy {
	case fallback.Named:
		it.parse = !g.parsed(it.name) && (e.Parse || !g.c.Knows(it.name))
	case fallback.Shared:
		it.parse = !g.parsed(it.name) && e.Parse
	case fallback.Undecided, fallback.Unprepared:
		// The unnamed statement lasts until the next Parse of one: a run of the same statement needs it once.
		it.name = ""
		it.params = !g.lastUnnamed(e.Description)
	}
	if it.parse {
		if g.names == nil {
			g.names = make(map[string]struct{})
		}
		g.names[it.name] = struct{}{}
	}
	g.items = append(g.items, it)
	return nil
}

// parsed reports whether an earlier item of the group parses name.
func (g *Group) parsed(name string) bool {
	_, ok := g.names[name]
	return ok
}

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
	for _, name := range c.closes {
		g.p.SendDeallocate(name)
	}
	for i := range g.items {
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
		case it.parse:
			c.Parses++
			g.p.SendDeallocate(it.name)
			g.p.SendPrepare(it.name, it.e.Description.sd.SQL, it.e.Description.sd.ParamOIDs)
		}
		g.p.SendQueryPrepared(it.name, it.eqb.ParamValues, it.eqb.ParamFormats, it.formats)
	}
	if err := g.p.Sync(); err != nil {
		g.fail(err)
		return err
	}
	// Not before it is sent: with a context that is done the pipeline writes nothing, and the names would stay on the server.
	c.closes = c.closes[:0]
	return nil
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
			if it.parse && it.e.Strategy == fallback.Named {
				g.c.learned(it.e.Description, res.Fields)
			}
		case *pgconn.CloseComplete:
		default:
			g.fail(errors.New("statement: group: the answer ended early"))
		}
	}
	return nil, g.err
}

// fail keeps the first failure.
func (g *Group) fail(err error) {
	if g.err == nil {
		g.err = err
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
	}
	return g.err
}
