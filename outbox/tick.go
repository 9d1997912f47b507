package outbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/prepare"
)

// ErrRebaseNeeded stops a dispatcher whose log was moved into another cluster, or set back behind what it had seen: the
// transaction ids in it mean something else there, and events would be lost silently.
var ErrRebaseNeeded = errors.New("the log was restored into another cluster")

// begin opens a transaction of a group. The level is always said: a role may have another default, and under REPEATABLE READ a
// tick's snapshot would be older than its lock, and a lost compare-and-swap would be an error.
const begin = "begin isolation level read committed"

// tickRef names a tick. Both parts count: after a failover that lost the last ticks, ids are issued again.
type tickRef struct {
	id int64
	at time.Time
}

// tickResult is what the tick statement tells.
type tickResult struct {
	same   bool  // the cluster is the one of the log
	newest int64 // the newest tick, whoever made it
	added  bool
	due    *float64 // seconds until a scheduled event is due; nil: there is none

	cache, increment int64 // of the sequence
	cycle            bool
}

// check returns why no tick could be made; nil: nothing is wrong.
func (r *tickResult) check() error {
	if !r.same {
		return ErrRebaseNeeded
	}
	return checkOptions(r.cache, r.increment, r.cycle)
}

// queueTick adds the tick's transaction to a group. What follows it in the group sees the tick.
func (s *Store) queueTick(b *pgx.Batch, r *tickResult) {
	b.Queue(begin)
	b.Queue(s.sql.tickLock, prepare.Stable, lockNamed(s.schema, "tick"))
	b.Queue(s.sql.tick, prepare.Stable).QueryRow(func(row pgx.Row) error {
		return row.Scan(&r.same, &r.newest, &r.added, &r.due, &r.cache, &r.increment, &r.cycle)
	})
	b.Queue("commit")
}

// tick makes a tick if something is new and returns the newest.
func (s *Store) tick(ctx context.Context) (int64, error) {
	var b pgx.Batch
	var r tickResult
	s.queueTick(&b, &r)
	if err := s.ex.SendBatch(ctx, &b).Close(); err != nil {
		return 0, fmt.Errorf("outbox: tick: %w", err)
	}
	if err := r.check(); err != nil {
		return 0, fmt.Errorf("outbox: tick: %w", err)
	}
	return r.newest, nil
}
