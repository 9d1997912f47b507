package outbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/executor"
)

// PublishNow writes events in a transaction of their own, for callers that have no rows to write with them. When it returns nil they are
// committed.
//
// Concurrent calls share a statement and a commit: the first is sent at once, what arrives meanwhile goes together next, at most 1,000 events, [MaxKeys] keys and 1 MiB
// of payloads. There is no timer, and a lone call waits for nobody. Each call stays whole, and gets its own outcome: where the database refuses a shared statement
// for what is in it, the group is halved and tried again until only the refused call fails. A call that waits for a key, because a transaction
// elsewhere holds it, holds up no other keys: after 10 ms another group is sent, up to four at a time; each takes a connection of the pool.
//
// The events are sent with the values of the context of one of the calls, and until all calls of the group have given up. The error of a call whose context
// ends has ctx.Err() in its chain, and [executor.ErrCommitUnknown] if the events may have been committed; so has that of a connection which was lost
// before the answer. To repeat such a call safely, give the events a DedupKey. Errors found before anything is sent are [*TooManyKeysError] and
// [ErrInvalidEvent].
func (s *Store) PublishNow(ctx context.Context, events ...Event) error {
	if len(events) == 0 {
		return nil
	}
	c, err := s.columns(events)
	if err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("outbox: publish: %w", err)
	}
	call := &groupCall{ctx: ctx, c: c, done: make(chan error, 1)}
	s.groups.add(call)
	late := time.NewTimer(stuckAfter)
	defer late.Stop()
	for {
		select {
		case err = <-call.done:
		case <-ctx.Done():
			err = s.groups.leave(call)
		case <-late.C:
			s.groups.relieve()
			late.Reset(stuckAfter)
			continue
		}
		if err != nil {
			return fmt.Errorf("outbox: publish: %w", err)
		}
		return nil
	}
}

// publishGroup is what a group sends: the queue of a transaction that has nothing else, one round trip.
func (s *Store) publishGroup(ctx context.Context, calls []*groupCall) error {
	c := calls[0].c
	if len(calls) > 1 {
		c = new(columns)
		for _, call := range calls {
			c.append(call.c)
		}
	}
	return s.ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
		return s.enqueue(ctx, tx, tx, c)
	})
}

// append adds the events of d behind those of c, whose lanes are still to be assigned.
func (c *columns) append(d *columns) {
	c.locks = append(c.locks, d.locks...)
	c.types = append(c.types, d.types...)
	c.keys = append(c.keys, d.keys...)
	c.payloads = append(c.payloads, d.payloads...)
	c.headers = append(c.headers, d.headers...)
	c.dues = append(c.dues, d.dues...)
	c.dedups = append(c.dedups, d.dedups...)
	c.keyed = c.keyed || d.keyed
	c.special = c.special || d.special
}

// refusedForContent reports whether an error is the server's refusal of a statement for something in it that another half of its events may
// not have: bad data, a constraint, a limit, a trigger's exception; or a deadlock, which fewer keys may avoid. An ERROR aborts the
// statement's transaction, so it did not commit; a FATAL may have come after the commit.
func refusedForContent(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	if !ok || pgErr.SeverityUnlocalized != "ERROR" || len(pgErr.Code) != 5 || errors.Is(err, executor.ErrCommitUnknown) {
		return false
	}
	switch pgErr.Code[:2] {
	case "22", "23", "40", "54", "P0":
		return true
	}
	return false
}
