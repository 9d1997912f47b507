package outbox

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/internal/txlocal"
	"github.com/bounceproof/bounceproof/prepare"
)

// Publish writes events in the caller's transaction: they are delivered if it commits, and never if it does not.
//
// With an [executor.Tx], also one that executor.TxOf finds within wrappers, the statement is queued: it rides with COMMIT in the same
// round trip, and COMMIT returns its error. With any other pgx.Tx it runs at once, unprepared, and since such a transaction has no commit hook,
// dispatchers learn of it at their next poll unless the caller calls [Store.Wake] after the commit.
//
// All events of one call are one statement. It takes the advisory locks of its keys in sorted order, those of later calls queued on the
// same transaction with them, so transactions do not deadlock over keys. A nested transaction that commits joins in this way the one around
// it. Several immediate calls in one transaction, on a plain pgx.Tx or around raw savepoints, can (40P01), as with any locks.
//
// The first call of a store reads what Migrate fixed, on the transaction's own connection; while rows are open there it is put off until
// the events are sent, and its error is that of COMMIT.
//
// Errors found before anything is sent are [*TooManyKeysError], [ErrInvalidEvent], and that of a nil transaction. On a plain pgx.Tx
// [ErrNotMigrated] leaves the transaction unharmed too.
func (s *Store) Publish(ctx context.Context, tx pgx.Tx, events ...Event) error {
	if tx == nil {
		return errors.New("outbox: publish: nil transaction")
	}
	if len(events) == 0 {
		return nil
	}
	c, err := s.columns(events)
	if err != nil {
		return err
	}
	if etx, ok := executor.TxOf(tx); ok {
		return s.enqueue(ctx, tx, etx, c)
	}
	lanes, err := s.verifyForeign(ctx, tx)
	if err != nil {
		return err
	}
	s.assignLanes(c, lanes)
	sql, args := c.statement(s.sql, nil)
	if _, err := tx.Exec(ctx, sql, unnamed(args)...); err != nil {
		return fmt.Errorf("outbox: publish: %w", err)
	}
	return nil
}

// enqueue queues the events on etx, which is the executor's transaction in tx.
func (s *Store) enqueue(ctx context.Context, tx pgx.Tx, etx executor.Tx, c *columns) error {
	known, err := s.verifyWithin(ctx, tx)
	if err != nil {
		return err
	}
	if known > 0 {
		s.assignLanes(c, known)
	}
	p := &publication{s: s, c: c}
	values := txlocal.Of(tx)
	var locks *txLocks
	var added []int64
	if values != nil && c.keyed {
		locks = locksOf(values)
		if added, err = locks.add(c); err != nil {
			return err
		}
	}
	first := locks != nil && locks.take(p, added)
	if first || known == 0 {
		err = etx.Queue(s.sql.publishOne, prepare.Stable, p) // the text is chosen when it is sent
	} else {
		sql, args := c.statement(s.sql, nil)
		err = etx.Queue(sql, args...)
	}
	if err != nil { // the transaction has ended
		for _, lock := range added {
			locks.remove(lock)
		}
		return fmt.Errorf("outbox: publish: %w", err)
	}
	s.wakeAfter(etx, values)
	return nil
}

// wakeKey says in a transaction's values that it wakes the store's dispatchers when it commits.
type wakeKey struct{ s *Store }

// wakeAfter wakes the dispatchers after the commit, once for all calls if the transaction has values.
func (s *Store) wakeAfter(tx executor.Tx, values *txlocal.Values) {
	if values != nil {
		if values.Get(wakeKey{s}) != nil {
			return
		}
		values.Set(wakeKey{s}, true)
	}
	tx.OnCommit(s.Wake)
}

// verifyWithin is verify for a transaction of the executor, which may be one that only queues: in front of its BEGIN nothing but a single
// statement is sent, so that it works behind a pooler in statement mode too. It uses no other connection: the pool, or the pooler, may have
// none to give until this transaction ends. It returns 0 when the connection is not free, and the answer has to wait.
func (s *Store) verifyWithin(ctx context.Context, tx pgx.Tx) (lanes int, err error) {
	if n := s.lanes.Load(); n > 0 {
		return int(n), nil
	}
	conn := txlocal.Conn(tx)
	if conn == nil || conn.PgConn().IsBusy() {
		return 0, nil
	}
	return s.verify(ctx, conn, pgx.QueryExecModeExec) // by no name: the connection's names are the executor's
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

// unnamed returns the arguments of a statement for a transaction that is not the executor's. In this mode pgx goes by the types of the
// arguments, and headers, which are the last bytes, are jsonb.
func unnamed(args []any) []any {
	args = slices.Clone(args)
	args[0] = pgx.QueryExecModeExec
	const headers = 6
	switch h := args[headers].(type) {
	case []byte:
		args[headers] = jsonText(h)
	case [][]byte:
		texts := make([]*string, len(h))
		for i := range h {
			texts[i] = jsonText(h[i])
		}
		args[headers] = texts
	}
	return args
}

func jsonText(b []byte) *string {
	if b == nil {
		return nil
	}
	text := string(b)
	return &text
}

// publication is a queued publishing statement whose text or arguments are decided when it is sent.
type publication struct {
	s     *Store
	c     *columns
	extra []int64 // locks of statements behind it in the queue
	sent  bool    // too late for more of them
}

// RewriteQuery implements pgx.QueryRewriter. The executor calls it when the connection is free, before it sends anything of the group.
func (p *publication) RewriteQuery(ctx context.Context, conn *pgx.Conn, _ string, _ []any) (string, []any, error) {
	if p.c.lanes == nil {
		lanes, err := p.s.verify(ctx, conn, pgx.QueryExecModeExec)
		if err != nil {
			return "", nil, err
		}
		p.s.assignLanes(p.c, lanes)
	}
	p.sent = true
	sql, args := p.c.statement(p.s.sql, p.extra)
	return sql, args[1:], nil // the option stands before the rewriter
}
