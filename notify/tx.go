package notify

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// txNotifySQL notifies only while the queue has room, for with a full queue it is the publisher's COMMIT that fails
// ("too many notifications in the NOTIFY queue", async.c, PreCommit_Notify). The filter is a one-time filter above a
// volatile target list, so pg_notify is not called when it does not hold.
const txNotifySQL = `select pg_catalog.pg_notify($1, $2) where pg_catalog.pg_notification_queue_usage() < 0.5`

// NotifyTx announces payload on channel from a transaction whose commit this package cannot see. At most once in a
// window it notifies inside tx, so PostgreSQL announces it with the commit; all others in the window are announced by a
// statement outside, no earlier than a window after the call, which presumes that tx has committed by then. Without a
// window every call notifies inside its tx, and the wait is 10ms. When tx takes longer, readers find out at their next
// poll: whoever knows when tx commits calls [Sender.Notify] then, which is also cheaper for the cluster.
//
// Subscribers of this process are woken a window after the call. An error of the statement inside tx is returned, for it
// has aborted tx. tx is used only during the call. The statement is not prepared, whatever Options say, so it works in a transaction of bare
// pgx behind every pooler.
func (s *Sender) NotifyTx(ctx context.Context, tx Execer, channel, payload string) error {
	if err := s.check(channel, payload); err != nil {
		return err
	}
	now := time.Now()
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return ErrClosed
	}
	n := note{channel: channel, payload: payload, send: true, wake: true}
	if now.Sub(s.lastTx) < s.cfg.Window {
		s.acceptLocked(&s.deferred, n, now)
		s.mu.Unlock()
		return nil
	}
	s.lastTx = now
	s.mu.Unlock()

	// Not by Options, which are for the sender's own statements: tx may be bare pgx, whose names collide behind a pooler.
	tag, err := tx.Exec(ctx, txNotifySQL, pgx.QueryExecModeExec, channel, payload)
	if err != nil {
		return fmt.Errorf("notify: notify in transaction: %w", err)
	}

	s.mu.Lock()
	defer s.mu.Unlock()
	n.send = tag.RowsAffected() == 0 // the queue is half full: leave it to the statement outside
	if !n.send {
		s.stats.InTx++
	}
	if s.closed || !n.send && len(s.subs[channel]) == 0 {
		s.stats.Accepted++
		if n.send {
			s.stats.Dropped++ // closed meanwhile
		}
		return nil
	}
	s.acceptLocked(&s.deferred, n, time.Now())
	return nil
}
