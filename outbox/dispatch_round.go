package outbox

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/prepare"
)

// round is one round trip of a runner: a tick, what is to be recorded, and the pages that come next, in one group.
type round struct {
	batch   pgx.Batch
	ticks   bool
	tick    tickResult
	record  record
	adopt   []int16
	adopted []adopted
	blocked map[int16]*blocked // of the adopted lanes
	reads   []*lane
	pages   map[int16]*page
	due     map[int16]bool    // of reads, those with keys that were due
	again   map[int16][]*item // and the events of these keys
}

// roundTrip sends a round and acts on what came back.
func (r *runner) roundTrip(ctx context.Context) error {
	now := time.Now()
	g := r.newRound(now)
	if g.batch.Len() == 0 {
		return nil
	}
	if err := r.send(ctx, &g.batch); err != nil {
		r.wantTick = r.wantTick || g.ticks
		return err
	}
	if g.ticks {
		if err := g.tick.check(); err != nil {
			return err
		}
		r.newest = g.tick.newest // which may be less than before, after a failover
		if g.tick.added {
			r.d.counts.ticks.Add(1)
		}
		r.scheduledAt = time.Time{}
		if g.tick.due != nil {
			r.scheduledAt = time.Now().Add(time.Duration(*g.tick.due * float64(time.Second)))
		}
	}
	r.applyRecord(g)
	if err := r.applyAdopted(g, now); err != nil {
		return err
	}
	r.applyPages(g)
	return nil
}

// newRound collects what is due.
func (r *runner) newRound(now time.Time) *round {
	g := &round{
		pages: make(map[int16]*page), blocked: make(map[int16]*blocked), again: make(map[int16][]*item), due: make(map[int16]bool),
	}
	var afterCrashes []*lane // lanes that came to the end of a page after crashes
	var reads pages
	var again retries
	g.ticks = !r.stopping && r.wantTick && now.Sub(r.lastTick) >= tickInterval && r.needsTick()
	advance := !r.advanceAt.IsZero() && (r.stopping || !now.Before(r.advanceAt))
	if advance { // and at no other time: rounds may follow each other faster than it comes
		r.advanceAt = time.Time{}
	}
	for _, l := range r.lanes {
		if l.state == busy {
			continue // its place is the job's
		}
		at := l.progress.now
		switch {
		case l.state == adopting:
			if !r.stopping && !now.Before(l.askAt) {
				g.adopt = append(g.adopt, l.id)
			}
			continue
		case l.state == finished:
			g.record.add(l, at, nil)
			if l.crashes > 0 {
				afterCrashes = append(afterCrashes, l)
			}
		case advance && !l.progress.recorded():
			g.record.add(l, at, nil)
		}
		if r.stopping || l.leaving {
			continue
		}
		keys := l.blocked.dueKeys(now, r.d.cfg.PageSize)
		again.add(l, keys, r.d.cfg.PageSize)
		log := !l.paused && (at.to.id != 0 || g.ticks || at.from.id < r.newest)
		if log {
			reads.add(l, at, r.d.cfg.PageSize)
		}
		if log || len(keys) > 0 {
			g.reads = append(g.reads, l)
			g.due[l.id] = len(keys) > 0
		}
	}
	if g.ticks {
		r.lastTick, r.wantTick = now, false
		r.s.queueTick(&g.batch, &g.tick)
	}
	if g.record.empty() && len(g.adopt) == 0 && len(g.reads) == 0 {
		return g
	}
	g.batch.Queue(begin)
	g.batch.Queue(r.s.sql.plans, prepare.Stable)
	if !g.record.empty() {
		g.record.queue(&g.batch, r.sub)
	}
	if len(afterCrashes) > 0 {
		r.queueResetCrashes(&g.batch, afterCrashes)
	}
	if len(g.adopt) > 0 {
		r.s.queueAdopt(&g.batch, r.sub.name, r.owner, g.adopt, &g.adopted)
		r.s.queueBlocked(&g.batch, r.sub, g.adopt, g.blocked)
	}
	if len(reads.lanes) > 0 {
		reads.queue(&g.batch, r.sub, g.pages)
	}
	if len(again.lanes) > 0 {
		again.queue(&g.batch, r.sub, g.again)
	}
	g.batch.Queue("commit")
	return g
}

