package outbox

import (
	"errors"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/prepare"
)

// maxBlocked is how many keys of a lane may wait outside the log before the lane reads no further: their names are in memory.
const maxBlocked = 10_000

// maxErrorText is how much of a handler's error is stored.
const maxErrorText = 2000

// failKey is what failed events wait by: their key, or themselves.
type failKey struct {
	key string
	seq int64 // of an event without a key, else 0
}

func (d *Delivery) failKey() failKey {
	if d.Key == "" {
		return failKey{seq: d.Seq}
	}
	return failKey{key: d.Key}
}

// waiting is a key with events outside the log. While there is one, what the log brings for the key is put behind it.
type waiting struct {
	rows int // events outside the log, except dead ones that are skipped
	due  time.Time
	dead bool // the head is dead and blocks the key
}

// blocked are the waiting keys of a lane. The owner of the lane alone changes them: loaded when the lane was taken, then
// changed together with the database. Whoever else writes bumps the lane's token, and they are loaded again.
type blocked struct {
	keys map[failKey]*waiting
	due  time.Time // nothing is due before; zero: unknown
}

func (b *blocked) has(k failKey) bool { return b.keys[k] != nil }

func (b *blocked) full() bool { return len(b.keys) > maxBlocked }

func (b *blocked) set(k failKey) *waiting {
	if b.keys == nil {
		b.keys = make(map[failKey]*waiting)
	}
	w := b.keys[k]
	if w == nil {
		w = &waiting{}
		b.keys[k] = w
	}
	b.due = time.Time{}
	return w
}

// take removes n rows from a key and frees it with the last.
func (b *blocked) take(k failKey) {
	w := b.keys[k]
	if w == nil {
		return
	}
	b.due = time.Time{}
	if w.rows--; w.rows <= 0 {
		delete(b.keys, k)
		return
	}
	w.due, w.dead = time.Time{}, false
}

// nextDue returns when the next key is due; false when none will be.
func (b *blocked) nextDue() (time.Time, bool) {
	if len(b.keys) == 0 {
		return time.Time{}, false
	}
	if !b.due.IsZero() {
		return b.due, b.due != never
	}
	b.due = never
	for _, w := range b.keys {
		if !w.dead && w.due.Before(b.due) {
			b.due = w.due
		}
	}
	if b.due.IsZero() {
		b.due = time.Unix(0, 0) // due, and known
	}
	return b.due, b.due != never
}

var never = time.Unix(1<<40, 0)

// dueKeys returns up to n keys that are due.
func (b *blocked) dueKeys(now time.Time, n int) (keys []failKey) {
	if at, ok := b.nextDue(); !ok || at.After(now) {
		return nil
	}
	for k, w := range b.keys {
		if !w.dead && !w.due.After(now) {
			if keys = append(keys, k); len(keys) == n {
				break
			}
		}
	}
	return keys
}

// changes are what became of events, as the parameters of complete_failed.sql.
type changes struct {
	lanes    []int16
	seqs     []int64
	what     []string
	attempts []int32
	states   []string
	waits    []*float64
	errors   []*string
}

func (c *changes) empty() bool { return c == nil || len(c.seqs) == 0 }

func (c *changes) add(what string, d *Delivery, attempt int, state string, wait *time.Duration, err error) {
	c.lanes = append(c.lanes, int16(d.Lane)) //nolint:gosec // a lane fits
	c.seqs = append(c.seqs, d.Seq)
	c.what = append(c.what, what)
	c.attempts = append(c.attempts, int32(attempt)) //nolint:gosec // far from it
	c.states = append(c.states, state)
	var secs *float64
	if wait != nil {
		s := wait.Seconds()
		secs = &s
	}
	c.waits = append(c.waits, secs)
	var text *string
	if err != nil {
		s := strings.ToValidUTF8(strings.ReplaceAll(err.Error(), "\x00", ""), "")
		if len(s) > maxErrorText {
			s = strings.ToValidUTF8(s[:maxErrorText], "")
		}
		text = &s
	}
	c.errors = append(c.errors, text)
}

