package outbox

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/prepare"
)

// lane is a lane whose lease this runner holds.
//
//	adopting ── its place was read ──▶ idle ── a page, or retries that are due ──▶ busy ── all calls returned ──▶ finished
//	   ▲                                ▲                                            │ recorded by the job itself       │
//	   │                                └────────────────────────────────────────────┴───────────── recorded ───────────┤
//	   └── what the database holds is not known, or somebody else has moved the lane ───────────────────────────────────┘
type lane struct {
	id      int16
	token   int64
	state   laneState
	leaving bool // give it back as soon as it rests

	progress progress
	blocked  blocked // keys that wait outside the log
	paused   bool    // too many of them: nothing is read from the log
	crashes  int     // of former owners in a row
	survived bool    // a page came to its end since, and the job has recorded that itself

	job    *job // while busy
	cancel context.CancelCauseFunc
	askAt  time.Time // while adopting: not before

	failures int // rounds in a row that were refused because of this lane
}

type laneState int8

const (
	adopting laneState = iota // its place is not known yet
	idle                      // waits for events
	busy                      // a job is with the handlers
	finished                  // what became of a job is to be recorded
)

// readopt makes the runner read again where the lane stands, not before the time given.
func (l *lane) readopt(at time.Time) { l.state, l.askAt = adopting, at }

// hasMore reports whether the log has, or may have, events behind where the lane stands; newest is the newest tick.
func (l *lane) hasMore(newest int64) bool {
	at := &l.progress.now
	return !l.paused && (at.to.id != 0 || at.from.id < newest)
}

// retryPolicy is how a dispatcher deals with events that were not handled.
type retryPolicy struct {
	maxAttempts int // 0: no limit
	backoff     func(attempt int) time.Duration
	skipDead    bool
}

// succeed notes that an event is done with.
func (l *lane) succeed(it *item) {
	if it.stored {
		l.progress.changes.add("remove", &it.Delivery, 0, "", nil, nil)
		l.blocked.remove(it.blockKey())
	}
}

// fail notes that an attempt failed, and reports whether it was the last.
func (l *lane) fail(it *item, err error, p *retryPolicy) (dead bool) {
	c := &l.progress.changes
	what := "add"
	if it.stored {
		what = "set"
	}
	k := it.blockKey()
	if p.maxAttempts > 0 && it.Attempt >= p.maxAttempts {
		c.add(what, &it.Delivery, it.Attempt, string(StateDead), nil, err)
		if it.Key == "" || p.skipDead { // in nobody's way
			if it.stored {
				l.blocked.remove(k)
			}
			return true
		}
		w := l.blocked.set(k)
		w.dead = true
		if !it.stored {
			w.rows++
		}
		return true
	}
	wait := p.backoff(it.Attempt)
	if after, ok := errors.AsType[*postponed](err); ok {
		wait = after.after
	}
	c.add(what, &it.Delivery, it.Attempt, string(StateRetrying), &wait, err)
	w := l.blocked.set(k)
	w.due, w.dead = time.Now().Add(wait), false
	if !it.stored {
		w.rows++
	}
	return false
}

// park puts an event that was not tried behind those of its key that wait already; without any it is the head, due at once.
func (l *lane) park(it *item) {
	if it.stored {
		return // it stands there
	}
	l.progress.changes.parked(it)
	l.blocked.set(it.blockKey()).rows++
}

// parked notes that an event of the log has to wait without having been tried.
func (c *changes) parked(it *item) {
	c.add("add", &it.Delivery, it.Attempt-1, string(StateParked), nil, nil)
}

// adopted is where a lane stands, as its new owner finds it.
type adopted struct {
	lane     int16
	n, token int64
	crashes  int
	at       position
	whole    bool // it stands where its row said; else a tick of the row is gone, and it stands before
	lost     bool // there is no tick before either
}

// queueAdopt adds the statement that puts the owner's tokens into the progress of lanes.
func (s *Store) queueAdopt(b *pgx.Batch, subscription, owner string, lanes []int16, found *[]adopted) {
	b.Queue(s.sql.adopt, prepare.Stable, subscription, owner, lanes).Query(func(rows pgx.Rows) error {
		var a adopted
		var fromID, toID *int64
		var fromAt, toAt *time.Time
		scan := []any{&a.lane, &a.n, &a.token, &a.crashes, &fromID, &fromAt, &toID, &toAt, &a.at.pos, &a.whole}
		_, err := pgx.ForEachRow(rows, scan, func() error {
			a.at.from, a.at.to = tickRef{}, tickRef{}
			if a.lost = fromID == nil || fromAt == nil; !a.lost {
				a.at.from = tickRef{id: *fromID, at: *fromAt}
			}
			if toID != nil && toAt != nil {
				a.at.to = tickRef{id: *toID, at: *toAt}
			}
			*found = append(*found, a)
			return nil
		})
		return err
	})
}
