package outbox

import (
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/prepare"
)

// maxBlocked is how many keys of a lane may wait outside the log before the lane reads no further: their names are in memory.
const maxBlocked = 10_000

// blockKey is what events outside the log wait by: their key, or themselves.
type blockKey struct {
	key string
	seq int64 // of an event without a key, else 0
}

func (d *Delivery) blockKey() blockKey {
	if d.Key == "" {
		return blockKey{seq: d.Seq}
	}
	return blockKey{key: d.Key}
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
	keys map[blockKey]*waiting
	due  time.Time // nothing is due before; zero: unknown
}

func (b *blocked) has(k blockKey) bool { return b.keys[k] != nil }

func (b *blocked) full() bool { return len(b.keys) > maxBlocked }

func (b *blocked) set(k blockKey) *waiting {
	if b.keys == nil {
		b.keys = make(map[blockKey]*waiting)
	}
	w := b.keys[k]
	if w == nil {
		w = &waiting{}
		b.keys[k] = w
	}
	b.due = time.Time{}
	return w
}

// remove takes one event from those of a key, the one in front, and frees the key with the last.
func (b *blocked) remove(k blockKey) {
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
func (b *blocked) dueKeys(now time.Time, n int) (keys []blockKey) {
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

// queueBlocked adds the statement that reads the waiting keys of lanes.
func (s *Store) queueBlocked(b *pgx.Batch, sub *Subscription, lanes []int16, into map[int16]*blocked) {
	b.Queue(s.sql.failedLoad, prepare.Stable, sub.name, lanes, sub.skipDead).Query(func(rows pgx.Rows) error {
		var lane int16
		var key *string
		var seq int64
		var attempt, n int
		var dead bool
		var wait float64
		_, err := pgx.ForEachRow(rows, []any{&lane, &key, &seq, &attempt, &dead, &wait, &n}, func() error {
			k := blockKey{seq: seq}
			if key != nil {
				k = blockKey{key: *key}
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

func (r *retries) add(l *lane, keys []blockKey, size int) {
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
