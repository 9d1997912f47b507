package executor

import (
	cryptorand "crypto/rand"
	"encoding/hex"
	"errors"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/hashicorp/golang-lru/v2/simplelru"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/internal/statement"
	"github.com/bounceproof/bounceproof/prepare"
)

// backendCapacity is how many server connections an executor remembers names for. A pooler has some tens.
const backendCapacity = 256

// server is a server connection behind a pooler, as it answered a transaction. Its mark is what the prepared statement says there that every
// executor keeps on every server connection: whatever throws all statements away throws the mark away too, and who finds it missing makes a
// new one, with another value. So names that were seen under the same mark are there.
type server struct {
	pid  uint32 // 0 is not known
	mark string // "" is not known
}

// sharedNames is what an executor knows, under Shared, of the names on the server connections behind a pooler. Safe for concurrent use.
type sharedNames struct {
	markName    string
	capacity    int
	ignoreMarks bool         // in the test that shows what they are for
	evictions   atomic.Int64 // names that fell out of names since somebody last closed such, less a number at random

	mu       sync.Mutex                       // guards the fields below
	marked   bool                             // a mark was seen, or made
	names    *simplelru.LRU[string, struct{}] // used anywhere; at most capacity
	evicted  []string                         // the last that fell out of names, oldest first
	dropped  int64                            // how many that fell out before them are not kept any more
	backends *simplelru.LRU[uint32, *backend] // by process id
}

// backend is what is known of one server connection.
type backend struct {
	names  *simplelru.LRU[string, string] // by name, under which mark it was seen; a name under another one than the present is believed to be gone
	closed int64                          // of all names that ever were evicted, how many have been closed here
}

const (
	// closeBatch is how many evicted names are worth a round trip to close them.
	closeBatch = 32
	// evictedCapacity is how many evicted names are remembered for the server connections where they have not been closed.
	evictedCapacity = 1024
)

func newSharedNames(capacity int, salt string) *sharedNames {
	n := &sharedNames{capacity: capacity, markName: prepare.Name("bounceproof: mark of a server connection", nil, salt)}
	n.names, _ = simplelru.NewLRU(capacity, func(name string, _ struct{}) {
		n.evictions.Add(1)
		if n.evicted = append(n.evicted, name); len(n.evicted) > evictedCapacity {
			n.evicted, n.dropped = append(n.evicted[:0:0], n.evicted[closeBatch:]...), n.dropped+closeBatch
		}
	})
	n.backends, _ = simplelru.NewLRU[uint32, *backend](backendCapacity, nil)
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

// has reports whether the server connection has the name: it was seen there since all names were last thrown away.
func (n *sharedNames) has(on server, name string) bool {
	if on.mark == "" {
		return false
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	b, ok := n.backends.Get(on.pid)
	if !ok {
		return false
	}
	mark, ok := b.names.Get(name)
	return ok && (mark == on.mark || n.ignoreMarks)
}

// add records that the server connection has the name. Without a mark there is nothing to believe it under.
func (n *sharedNames) add(on server, name string) {
	if on.mark == "" {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.backendLocked(on.pid).names.Add(name, on.mark)
}

// backendLocked returns what is known of a server connection. The caller holds mu.
func (n *sharedNames) backendLocked(pid uint32) *backend {
	b, ok := n.backends.Get(pid)
	if !ok {
		b = &backend{}
		b.names, _ = simplelru.NewLRU[string, string](n.capacity, nil)
		n.backends.Add(pid, b)
	}
	return b
}

// forget drops what is believed of a server connection, after it proved wrong.
func (n *sharedNames) forget(pid uint32) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if b, ok := n.backends.Peek(pid); ok {
		b.names.Purge()
	}
}

// doubt drops the belief that any server connection has the name: a Close went to one of them, and its Parse failed.
func (n *sharedNames) doubt(name string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, b := range n.backends.Values() {
		b.names.Remove(name)
	}
}

// owes reports whether there are evicted names enough to close them.
func (n *sharedNames) owes() bool { return n.evictions.Load() >= closeBatch }

// takeEvicted returns the names to close on a server connection, and takes them for closed there. Nobody knows on which server connections a
// name is that was parsed outside of a transaction, so it is closed on each that comes along: what is not there is closed without harm.
func (n *sharedNames) takeEvicted(pid uint32) []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.evictions.Store(rand.Int64N(closeBatch) - closeBatch/2) // or a round of servers and one of requests could meet at the same one for ever
	b := n.backendLocked(pid)
	var names []string
	for _, name := range n.evicted[max(0, min(b.closed-n.dropped, int64(len(n.evicted)))):] {
		if !n.names.Contains(name) { // it has come back meanwhile
			names = append(names, name)
			b.names.Remove(name)
		}
	}
	b.closed = n.dropped + int64(len(n.evicted))
	return names
}

// question is what rides in front of a statement to find out about its server connection.
type question uint8

const (
	askNothing question = iota
	askPID              // unnamed: it cannot fail
	askMark             // the mark, which may be missing
	makeMark            // a new mark
)

// markQuestion returns what to ask in the first group of a transaction.
func (n *sharedNames) markQuestion(missing bool) question {
	n.mu.Lock()
	defer n.mu.Unlock()
	if missing || !n.marked {
		n.marked = true
		return makeMark
	}
	return askMark
}

// mark is the execution that asks for the mark, or makes one.
func (n *sharedNames) mark(q question) *statement.Description {
	sql := ""
	if q == makeMark {
		var b [8]byte
		_, _ = cryptorand.Read(b[:]) // never fails
		sql = "select pg_backend_pid(), '" + hex.EncodeToString(b[:]) + "'"
	}
	return statement.OfText(n.markName, sql)
}

// isMarkMissing reports whether a server connection has no mark.
func (n *sharedNames) isMarkMissing(err error) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && pgErr.Code == "26000" && pgErr.Routine == "FetchPreparedStatement" && strings.Contains(pgErr.Message, n.markName)
}
