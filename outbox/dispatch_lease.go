package outbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/internal/backoff"
	"github.com/bounceproof/bounceproof/prepare"
)

// ErrUnsubscribed stops a dispatcher whose subscription is gone.
var ErrUnsubscribed = errors.New("the subscription does not exist")

// errLaneLost is the cause of the context of handlers whose lane went to another dispatcher, or whose lease ran out.
var errLaneLost = errors.New("outbox: lane lost")

// rebalanceInterval is the longest time between two heartbeats. Lanes are spread again two heartbeats after a member came or went: one to
// give back, one to take.
const rebalanceInterval = 2 * time.Second

// shares is what lease_shares.sql tells.
type shares struct{ members, rank, lanes, free int64 }

// own returns how many lanes this member should have: even shares, the remainder to the first in the order of names.
func (s shares) own() int {
	n := s.lanes / s.members
	if s.rank < s.lanes%s.members {
		n++
	}
	return int(n)
}

// belowShareInterval is the time between two heartbeats of a dispatcher that has less than its share: a lane that was given back should not
// wait for an ordinary one.
const belowShareInterval = 150 * time.Millisecond

func (r *runner) heartbeatInterval() time.Duration {
	if r.belowShare {
		return backoff.Spread(min(r.d.cfg.LeaseDuration/3, belowShareInterval), 0.1)
	}
	return backoff.Spread(min(r.d.cfg.LeaseDuration/3, rebalanceInterval), 0.1)
}

// heartbeat says that this dispatcher lives, renews its leases, and takes or gives lanes to have its share.
func (r *runner) heartbeat(ctx context.Context) error {
	var b pgx.Batch
	var sh shares
	held, newest := make(map[int16]int64), make(map[int16]int64)
	deadline := time.Now().Add(r.d.cfg.LeaseDuration) // counted from before the request, so never later than the server's
	b.Queue(begin)
	b.Queue(r.s.sql.memberSeen, prepare.Stable, r.sub.name, r.owner, r.d.cfg.LeaseDuration, r.ticksInMemory())
	b.Queue(r.s.sql.leaseRenew, prepare.Stable, r.sub.name, r.owner, r.d.cfg.LeaseDuration).Query(collectHeld(held, newest))
	b.Queue(r.s.sql.leaseShares, prepare.Stable, r.sub.name, r.owner).QueryRow(func(row pgx.Row) error {
		return row.Scan(&sh.members, &sh.rank, &sh.lanes, &sh.free)
	})
	b.Queue("commit")
	if err := r.send(ctx, &b); err != nil {
		return fmt.Errorf("heartbeat: %w", err)
	}
	if sh.lanes == 0 {
		return ErrUnsubscribed
	}
	r.extend(deadline)
	r.reconcile(held, newest)
	if r.stopping {
		return nil
	}
	return r.rebalance(ctx, sh)
}

// ticksInMemory returns the ticks that lanes need to go on and that may not be in the database yet: they must not be pruned.
func (r *runner) ticksInMemory() []int64 {
	ids := make([]int64, 0, 2*len(r.lanes))
	for _, l := range r.lanes {
		switch l.state {
		case busy:
			ids = append(ids, l.job.ticks[:]...)
		case idle, finished:
			ids = append(ids, l.progress.now.from.id, l.progress.now.to.id)
		case adopting:
		}
	}
	slices.Sort(ids)
	return slices.Compact(ids)
}

// reconcile compares what the database says, tokens and the numbers of the newest rows, with what the runner thinks.
func (r *runner) reconcile(held, newest map[int16]int64) {
	for id, l := range r.lanes {
		switch token, ok := held[id]; {
		case !ok || token != l.token:
			r.lose(l)
		case l.state == idle && l.progress.n != newest[id]:
			l.readopt(time.Time{}) // a failover lost its last rows, and what had failed with them
		}
	}
	for id, token := range held {
		if r.lanes[id] == nil {
			r.lanes[id] = &lane{id: id, token: token}
		}
	}
}

