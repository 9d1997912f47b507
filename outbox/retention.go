package outbox

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/prepare"
)

const (
	sweepInterval = time.Minute
	sweepLimit    = 10_000 // rows a sweeping statement removes at most
	forever       = 100 * 365 * 24 * time.Hour
)

// Swept counts what a [Store.Sweep] removed.
type Swept struct {
	Events  int64 // older than Config.Retention, and seen by every subscription
	Ticks   int64 // needed by nobody
	Cursors int64 // progress that later progress replaced
	Dedup   int64 // keys older than Config.DedupWindow
}

// Sweep removes what is not needed any more, in short transactions. Every dispatcher does so once a minute by itself; a program without
// one may call it. Several at the same time wait for each other.
func (s *Store) Sweep(ctx context.Context) (Swept, error) {
	var total Swept
	lanes, err := s.verify(ctx, s.ex, prepare.Stable)
	if err != nil {
		return total, err
	}
	keep := s.retention
	if keep < 0 {
		keep = forever
	}
	for {
		var n Swept
		err := s.sweep(ctx, &n.Cursors, "sweep_cursors")
		for lane := 0; lane < lanes && err == nil && s.retention > 0; lane++ {
			if err = s.sweep(ctx, &n.Events, "sweep_events", lane, keep); err == nil {
				err = s.sweep(ctx, &n.Events, "sweep_late", lane, keep)
			}
		}
		if err == nil {
			err = s.sweep(ctx, &n.Ticks, "sweep_ticks", keep)
		}
		if err == nil && s.dedupWindow > 0 {
			err = s.sweep(ctx, &n.Dedup, "sweep_dedup", s.dedupWindow)
		}
		total.Events += n.Events
		total.Ticks += n.Ticks
		total.Cursors += n.Cursors
		total.Dedup += n.Dedup
		if err != nil {
			return total, fmt.Errorf("outbox: sweep: %w", err)
		}
		if max(n.Events, n.Ticks, n.Cursors, n.Dedup) < sweepLimit {
			return total, nil
		}
	}
}

// sweep runs one sweeping statement in a transaction of its own, alone, and adds what it removed. No subscription may choose a
// tick meanwhile.
func (s *Store) sweep(ctx context.Context, removed *int64, name string, args ...any) error {
	var b pgx.Batch
	b.Queue(begin)
	b.Queue("select pg_advisory_xact_lock($1), pg_advisory_xact_lock($2)", lockNamed(s.schema, "sweep"), lockNamed(s.schema, "subscribe"))
	b.Queue(s.sql.plans, prepare.Stable)
	b.Queue(text(s.schema, name), args...).Exec(func(tag pgconn.CommandTag) error {
		*removed += tag.RowsAffected()
		return nil
	})
	b.Queue("commit")
	return s.ex.SendBatch(ctx, &b).Close()
}
