package outbox

import (
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

// completions are moves of lanes, as the parameters of one statement.
type completions struct {
	lanes                              []int16
	tokens, oldFrom, oldPos, from, pos []int64
	fromAt, toAt                       []*time.Time
	toID                               []*int64
}

func (c *completions) add(l *lane, next position) {
	c.lanes = append(c.lanes, l.id)
	c.tokens = append(c.tokens, l.token)
	c.oldFrom = append(c.oldFrom, l.stored.from.id)
	c.oldPos = append(c.oldPos, l.stored.pos)
	c.from = append(c.from, next.from.id)
	c.fromAt = append(c.fromAt, &next.from.at)
	c.pos = append(c.pos, next.pos)
	if next.to.id == 0 {
		c.toID, c.toAt = append(c.toID, nil), append(c.toAt, nil)
		return
	}
	c.toID, c.toAt = append(c.toID, &next.to.id), append(c.toAt, &next.to.at)
}

func (c *completions) args(subscription string) []any {
	return []any{prepare.Stable, subscription, c.lanes, c.tokens, c.oldFrom, c.oldPos, c.from, c.fromAt, c.toID, c.toAt, c.pos}
}

func (c *completions) argsWith(subscription string, ch *changes) []any {
	return append(c.args(subscription), ch.lanes, ch.seqs, ch.what, ch.attempts, ch.states, ch.waits, ch.errors)
}

// queue adds the statement to a group and fills done with the lanes that moved.
func (c *completions) queue(b *pgx.Batch, s *Store, subscription string, ch *changes, done map[int16]bool) {
	sql, args := s.sql.complete, c.args(subscription)
	if !ch.empty() {
		sql, args = s.sql.completeFailed, c.argsWith(subscription, ch)
	}
	b.Queue(sql, args...).Query(func(rows pgx.Rows) error {
		var lane int16
		_, err := pgx.ForEachRow(rows, []any{&lane}, func() error {
			done[lane] = true
			return nil
		})
		return err
	})
}

// adopted is where a lane stands, as its new owner finds it.
type adopted struct {
	lane    int16
	token   int64
	crashes int
	at      position
}

// queueAdopt adds the statement that puts the owner's tokens into the progress of lanes.
func (s *Store) queueAdopt(b *pgx.Batch, subscription, owner string, lanes []int16, found *[]adopted) {
	b.Queue(s.sql.adopt, prepare.Stable, subscription, owner, lanes).Query(func(rows pgx.Rows) error {
		var a adopted
		var toID *int64
		var toAt *time.Time
		scan := []any{&a.lane, &a.token, &a.crashes, &a.at.from.id, &a.at.from.at, &toID, &toAt, &a.at.pos}
		_, err := pgx.ForEachRow(rows, scan, func() error {
			a.at.to = tickRef{}
			if toID != nil && toAt != nil {
				a.at.to = tickRef{id: *toID, at: *toAt}
			}
			*found = append(*found, a)
			return nil
		})
		return err
	})
}
