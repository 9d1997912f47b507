package outbox

import (
	"context"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/prepare"
)

// position is a place in a lane: everything up to from is delivered, and of the batch between from and to everything up to
// pos. Without to there is no open batch.
type position struct {
	from tickRef
	to   tickRef // id 0: none
	pos  int64
}

// after returns the position when a page was delivered up to seq.
func (p position) after(page *page, seq int64) position {
	if !page.more && seq == page.last() {
		return position{from: page.to}
	}
	return position{from: p.from, to: page.to, pos: seq}
}

// progress is how far a lane has come, and what of that the database knows. It is recorded by a [record] and in no other way. It belongs to
// whoever has the lane: the runner, or the job while the lane is busy.
type progress struct {
	n       int64    // the number of the row that holds stored
	stored  position // as the database has it: what the next record is compared with
	now     position // up to here all is done, or was passed over because nothing was there
	changes changes  // of failed events, not recorded yet
}

// reset makes the progress what the database says it is.
func (p *progress) reset(n int64, at position) { *p = progress{n: n, stored: at, now: at} }

// recorded reports whether the database knows all.
func (p *progress) recorded() bool { return p.stored == p.now && p.changes.empty() }

// changes are what became of events that stand, or are to stand, in the table of failed events, as the parameters of complete_failed.sql.
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

// maxErrorText is how much of a handler's error is stored, in bytes.
const maxErrorText = 2000

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

// record writes the progress of lanes with one statement, which compares and swaps: a lane that somebody else has moved stays where it is.
// It is used once: add, then queue or run, then apply when that has committed.
type record struct {
	of      []*lane
	next    []position
	changes changes
	moved   map[int16]bool

	lanes                                    []int16
	tokens, oldN, oldFrom, oldPos, from, pos []int64
	fromAt, toAt                             []*time.Time
	toID                                     []*int64
}

// add moves a lane to next and writes its changes down, and also, which may be nil.
func (r *record) add(l *lane, next position, also *changes) {
	r.of, r.next = append(r.of, l), append(r.next, next)
	r.changes.join(&l.progress.changes)
	r.changes.join(also)
	r.lanes = append(r.lanes, l.id)
	r.tokens = append(r.tokens, l.token)
	r.oldN = append(r.oldN, l.progress.n)
	r.oldFrom = append(r.oldFrom, l.progress.stored.from.id)
	r.oldPos = append(r.oldPos, l.progress.stored.pos)
	r.from = append(r.from, next.from.id)
	r.fromAt = append(r.fromAt, &next.from.at)
	r.pos = append(r.pos, next.pos)
	if next.to.id == 0 {
		r.toID, r.toAt = append(r.toID, nil), append(r.toAt, nil)
		return
	}
	r.toID, r.toAt = append(r.toID, &next.to.id), append(r.toAt, &next.to.at)
}

func (r *record) empty() bool { return len(r.of) == 0 }

func (r *record) statement(sub *Subscription) (string, []any) {
	args := []any{prepare.Stable, sub.name, r.lanes, r.tokens, r.oldFrom, r.oldPos, r.from, r.fromAt, r.toID, r.toAt, r.pos, r.oldN}
	if c := &r.changes; !c.empty() {
		return sub.store.sql.completeFailed, append(args, c.lanes, c.seqs, c.what, c.attempts, c.states, c.waits, c.errors)
	}
	return sub.store.sql.complete, args
}

// read takes note of which lanes moved.
func (r *record) read(rows pgx.Rows) error {
	r.moved = make(map[int16]bool, len(r.of))
	var lane int16
	_, err := pgx.ForEachRow(rows, []any{&lane}, func() error {
		r.moved[lane] = true
		return nil
	})
	return err
}

// queue adds the statement to a batch.
func (r *record) queue(b *pgx.Batch, sub *Subscription) {
	sql, args := r.statement(sub)
	b.Queue(sql, args...).Query(r.read)
}

// querier is what a record needs to run by itself; a transaction as well as an executor.
type querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// run runs the statement. A lane that did not move is an error, errNotMoved.
func (r *record) run(ctx context.Context, q querier, sub *Subscription) error {
	sql, args := r.statement(sub)
	rows, err := q.Query(ctx, sql, args...)
	if err != nil {
		return err
	}
	if err := r.read(rows); err != nil {
		return err
	}
	if len(r.moved) < len(r.of) {
		return errNotMoved
	}
	return nil
}

// apply brings the progress of the lanes that moved up to what is recorded, counts the round trip, and returns the lanes that did not move.
func (r *record) apply(n *counts) (refused []*lane) {
	if r.empty() {
		return nil
	}
	n.completions.Add(1)
	for i, l := range r.of {
		if r.moved[l.id] {
			l.progress.reset(l.progress.n+1, r.next[i])
		} else {
			refused = append(refused, l)
		}
	}
	return refused
}