func (c *changes) join(o *changes) {
	if o.empty() {
		return
	}
	c.lanes = append(c.lanes, o.lanes...)
	c.seqs = append(c.seqs, o.seqs...)
	c.what = append(c.what, o.what...)
	c.attempts = append(c.attempts, o.attempts...)
	c.states = append(c.states, o.states...)
	c.waits = append(c.waits, o.waits...)
	c.errors = append(c.errors, o.errors...)
}

// policy is how a dispatcher deals with failures.
type policy struct {
	maxAttempts int // 0: no limit
	backoff     func(attempt int) time.Duration
	skipDead    bool
}

// succeed notes that an event is done with.
func (l *lane) succeed(it *item, c *changes) {
	if it.stored {
		c.add("remove", &it.Delivery, 0, "", nil, nil)
		l.failed.take(it.failKey())
	}
}

// fail notes that an attempt failed, and reports whether it was the last.
func (l *lane) fail(it *item, err error, p *policy, c *changes) (dead bool) {
	what := "add"
	if it.stored {
		what = "set"
	}
	k := it.failKey()
	if p.maxAttempts > 0 && it.Attempt >= p.maxAttempts {
		c.add(what, &it.Delivery, it.Attempt, "dead", nil, err)
		if it.Key == "" || p.skipDead { // in nobody's way
			if it.stored {
				l.failed.take(k)
			}
			return true
		}
		w := l.failed.set(k)
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
	c.add(what, &it.Delivery, it.Attempt, "retry", &wait, err)
	w := l.failed.set(k)
	w.due, w.dead = time.Now().Add(wait), false
	if !it.stored {
		w.rows++
	}
	return false
}

// park puts an event that was not tried behind those of its key that wait already; without any it is the head, due at once.
func (l *lane) park(it *item, c *changes) {
	if it.stored {
		return // it stands there
	}
	c.add("add", &it.Delivery, it.Attempt-1, "parked", nil, nil)
	l.failed.set(it.failKey()).rows++
}

// queueLoad adds the statement that reads the waiting keys of lanes.
func (s *Store) queueLoad(b *pgx.Batch, sub *Subscription, lanes []int16, into map[int16]*blocked) {
	b.Queue(s.sql.failedLoad, prepare.Stable, sub.name, lanes, sub.skipDead).Query(func(rows pgx.Rows) error {
		var lane int16
		var key *string
		var seq int64
		var attempt, n int
		var dead bool
		var wait float64
		_, err := pgx.ForEachRow(rows, []any{&lane, &key, &seq, &attempt, &dead, &wait, &n}, func() error {
			k := failKey{seq: seq}
			if key != nil {
				k = failKey{key: *key}
			}
			if into[lane] == nil {
				into[lane] = &blocked{}
			}
			w := into[lane].set(k)
			w.rows, w.dead = n, dead
			w.due = time.Now().Add(time.Duration(wait * float64(time.Second)))
			return nil
		})
		return err
	})
}

// retries are requests for events that are due, as the parameters of one statement.
type retries struct {
	lanes []int16
	keys  []*string
	seqs  []*int64
	sizes []int32
}

func (r *retries) add(l *lane, keys []failKey, size int) {
	for i := range keys {
		k := &keys[i]
		r.lanes = append(r.lanes, l.id)
		r.sizes = append(r.sizes, int32(max(1, size/len(keys)))) //nolint:gosec // at most 1,000
		if k.key == "" {
			r.keys, r.seqs = append(r.keys, nil), append(r.seqs, &k.seq)
		} else {
			r.keys, r.seqs = append(r.keys, &k.key), append(r.seqs, nil)
		}
	}
}

func (r *retries) queue(b *pgx.Batch, sub *Subscription, found map[int16][]*item) {
	b.Queue(sub.store.sql.failedDue, prepare.Stable, sub.name, r.lanes, r.keys, r.seqs, r.sizes).Query(func(rows pgx.Rows) error {
		for rows.Next() {
			var lane int16
			var key *string
			it := &item{stored: true}
			err := rows.Scan(&lane, &it.Seq, &it.Type, &key, &it.Payload, &it.Headers, &it.PublishedAt, &it.Attempt)
			if err != nil {
				return err
			}
			if key != nil {
				it.Key = *key
			}
			it.Subscription, it.Lane = sub.name, int(lane)
			it.Attempt++
			found[lane] = append(found[lane], it)
		}
		return rows.Err()
	})
}
