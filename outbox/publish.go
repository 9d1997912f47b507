package outbox

import (
	"context"
	"fmt"
	"reflect"
	"slices"
	"sync"
	"weak"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/prepare"
)

// Publish writes events in the caller's transaction: they are delivered if it commits, and never if it does not.
//
// With an [executor.Tx] the statement is queued: it rides with COMMIT in the same round trip, and COMMIT returns its error.
// With any other pgx.Tx it runs at once, and since such a transaction has no commit hook, dispatchers learn of it at their
// next poll unless the caller calls [Store.Wake] after the commit.
//
// All events of one call are one statement. It takes the advisory locks of its keys in sorted order, those of later calls queued on the
// same transaction with them, so transactions do not deadlock over keys. Several immediate calls in one transaction, on a plain
// pgx.Tx or around savepoints, can (40P01), as with any locks. The first call of a store reads what Migrate fixed.
//
// Errors found before anything is sent are [*TooManyKeysError] and [ErrInvalidEvent].
func (s *Store) Publish(ctx context.Context, tx pgx.Tx, events ...Event) error {
	if len(events) == 0 {
		return nil
	}
	etx, ok := tx.(executor.Tx)
	lanes, err := s.verify(ctx, s.verifier(tx, ok))
	if err != nil {
		return err
	}
	c, err := s.columns(events, lanes)
	if err != nil {
		return err
	}
	if !ok {
		sql, args := c.statement(s.sql, nil)
		if _, err := tx.Exec(ctx, sql, args...); err != nil {
			return fmt.Errorf("outbox: publish: %w", err)
		}
		return nil
	}
	if !c.keyed {
		sql, args := c.statement(s.sql, nil)
		return queue(etx, s.Wake, sql, args...)
	}
	k, err := s.transactions.keysOf(etx, c)
	if err != nil {
		return err
	}
	if k.first == nil {
		k.first = c
		committed := func() { s.transactions.forget(etx); s.Wake() }
		return queue(etx, committed, s.sql.publishOne, prepare.Stable, &publication{s: s, c: c, keys: k})
	}
	sql, args := c.statement(s.sql, nil)
	return queue(etx, nil, sql, args...)
}

// queue adds a publishing statement to the transaction, and committed to what runs after its commit.
func queue(tx executor.Tx, committed func(), sql string, args ...any) error {
	if err := tx.Queue(sql, args...); err != nil {
		return fmt.Errorf("outbox: publish: %w", err)
	}
	if committed != nil {
		tx.OnCommit(committed)
	}
	return nil
}

// verifier returns what to read the fixed facts with: not the caller's transaction if it is one that may never need more than COMMIT, so
// that publishing works in statement mode too; but neither a second connection from a pool that may have none to give.
func (s *Store) verifier(tx pgx.Tx, ours bool) rowQuerier {
	if st := s.ex.Pool().Stat(); ours && st.AcquiredConns() < st.MaxConns() {
		return s.ex
	}
	return tx
}

// statement chooses the text for columns; extra are locks to be taken with their own.
func (c *columns) statement(sql *statements, extra []int64) (string, []any) {
	switch {
	case c.special:
		return sql.publishAny, []any{
			prepare.Stable, c.lanes, c.locks, c.types, c.keys, c.payloads, c.headers, c.dues, c.dedups, extra,
		}
	case len(c.lanes) == 1 && len(extra) == 0:
		return sql.publishOne, []any{prepare.Stable, c.lanes[0], c.locks[0], c.types[0], c.keys[0], c.payloads[0], c.headers[0]}
	}
	locks := c.locks
	if len(extra) > 0 {
		locks = slices.Clone(locks)
		for i := range extra {
			locks = append(locks, &extra[i])
		}
	}
	return sql.publishMany, []any{prepare.Stable, c.lanes, locks, c.types, c.keys, c.payloads, c.headers}
}

// publication is the first keyed statement that is queued on a transaction. What it takes locks on is decided when it is sent.
type publication struct {
	s    *Store
	c    *columns
	keys *txKeys
}

// RewriteQuery implements pgx.QueryRewriter.
func (p *publication) RewriteQuery(context.Context, *pgx.Conn, string, []any) (string, []any, error) {
	p.keys.sent = true
	sql, args := p.c.statement(p.s.sql, p.keys.extra)
	return sql, args[1:], nil // the option stands before the rewriter
}

// txKeys are the keys that one transaction has published so far. Like the transaction it is not safe for concurrent use.
type txKeys struct {
	tx    executor.Tx // kept, so that its address stays its own
	all   map[string]struct{}
	first *columns // of the statement that takes the locks
	extra []int64  // locks of later statements
	sent  bool     // the first statement is on its way: too late for more
}

// transactions finds the keys of a transaction. The only strong references are those of the transaction's own queue, so nothing
// outlives one that is rolled back, of which nobody tells. One that is not found is just as right, only its locks are not sorted across
// calls.
type transactions struct {
	mu   sync.Mutex // guards byTx
	byTx map[uintptr]weak.Pointer[txKeys]
}

// tidyAt is how many entries there are before those of transactions that are gone are dropped.
const tidyAt = 1024

// keysOf returns the keys of a transaction with those of c added.
func (t *transactions) keysOf(tx executor.Tx, c *columns) (*txKeys, error) {
	k := t.find(tx)
	if k == nil || k.sent {
		next := &txKeys{tx: tx, all: make(map[string]struct{})}
		if k != nil {
			next.all = k.all
		}
		k = next
		t.remember(tx, k)
	}
	added := make([]string, 0, len(c.keys))
	for i, key := range c.keys {
		if key == nil {
			continue
		}
		if _, ok := k.all[*key]; ok {
			continue
		}
		k.all[*key] = struct{}{}
		added = append(added, *key)
		if k.first != nil {
			k.extra = append(k.extra, *c.locks[i])
		}
	}
	if n := len(k.all); n > MaxKeys {
		for _, key := range added { // the transaction goes on without these
			delete(k.all, key)
		}
		if k.first != nil {
			k.extra = k.extra[:len(k.extra)-len(added)]
		}
		return nil, &TooManyKeysError{Keys: n}
	}
	return k, nil
}

func addressOf(tx executor.Tx) (uintptr, bool) {
	v := reflect.ValueOf(tx)
	if v.Kind() != reflect.Pointer {
		return 0, false
	}
	return v.Pointer(), true
}

func (t *transactions) find(tx executor.Tx) *txKeys {
	at, ok := addressOf(tx)
	if !ok {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.byTx[at].Value()
}

func (t *transactions) remember(tx executor.Tx, k *txKeys) {
	at, ok := addressOf(tx)
	if !ok {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.byTx) >= tidyAt {
		for at, p := range t.byTx {
			if p.Value() == nil {
				delete(t.byTx, at)
			}
		}
	}
	if t.byTx == nil {
		t.byTx = make(map[uintptr]weak.Pointer[txKeys])
	}
	t.byTx[at] = weak.Make(k)
}

func (t *transactions) forget(tx executor.Tx) {
	if at, ok := addressOf(tx); ok {
		t.mu.Lock()
		defer t.mu.Unlock()
		delete(t.byTx, at)
	}
}