// lose drops a lane. A page that is with the handlers is told, and what comes of it is ignored.
func (r *runner) lose(l *lane) {
	r.d.counts.leasesLost.Add(1)
	if l.cancel != nil {
		l.cancel(errLaneLost)
	}
	delete(r.lanes, l.id)
}

func (r *runner) rebalance(ctx context.Context, sh shares) error {
	want := sh.own()
	staying := 0
	for _, l := range r.lanes {
		l.leaving = false
		staying++
	}
	leave := func(which func(*lane) bool) {
		for _, l := range r.lanes {
			if staying > want && !l.leaving && which(l) {
				l.leaving = true
				staying--
				if l.job != nil {
					l.job.giveUp()
				}
			}
		}
	}
	leave(func(l *lane) bool { return l.state != busy }) // those that rest go first
	leave(func(l *lane) bool { return l.state == busy && l.job.leaving() })
	leave(func(*lane) bool { return true })
	r.belowShare = staying < want
	if !r.belowShare || sh.free == 0 {
		return nil
	}
	var b pgx.Batch
	claimed := make(map[int16]int64)
	b.Queue(begin)
	b.Queue(r.s.sql.leaseClaim, prepare.Stable, r.sub.name, r.owner, r.d.cfg.LeaseDuration,
		min(int64(want-staying), sh.free)).Query(collectLanes(claimed))
	b.Queue("commit")
	if err := r.send(ctx, &b); err != nil {
		return fmt.Errorf("claim: %w", err)
	}
	for id, token := range claimed {
		if l := r.lanes[id]; l != nil {
			r.lose(l) // it had not been noticed yet
		}
		r.lanes[id] = &lane{id: id, token: token}
	}
	r.belowShare = staying+len(claimed) < want
	return nil
}

// queueResetCrashes adds the statement that forgets the crashes of former owners: their lanes came to the end of a page.
func (r *runner) queueResetCrashes(b *pgx.Batch, lanes []*lane) {
	ids, tokens := make([]int16, len(lanes)), make([]int64, len(lanes))
	for i, l := range lanes {
		ids[i], tokens[i] = l.id, l.token
	}
	b.Queue(r.s.sql.resetCrashes, prepare.Stable, r.sub.name, r.owner, ids, tokens)
}

// release gives back the lanes that leave and rest, all of them when the runner stops.
func (r *runner) release(ctx context.Context) error {
	var lanes []int16
	var tokens []int64
	for _, l := range r.lanes {
		if l.leaving && (l.state == idle || l.state == adopting) {
			lanes = append(lanes, l.id)
			tokens = append(tokens, l.token)
		}
	}
	if len(lanes) == 0 && !r.stopping {
		return nil
	}
	var b pgx.Batch
	b.Queue(begin)
	b.Queue(r.s.sql.leaseReturn, prepare.Stable, r.sub.name, r.owner, lanes, tokens)
	if r.stopping {
		b.Queue(r.s.sql.memberLeave, prepare.Stable, r.sub.name, r.owner)
	}
	b.Queue("commit")
	if err := r.send(ctx, &b); err != nil {
		return fmt.Errorf("release: %w", err)
	}
	for _, id := range lanes {
		delete(r.lanes, id)
	}
	return nil
}

// collectHeld reads rows of lane, token and the number of the newest row.
func collectHeld(tokens, newest map[int16]int64) func(pgx.Rows) error {
	return func(rows pgx.Rows) error {
		var lane int16
		var token, n int64
		_, err := pgx.ForEachRow(rows, []any{&lane, &token, &n}, func() error {
			tokens[lane], newest[lane] = token, n
			return nil
		})
		return err
	}
}

// collectLanes reads rows of lane and token.
func collectLanes(into map[int16]int64) func(pgx.Rows) error {
	return func(rows pgx.Rows) error {
		var lane int16
		var token int64
		_, err := pgx.ForEachRow(rows, []any{&lane, &token}, func() error {
			into[lane] = token
			return nil
		})
		return err
	}
}