// needsTick reports whether a lane could use a new tick.
func (r *runner) needsTick() bool {
	for _, l := range r.lanes {
		if l.state == idle && !l.leaving || l.state == finished {
			return true
		}
	}
	return false
}

func (r *runner) applyRecord(g *round) {
	for _, l := range g.record.apply(&r.d.counts) {
		// Somebody else has changed the lane's token, or an answer was lost and this is recorded already. The row says which.
		l.readopt(time.Time{})
	}
	for _, l := range g.record.of {
		if l.state == finished {
			l.state, l.crashes = idle, 0
		}
	}
	for _, l := range r.lanes {
		r.advanceLater(l)
	}
}

// advanceLater makes the runner record, in a while, that a lane has passed over empty batches.
func (r *runner) advanceLater(l *lane) {
	if l.state == idle && !l.progress.recorded() && r.advanceAt.IsZero() {
		r.advanceAt = time.Now().Add(advanceInterval)
	}
}

func (r *runner) applyAdopted(g *round, now time.Time) error {
	for _, a := range g.adopted {
		if l := r.lanes[a.lane]; l.token == a.token {
			if a.lost {
				return fmt.Errorf("the tick that lane %d stands at is gone, and all before it: %w", a.lane, ErrRebaseNeeded)
			}
			if !a.whole {
				r.log.Warn("bounceproof: outbox: the tick that a lane stands at is gone; it goes back to the last one before, so events come again",
					slog.Int("lane", int(a.lane)), slog.Int64("tick", a.at.from.id))
			}
			l.state, l.crashes = idle, a.crashes
			l.progress.reset(a.n, a.at)
			l.blocked = blocked{}
			if b := g.blocked[a.lane]; b != nil {
				l.blocked = *b
			}
			l.paused = l.blocked.full()
			r.wantTick = true
		}
	}
	for _, id := range g.adopt {
		if l := r.lanes[id]; l.state == adopting {
			l.askAt = now.Add(askInterval)
			r.heartbeatAt = earliest(r.heartbeatAt, l.askAt) // it may not be ours any more
		}
	}
	return nil
}

func (r *runner) applyPages(g *round) {
	for _, l := range g.reads {
		if l.state != idle {
			continue // its record was refused
		}
		at := &l.progress.now
		p, again := g.pages[l.id], g.again[l.id]
		switch {
		case p != nil && p.gone, g.due[l.id] && len(again) == 0:
			// A tick of its place, or what waits, is gone: only after a failover or somebody who changed the tables.
			l.readopt(time.Now().Add(askInterval))
			continue
		case p == nil: // its from tick is the newest
			if !l.paused {
				r.newest = min(r.newest, at.from.id)
			}
		case len(p.events) == 0:
			r.newest = max(r.newest, p.to.id)
			*at = position{from: p.to}
			r.advanceLater(l)
			p = nil
		default:
			r.newest = max(r.newest, p.to.id)
		}
		if p == nil && len(again) == 0 {
			continue
		}
		r.wantTick = r.wantTick || p != nil
		r.start(newJob(r, l, p, again))
	}
}

// start hands a job to the handlers.
func (r *runner) start(j *job) {
	ctx, cancel := context.WithCancelCause(r.leases)
	j.ctx = ctx
	j.lane.state, j.lane.job, j.lane.cancel = busy, j, cancel
	r.jobs++
	if j.page != nil {
		r.d.counts.pages.Add(1)
	}
	go func() {
		defer cancel(nil)
		r.d.kind.work(j)
		r.results <- j
	}()
}
