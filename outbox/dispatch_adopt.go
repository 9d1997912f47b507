package outbox

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/prepare"
)

// adoptTimeout is how long reading a lane's place waits for a former owner's transaction that is adding to it. It may be open for long, on a
// connection that is dead and that the server has not given up.
const adoptTimeout = 100 * time.Millisecond

// adopt reads where the lanes stand that were taken, in groups of their own: they may have to wait, and the others must not. If one has to,
// each goes by itself.
func (r *runner) adopt(ctx context.Context, now time.Time) error {
	var lanes []int16
	for _, l := range r.lanes {
		if l.state == adopting && !now.Before(l.askAt) {
			lanes = append(lanes, l.id)
		}
	}
	if len(lanes) == 0 || r.stopping {
		return nil
	}
	err := r.adoptTogether(ctx, now, lanes)
	if !isOfStatement(ctx, err) {
		return err
	}
	for _, id := range lanes {
		if len(lanes) > 1 {
			err = r.adoptTogether(ctx, now, []int16{id})
		}
		switch {
		case err == nil:
		case isOfStatement(ctx, err):
			r.rest(r.lanes[id], err)
		default:
			return err
		}
	}
	return nil
}

func (r *runner) adoptTogether(ctx context.Context, now time.Time, lanes []int16) error {
	var b pgx.Batch
	var found []adopted
	waiting := make(map[int16]*blocked)
	b.Queue(begin)
	b.Queue(r.s.sql.plans, prepare.Stable)
	b.Queue("select set_config('lock_timeout', $1, true)", prepare.Stable, fmt.Sprint(adoptTimeout.Milliseconds()))
	r.s.queueAdopt(&b, r.sub.name, r.owner, lanes, &found)
	r.s.queueBlocked(&b, r.sub, lanes, waiting)
	b.Queue("commit")
	if err := r.send(ctx, &b); err != nil {
		return err
	}
	for _, a := range found {
		l := r.lanes[a.lane]
		if l == nil || l.token != a.token {
			continue
		}
		if a.lost {
			return fmt.Errorf("the tick that lane %d stands at is gone, and all before it: %w", a.lane, ErrRebaseNeeded)
		}
		if !a.whole {
			r.log.Warn("bounceproof: outbox: the tick that a lane stands at is gone; it goes back to the last one before, so events come again",
				slog.Int("lane", int(a.lane)), slog.Int64("tick", a.at.from.id))
		}
		l.state, l.crashes, l.survived = idle, a.crashes, false
		l.progress.reset(a.n, a.at)
		l.blocked = blocked{}
		if w := waiting[a.lane]; w != nil {
			l.blocked = *w
		}
		l.paused = l.blocked.full()
		r.wantTick = true
	}
	for _, id := range lanes {
		if l := r.lanes[id]; l.state == adopting {
			l.askAt = now.Add(askInterval)
			r.heartbeatAt = earliest(r.heartbeatAt, l.askAt) // it may not be ours any more
		}
	}
	return nil
}
