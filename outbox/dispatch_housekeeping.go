package outbox

import (
	"context"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/internal/backoff"
	"github.com/bounceproof/bounceproof/prepare"
)

// moveScheduled publishes what is due. It may wait for publishers of the same keys.
func (s *Store) moveScheduled(ctx context.Context) (moved int64, err error) {
	for {
		var n int64
		var b pgx.Batch
		b.Queue(begin)
		b.Queue(s.sql.scheduledMove, prepare.Stable).Exec(affected(&n))
		b.Queue("commit")
		err := s.ex.SendBatch(ctx, &b).Close()
		if err != nil {
			return moved, err
		}
		if moved += n; n < MaxKeys {
			return moved, nil
		}
	}
}

// affected notes how many rows a statement of a batch changed.
func affected(n *int64) func(pgconn.CommandTag) error {
	return func(tag pgconn.CommandTag) error {
		*n = tag.RowsAffected()
		return nil
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
