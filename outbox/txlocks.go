package outbox

import (
	"slices"

	"github.com/bounceproof/bounceproof/internal/txlocal"
)

// locksKey is where a transaction's values hold its *txLocks.
type locksKey struct{}

// txLocks are the locks of the keys that one transaction, outermost or nested, has published under, in whatever store: one lock a key.
// Like the transaction they are not safe for concurrent use.
type txLocks struct {
	open  map[int64]int // of the outermost transaction and all open within it: how many of them have the lock
	own   map[int64]struct{}
	first *publication // the statement that takes the locks of those behind it too; nil: none
}

var _ txlocal.Nested = (*txLocks)(nil)

// locksOf returns the locks of the transaction that the values belong to.
func locksOf(v *txlocal.Values) *txLocks {
	if l, ok := v.Get(locksKey{}).(*txLocks); ok {
		return l
	}
	l := &txLocks{own: make(map[int64]struct{})}
	if parent := v.Parent(); parent != nil {
		l.open = locksOf(parent).open
	} else {
		l.open = make(map[int64]int)
	}
	v.Set(locksKey{}, l)
	return l
}

// add notes the locks of c and returns those that are new to this transaction.
func (l *txLocks) add(c *columns) (added []int64, err error) {
	for lock := range c.keyLocks() {
		if _, ok := l.own[lock]; ok {
			continue
		}
		l.own[lock] = struct{}{}
		l.open[lock]++
		added = append(added, lock)
	}
	if n := len(l.open); n > MaxKeys {
		for _, lock := range added { // the transaction goes on without these
			l.remove(lock)
		}
		return nil, &TooManyKeysError{Keys: n}
	}
	return added, nil
}

func (l *txLocks) remove(lock int64) {
	delete(l.own, lock)
	if l.open[lock]--; l.open[lock] <= 0 {
		delete(l.open, lock)
	}
}

// take makes p the statement that takes locks first, and reports true, or gives the added locks to the one that there is. One that has been
// sent can take no more, so the next one begins anew.
func (l *txLocks) take(p *publication, added []int64) (first bool) {
	if l.first == nil || l.first.sent {
		l.first = p
		return true
	}
	l.first.extra = append(l.first.extra, added...)
	return false
}

// Committed implements [txlocal.Nested]. The queue of a nested transaction goes behind the parent's, so the statement that is first there
// can take these locks as well.
func (l *txLocks) Committed(parent *txlocal.Values) {
	p := locksOf(parent)
	for lock := range l.own {
		if _, ok := p.own[lock]; ok {
			l.open[lock]--
		}
		p.own[lock] = struct{}{}
	}
	if l.first == nil || l.first.sent {
		return
	}
	p.take(l.first, append(slices.Collect(l.first.c.keyLocks()), l.first.extra...))
}

// RolledBack implements [txlocal.Nested].
func (l *txLocks) RolledBack() {
	for lock := range l.own {
		l.remove(lock)
	}
}
