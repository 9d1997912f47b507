package executor

import (
	"sync"

	"github.com/hashicorp/golang-lru/v2/simplelru"

	"github.com/bounceproof/bounceproof/internal/selector"
	"github.com/bounceproof/bounceproof/internal/statement"
)

// catalogs are an executor's statements, one catalog for each scope of connections: where a pool's hooks give its connections different search
// paths, the same text means other tables. Most pools have one scope. Safe for concurrent use.
type catalogs struct {
	mu      sync.Mutex // guards what follows
	byScope map[string]*statement.Catalog
	byPath  *simplelru.LRU[string, *statement.Catalog] // by scope and search_path, for the few texts that need it; nil at first
}

// pathCapacity is for how many search paths statements are kept: those of tenants that are in use.
const pathCapacity = 256

// connData is what an executor keeps with a connection.
type connData struct {
	single single // in stock: a connection runs one statement at a time
	slab   []rows // rows in stock: one allocation for many queries, as pgxpool does for its own

	// What follows is of the executor that used the connection last.
	owner   *Executor
	epoch   int64 // the number of the selector's decision that the connection's names belong to
	catalog *statement.Catalog
	stable  map[string]*statement.Statement // of the catalog's, those that this connection has used: no lock, no recency to keep
}

// dataOf returns what is kept with a connection.
func dataOf(c *statement.Conn) *connData {
	d, ok := c.Data.(*connData)
	if !ok {
		d = &connData{}
		c.Data = d
	}
	return d
}

// statement looks a text up for a connection.
func (ex *Executor) statement(c *statement.Conn, sql string, marked bool) *statement.Statement {
	d := dataOf(c)
	if d.owner != ex {
		d.owner, d.epoch, d.catalog, d.stable = ex, 0, ex.catalog(c), make(map[string]*statement.Statement)
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

// statementUnder is statement for a text whose types depend on what the transaction has said of search_path.
func (ex *Executor) statementUnder(c *statement.Conn, path, sql string, marked bool) *statement.Statement {
	cs := &ex.catalogs
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if cs.byPath == nil {
		cs.byPath, _ = simplelru.NewLRU[string, *statement.Catalog](pathCapacity, nil) // the only error is a size below 1
	}
	key := c.Scope + "\x00\x00" + path
	catalog, ok := cs.byPath.Get(key)
	if !ok {
		catalog = statement.NewCatalog(ex.cfg.PrepareThreshold, ex.cfg.StatementSalt+"\x00"+path)
		cs.byPath.Add(key, catalog)
	}
	return catalog.Lookup(sql, marked)
}

// resetNames makes the connection forget its names when the selector has decided anew.
func (ex *Executor) resetNames(c *statement.Conn, decision *selector.Decision) {
	if d := dataOf(c); d.owner != ex || d.epoch != decision.Number {
		c.Reset(ex, decision.Number)
		if d.owner == ex {
			d.epoch = decision.Number
		}
	}
}

// catalog returns the statements of the connection's scope.
func (ex *Executor) catalog(c *statement.Conn) *statement.Catalog {
	cs := &ex.catalogs
	cs.mu.Lock()
	defer cs.mu.Unlock()
	catalog, ok := cs.byScope[c.Scope]
	if !ok {
		catalog = statement.NewCatalog(ex.cfg.PrepareThreshold, ex.cfg.StatementSalt)
		if cs.byScope == nil {
			cs.byScope = make(map[string]*statement.Catalog, 1)
		}
		cs.byScope[c.Scope] = catalog
	}
	return catalog
}
