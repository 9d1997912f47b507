package outbox

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/internal/backoff"
	"github.com/bounceproof/bounceproof/prepare"
)

const (
	sweepInterval = time.Minute
	sweepStep     = 10_000 // rows a sweeping statement removes at most
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
// one may call it. Of several at the same time one works and the others return at once.
func (s *Store) Sweep(ctx context.Context) (Swept, error) {
	var total Swept
	lanes, err := s.verify(ctx, s.ex)
	if err != nil {
		return total, err
	}
	for {
		var n Swept
		busy := true // somebody else is at it
		sweep := func(into *int64, name string, args ...any) error {
			rows, alone, err := s.sweep(ctx, name, args...)
			busy = busy && !alone
			*into += rows
			return err
		}
		err := sweep(&n.Cursors, "sweep_cursors")
		if s.retention > 0 {
			for lane := 0; lane < lanes && err == nil; lane++ {
				if err = sweep(&n.Events, "sweep_events", lane, s.retention); err == nil {
					err = sweep(&n.Events, "sweep_late", lane, s.retention)
				}
			}
		}
		if err == nil {
			keep := s.retention
			if keep <= 0 {
				keep = forever
			}
			err = sweep(&n.Ticks, "sweep_ticks", keep)
		}
		if err == nil && s.dedupWindow > 0 {
			err = sweep(&n.Dedup, "sweep_dedup", s.dedupWindow)
		}
		total.Events += n.Events
		total.Ticks += n.Ticks
		total.Cursors += n.Cursors
		total.Dedup += n.Dedup
		if err != nil {
			return total, fmt.Errorf("outbox: sweep: %w", err)
		}
		if busy || max(n.Events, n.Ticks, n.Cursors, n.Dedup) < sweepStep {
			return total, nil
		}
	}
}

// sweep runs one sweeping statement in a transaction of its own, unless somebody else is at one.
func (s *Store) sweep(ctx context.Context, name string, args ...any) (rows int64, alone bool, err error) {
	opts := pgx.TxOptions{IsoLevel: pgx.ReadCommitted}
	err = s.ex.InTx(ctx, opts, func(ctx context.Context, tx executor.Tx) error {
		const lock = "select pg_try_advisory_xact_lock($1)"
		if err := tx.QueryRow(ctx, lock, lockNamed(s.schema, "sweep")).Scan(&alone); err != nil || !alone {
			return err
		}
		if _, err := tx.Exec(ctx, s.sql.plans, prepare.Stable); err != nil {
			return err
		}
		// No subscription may choose a tick while ticks go.
		if _, err := tx.Exec(ctx, "select pg_advisory_xact_lock($1)", lockNamed(s.schema, "subscribe")); err != nil {
			return err
		}
		tag, err := tx.Exec(ctx, text(s.schema, name), args...)
		rows = tag.RowsAffected()
		return err
	})
	return rows, alone, err
}

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

// chores is what a dispatcher does beside delivering: on a goroutine of its own, for it may wait for locks, and the leases must not.
func (r *runner) chores(ctx context.Context) {
	timer := time.NewTimer(backoff.Spread(sweepInterval, 0.5))
	defer timer.Stop()
	for {
		var what string
		var err error
		select {
		case <-ctx.Done():
			return
		case <-r.dueNow:
			what = "move scheduled events"
			var n int64
			if n, err = r.s.moveScheduled(ctx); n > 0 {
				r.s.Wake()
			}
		case <-timer.C:
			what = "sweep"
			_, err = r.s.Sweep(ctx)
			timer.Reset(backoff.Spread(sweepInterval, 0.1))
		}
		if err != nil && ctx.Err() == nil {
			r.log.Warn("outbox: dispatcher could not "+what+"; it tries again", slog.Any("error", err))
			_ = backoff.Wait(ctx, databaseBackoff.Max)
		}
	}
}
