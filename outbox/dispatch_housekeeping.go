package outbox

import (
	"context"
	"log/slog"
	"time"

	"github.com/bounceproof/bounceproof/internal/backoff"
	"github.com/bounceproof/bounceproof/prepare"
)

// moveScheduled publishes what is due. It may wait for publishers of the same keys.
func (s *Store) moveScheduled(ctx context.Context) (moved int64, err error) {
	for {
		tag, err := s.ex.Exec(ctx, s.sql.scheduledMove, prepare.Stable)
		moved += tag.RowsAffected()
		if err != nil || tag.RowsAffected() < MaxKeys {
			return moved, err
		}
	}
}

// housekeeping is what a dispatcher does beside delivering: on a goroutine of its own, for it may wait for locks, and the leases must not.
func (r *runner) housekeeping(ctx context.Context) {
	timer := time.NewTimer(backoff.Spread(sweepInterval, 0.5))
	defer timer.Stop()
	for {
		var what string // the message if err is not nil
		var err error
		select {
		case <-ctx.Done():
			return
		case <-r.dueNow:
			what = "bounceproof: outbox: dispatcher could not move scheduled events; it tries again"
			var n int64
			if n, err = r.s.moveScheduled(ctx); n > 0 {
				r.s.Wake()
			}
		case <-timer.C:
			what = "bounceproof: outbox: dispatcher could not sweep; it tries again"
			_, err = r.s.Sweep(ctx)
			timer.Reset(backoff.Spread(sweepInterval, 0.1))
		}
		if err != nil && ctx.Err() == nil {
			r.log.Warn(what, slog.Any("error", err))
			_ = backoff.Wait(ctx, databaseBackoff.Max)
		}
	}
}
