package outbox

import (
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/prepare"
)

// page is a run of a lane's batch.
type page struct {
	to     tickRef // the end of its batch
	events []Delivery
	more   bool // the batch may go on behind it
	gone   bool // a tick that the lane named is not there
}

// last returns the sequence number of the last event, 0 in an empty page.
func (p *page) last() int64 {
	if len(p.events) == 0 {
		return 0
	}
	return p.events[len(p.events)-1].Seq
}

// pages are requests for the next pages of lanes, as the parameters of one statement.
type pages struct {
	lanes     []int16
	from, pos []int64
	to        []*int64
	fromAt    []time.Time
	toAt      []*time.Time
	sizes     []int32
}

func (r *pages) add(l *lane, at position, size int) {
	r.lanes = append(r.lanes, l.id)
	r.from = append(r.from, at.from.id)
	r.fromAt = append(r.fromAt, at.from.at)
	r.pos = append(r.pos, at.pos)
	r.sizes = append(r.sizes, int32(size)) //nolint:gosec // at most 1,000
	if at.to.id == 0 {
		r.to, r.toAt = append(r.to, nil), append(r.toAt, nil)
		return
	}
	r.to, r.toAt = append(r.to, &at.to.id), append(r.toAt, &at.to.at)
}

// queue adds the statement to a group and fills found; a lane whose from tick is still the newest stays out.
func (r *pages) queue(b *pgx.Batch, sub *Subscription, found map[int16]*page) {
	b.Queue(sub.store.sql.page, prepare.Stable, r.lanes, r.from, r.to, r.pos, r.sizes, r.fromAt, r.toAt).Query(func(rows pgx.Rows) error {
		at := make(map[int16]int, len(r.lanes))
		for i, lane := range r.lanes {
			at[lane] = i
		}
		for rows.Next() {
			var lane int16
			var tick, seq *int64
			var tickAt, publishedAt *time.Time
			var typ, key *string
			var payload []byte
			var headers map[string]string
			if err := rows.Scan(&lane, &tick, &tickAt, &seq, &typ, &key, &payload, &headers, &publishedAt); err != nil {
				return err
			}
			if tick == nil {
				found[lane] = &page{gone: true}
				continue
			}
			if *tick == r.from[at[lane]] {
				continue
			}
			p := found[lane]
			if p == nil {
				p = &page{to: tickRef{*tick, *tickAt}}
				found[lane] = p
			}
			if seq == nil {
				continue
			}
			d := Delivery{
				Event:        Event{Type: *typ, Payload: payload, Headers: headers},
				Subscription: sub.name, Seq: *seq, Lane: int(lane), Attempt: 1, PublishedAt: *publishedAt,
			}
			if key != nil {
				d.Key = *key
			}
			p.events = append(p.events, d)
			p.more = len(p.events) == int(r.sizes[at[lane]])
		}
		return rows.Err()
	})
}
