package outbox

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/prepare"
)

// step is the round trip of the way of an event: tick, completions and pages in one group.
func (r *runner) step(ctx context.Context) error {
	now := time.Now()
	g := r.group(now)
	if g.batch.Len() == 0 {
		return nil
	}
	if err := r.send(ctx, &g.batch); err != nil {
		r.wantTick = r.wantTick || g.ticks
		return err
	}
	if g.completes {
		r.d.counts.completions.Add(1)
	}
	if g.ticks {
		if !g.tick.same {
			return ErrRebaseNeeded
		}
		r.newest = max(r.newest, g.tick.newest)
		if g.tick.added {
			r.d.counts.ticks.Add(1)
		}
		r.scheduledAt = time.Time{}
		if g.tick.due != nil {
			r.scheduledAt = time.Now().Add(time.Duration(*g.tick.due * float64(time.Second)))
		}
	}
	r.applyCompletions(g)
	r.applyAdopted(g, now)
	r.applyPages(g)
	return nil
}

// group is what a step sends and what came back.
type group struct {
	batch     pgx.Batch
	ticks     bool
	tick      tickResult
	completes bool
	moved     []*lane // lanes that are to move
	done      map[int16]bool
	adopt     []int16
	adopted   []adopted
	failed    map[int16]*blocked
	reads     []*lane
	pages     map[int16]*page
	due       map[int16]bool // lanes with keys that were due
	again     map[int16][]*item
}

func (r *runner) group(now time.Time) *group {
	g := &group{
		done: make(map[int16]bool), pages: make(map[int16]*page), failed: make(map[int16]*blocked), again: make(map[int16][]*item),
		due: make(map[int16]bool),
	}
	var moves completions
	var what changes
	var calm completions
	var reads pages
	var again retries
	g.ticks = !r.stopping && r.wantTick && now.Sub(r.lastTick) >= tickInterval && r.resting()
	advance := !r.advanceAt.IsZero() && (r.stopping || !now.Before(r.advanceAt))
	for _, l := range r.lanes {
		if l.state == busy {
			continue // its place is the job's
		}
		at := l.now
		switch {
		case l.state == adopting:
			if !r.stopping && !now.Before(l.askAt) {
				g.adopt = append(g.adopt, l.id)
			}
			continue
		case l.state == done:
			at = l.next
			moves.add(l, at)
			what.join(l.changes)
			g.moved = append(g.moved, l)
			if l.crashes > 0 {
				calm.add(l, at)
			}
		case advance && l.stored != l.now:
			l.next = l.now
			moves.add(l, l.next)
			g.moved = append(g.moved, l)
		}
		if r.stopping || l.leaving {
			continue
		}
		keys := l.failed.dueKeys(now, r.d.cfg.PageSize)
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
	g.completes = len(moves.lanes) > 0
	if !g.completes && len(g.adopt) == 0 && len(g.reads) == 0 {
		return g
	}
	g.batch.Queue(begin)
	g.batch.Queue(r.s.sql.plans, prepare.Stable)
	if g.completes {
		moves.queue(&g.batch, r.s, r.sub.name, &what, g.done)
	}
	if len(calm.lanes) > 0 {
		g.batch.Queue(r.s.sql.leaseCalm, prepare.Stable, r.sub.name, r.owner, calm.lanes, calm.tokens)
	}
	if len(g.adopt) > 0 {
		r.s.queueAdopt(&g.batch, r.sub.name, r.owner, g.adopt, &g.adopted)
		r.s.queueLoad(&g.batch, r.sub, g.adopt, g.failed)
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

// resting reports whether a lane could use a new tick.
func (r *runner) resting() bool {
	for _, l := range r.lanes {
		if l.state == idle && !l.leaving || l.state == done {
			return true
		}
	}
	return false
}

func (r *runner) applyCompletions(g *group) {
	for _, l := range g.moved {
		if !g.done[l.id] {
			// Another writer moved the lane's token, or an answer was lost and the move is already there. The row tells.
			l.state, l.askAt, l.changes = adopting, time.Time{}, nil
			continue
		}
		if l.state == done {
			l.changes, l.crashes = nil, 0
		}
		l.state = idle
		l.stored, l.now = l.next, l.next
	}
	r.advanceAt = time.Time{}
	for _, l := range r.lanes {
		r.dirty(l)
	}
}

// dirty notes that a lane has passed over empty batches that are not recorded yet.
func (r *runner) dirty(l *lane) {
	if l.state == idle && l.stored != l.now && r.advanceAt.IsZero() {
		r.advanceAt = time.Now().Add(advanceInterval)
	}
}

func (r *runner) applyAdopted(g *group, now time.Time) {
	for _, a := range g.adopted {
		if l := r.lanes[a.lane]; l.token == a.token {
			l.state, l.stored, l.now, l.crashes = idle, a.at, a.at, a.crashes
			l.failed = blocked{}
			if b := g.failed[a.lane]; b != nil {
				l.failed = *b
			}
			l.paused = l.failed.full()
			r.wantTick = true
		}
	}
	for _, id := range g.adopt {
		if l := r.lanes[id]; l.state == adopting {
			l.askAt = now.Add(askInterval)
			r.heartbeatAt = earliest(r.heartbeatAt, l.askAt) // it may not be ours any more
		}
	}
}

func (r *runner) applyPages(g *group) {
	for _, l := range g.reads {
		if l.state != idle {
			continue // its completion was refused
		}
		p, again := g.pages[l.id], g.again[l.id]
		switch {
		case p == nil && l.now.to.id != 0 && !l.paused, g.due[l.id] && len(again) == 0:
			// The end of its batch, or what waits, is gone: only after a failover or a hand in the tables.
			l.state, l.askAt = adopting, time.Now().Add(askInterval)
			continue
		case p == nil: // its from tick is the newest
			if !l.paused {
				r.newest = min(r.newest, l.now.from.id)
			}
		case len(p.events) == 0:
			r.newest = max(r.newest, p.to.id)
			l.now = position{from: p.to}
			r.dirty(l)
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
