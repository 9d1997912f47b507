package executor

import (
	"sync"

	"github.com/hashicorp/golang-lru/v2/simplelru"
)

// backendCapacity is how many server connections an executor remembers names for. A pooler has some tens.
const backendCapacity = 256

// sharedNames is what an executor knows, under Shared, of the names on the server connections behind a pooler. Safe for concurrent use.
//
// It is belief, not truth: a server connection is replaced, or somebody says DISCARD ALL. A wrong belief costs one miss.
type sharedNames struct {
	mu       sync.Mutex // guards the fields below
	capacity int
	names    *simplelru.LRU[string, struct{}] // used anywhere
	backends *simplelru.LRU[uint32, *simplelru.LRU[string, struct{}]]
}

func newSharedNames(capacity int) *sharedNames {
	n := &sharedNames{capacity: capacity}
	n.names, _ = simplelru.NewLRU[string, struct{}](capacity, nil)
	n.backends, _ = simplelru.NewLRU[uint32, *simplelru.LRU[string, struct{}]](backendCapacity, nil)
	return n
}

// seen reports whether the executor has used the name anywhere.
func (n *sharedNames) seen(name string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	_, ok := n.names.Get(name)
	return ok
}

// used records that the executor has used the name somewhere.
func (n *sharedNames) used(name string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.names.Add(name, struct{}{})
}

// has reports whether the server connection is believed to have the name.
func (n *sharedNames) has(backend uint32, name string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	names, ok := n.backends.Get(backend)
	if !ok {
		return false
	}
	_, ok = names.Get(name)
	return ok
}

// add records that the server connection has the name. Backend 0 is none.
func (n *sharedNames) add(backend uint32, name string) {
	if backend == 0 {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	names, ok := n.backends.Get(backend)
	if !ok {
		names, _ = simplelru.NewLRU[string, struct{}](n.capacity, nil)
		n.backends.Add(backend, names)
	}
	names.Add(name, struct{}{})
}

// forget drops what is believed of a server connection, after it proved wrong.
func (n *sharedNames) forget(backend uint32) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.backends.Remove(backend)
}
