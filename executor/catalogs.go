package executor

import (
	"sync"

	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/prepare"
)

// catalogs are an executor's statements, one catalog for each scope of connections: where a pool's hooks give its connections different search
// paths, the same text means other tables. Most pools have one scope. Safe for concurrent use.
type catalogs struct {
	mu      sync.Mutex // guards byScope
	byScope map[string]*prepare.Catalog
}

// connData is what an executor keeps with a connection.
type connData struct {
	slab []rows // rows in stock: one allocation for many queries, as pgxpool does for its own

	// What follows is of the executor that used the connection last.
	owner   *Executor
	era     uint64 // the latch's decision that the connection's names belong to
	catalog *prepare.Catalog
	stable  map[string]*prepare.Statement // of the catalog's, those that this connection has used: no lock, no recency to keep
}

// dataOf returns what is kept with a connection.
func dataOf(c *prepare.Conn) *connData {
	d, ok := c.Data.(*connData)
	if !ok {
		d = &connData{}
		c.Data = d
	}
	return d
}

// statement looks a text up for a connection.
func (ex *Executor) statement(c *prepare.Conn, sql string, marked bool) *prepare.Statement {
	d := dataOf(c)
	if d.owner != ex {
		d.owner, d.era, d.catalog, d.stable = ex, 0, ex.catalog(c), make(map[string]*prepare.Statement)
	}
	if st, ok := d.stable[sql]; ok {
		return st
	}
	st := d.catalog.Lookup(sql, marked)
	if st.Stable() {
		if len(d.stable) >= ex.cfg.StatementCapacity {
			clear(d.stable)
		}
		d.stable[sql] = st
	}
	return st
}

// renew makes the connection forget its names when the latch has decided anew.
func (ex *Executor) renew(c *prepare.Conn, decision *fallback.Decision) {
	if d := dataOf(c); d.owner != ex || d.era != decision.Number {
		c.Renew(ex, decision.Number)
		if d.owner == ex {
			d.era = decision.Number
		}
	}
}

// catalog returns the statements of the connection's scope.
func (ex *Executor) catalog(c *prepare.Conn) *prepare.Catalog {
	cs := &ex.catalogs
	cs.mu.Lock()
	defer cs.mu.Unlock()
	catalog, ok := cs.byScope[c.Scope]
	if !ok {
		catalog = prepare.NewCatalog(ex.cfg.PrepareThreshold, ex.cfg.StatementSalt)
		if cs.byScope == nil {
			cs.byScope = make(map[string]*prepare.Catalog, 1)
		}
		cs.byScope[c.Scope] = catalog
	}
	return catalog
}
