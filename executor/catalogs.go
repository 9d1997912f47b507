package executor

import (
	"sync"

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
	slab    []rows // rows in stock: one allocation for many queries, as pgxpool does for its own
	owner   *Executor
	catalog *prepare.Catalog
}

// dataOf returns what is kept with a connection. Executors that share a pool share it, and take it over from each other.
func dataOf(c *prepare.Conn) *connData {
	d, ok := c.Data.(*connData)
	if !ok {
		d = &connData{}
		c.Data = d
	}
	return d
}

// catalog returns the statements of the connection's scope.
func (ex *Executor) catalog(c *prepare.Conn) *prepare.Catalog {
	d := dataOf(c)
	if d.owner == ex {
		return d.catalog
	}
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
	d.owner, d.catalog = ex, catalog
	return catalog
}
