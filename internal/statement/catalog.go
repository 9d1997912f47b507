package statement

import (
	"sync"

	"github.com/hashicorp/golang-lru/v2/simplelru"
)

// Capacities of the two halves of a Catalog, in statements.
const (
	stableCapacity = 1000
	freshCapacity  = 500
)

// Catalog is what one executor knows of the texts it has met, shared by all its connections. Safe for concurrent use.
//
// It has two halves, each a bounded LRU: stable statements, and fresh ones that are still being counted. Generated SQL passes through
// the fresh half only, so however much of it there is, it never evicts a stable statement.
type Catalog struct {
	threshold int
	salt      string

	mu     sync.Mutex // guards the fields below; nothing is called under it that blocks
	stable *simplelru.LRU[string, *Statement]
	fresh  *simplelru.LRU[string, *fresh]
}

type fresh struct {
	st   *Statement
	uses int
}

// NewCatalog returns an empty catalog. A text becomes stable by itself at its threshold-th use (1: at once; negative: only when
// marked; 0 is for the caller to replace by its default). salt goes into every name, see [Name].
func NewCatalog(threshold int, salt string) *Catalog {
	c := &Catalog{threshold: threshold, salt: salt}
	// The only error is a size below 1.
	c.stable, _ = simplelru.NewLRU[string, *Statement](stableCapacity, nil)
	c.fresh, _ = simplelru.NewLRU[string, *fresh](freshCapacity, nil)
	return c
}

// Lookup returns the statement of a text and counts the use. marked is true when the caller used [Stable]: the statement is stable
// from then on.
func (c *Catalog) Lookup(sql string, marked bool) *Statement {
	c.mu.Lock()
	defer c.mu.Unlock()
	if st, ok := c.stable.Get(sql); ok {
		return st
	}
	f, ok := c.fresh.Get(sql)
	if !ok {
		f = &fresh{st: newStatement(sql, c.salt)}
	}
	f.uses++
	if marked || (c.threshold > 0 && f.uses >= c.threshold) {
		f.st.stable.Store(true)
		c.fresh.Remove(sql)
		c.stable.Add(sql, f.st)
		return f.st
	}
	if !ok {
		c.fresh.Add(sql, f)
	}
	return f.st
}

// Len returns how many stable and how many fresh statements the catalog holds.
func (c *Catalog) Len() (stable, fresh int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.stable.Len(), c.fresh.Len()
}
