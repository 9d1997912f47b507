package executor

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"sync"

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
	ignoreMarks bool // in the test that shows what they are for

	mu       sync.Mutex                       // guards the fields below
	marked   bool                             // a mark was seen, or made
	names    *simplelru.LRU[string, struct{}] // used anywhere
	backends *simplelru.LRU[uint32, *backend] // by process id
	owing    int                              // server connections that are owed closeBatch names or more
}

// backend is what is known of one server connection. A name that is known under another mark than the present one is believed to be gone, and
// counted all the same.
type backend struct {
	names *simplelru.LRU[string, string] // by name, under which mark it was seen; at most capacity
	owed  []string                       // names that fell out of them, still on the server
}

// closeBatch is how many names a server connection has too many when it is worth a round trip to close them.
const closeBatch = 32

func newSharedNames(capacity int, salt string) *sharedNames {
	n := &sharedNames{capacity: capacity, markName: prepare.Name("bounceproof: mark of a server connection", nil, salt)}
	n.names, _ = simplelru.NewLRU[string, struct{}](capacity, nil)
	n.backends, _ = simplelru.NewLRU(backendCapacity, func(_ uint32, b *backend) {
		if len(b.owed) >= closeBatch {
			n.owing--
		}
	})
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

// add records that the server connection has the name, seen under the mark if that is known. Process id 0 is none.
func (n *sharedNames) add(on server, name string) {
	if on.pid == 0 {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	b, ok := n.backends.Get(on.pid)
	if !ok {
		b = &backend{}
		b.names, _ = simplelru.NewLRU(n.capacity, func(name, _ string) {
			if b.owed = append(b.owed, name); len(b.owed) == closeBatch {
				n.owing++
			}
		})
		n.backends.Add(on.pid, b)
	}
	if mark, ok := b.names.Peek(name); ok && on.mark == "" {
		on.mark = mark // no news
	}
	b.names.Add(name, on.mark)
}

// forget drops what is believed of a server connection, after it proved wrong.
func (n *sharedNames) forget(pid uint32) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if b, ok := n.backends.Peek(pid); ok {
		for _, name := range b.names.Keys() {
			b.names.Add(name, "") // in its order, so nothing else changes
		}
	}
}

// doubt drops the belief that any server connection has the name: a Close went to one of them, and its Parse failed.
func (n *sharedNames) doubt(name string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, b := range n.backends.Values() {
		if b.names.Contains(name) {
			b.names.Add(name, "")
		}
	}
}

// owes reports whether a server connection has so many names too many that they should be closed.
func (n *sharedNames) owes() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.owing > 0
}

// takeOwed returns the names to close on a server connection, nil if there are too few to be worth it.
func (n *sharedNames) takeOwed(pid uint32) []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	b, ok := n.backends.Peek(pid)
	if !ok || len(b.owed) < closeBatch {
		return nil
	}
	var names []string
	for _, name := range b.owed {
		if !b.names.Contains(name) { // it may have come back meanwhile
			names = append(names, name)
		}
	}
	b.owed = nil
	n.owing--
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
		_, _ = rand.Read(b[:]) // never fails, crypto/rand
		sql = "select pg_backend_pid(), '" + hex.EncodeToString(b[:]) + "'"
	}
	return statement.OfText(n.markName, sql)
}

// isMarkMissing reports whether a server connection has no mark.
func (n *sharedNames) isMarkMissing(err error) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && pgErr.Code == "26000" && pgErr.Routine == "FetchPreparedStatement" && containsName(pgErr.Message, n.markName)
}
