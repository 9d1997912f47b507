package outbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/internal/backoff"
	"github.com/bounceproof/bounceproof/prepare"
)

const (
	tickInterval    = 10 * time.Millisecond // between two ticks of one dispatcher under load
	advanceInterval = time.Second           // between two recordings of lanes that had nothing
	askInterval     = 100 * time.Millisecond
)

// databaseBackoff is the wait after a round trip that failed.
var databaseBackoff = backoff.Policy{Base: 50 * time.Millisecond, Max: 2 * time.Second}

// runner is one Run of a dispatcher. All its fields belong to the goroutine of run: it alone talks to the database, one
// round trip after another, so that whatever became due during one goes into the next.
type runner struct {
	d     *Dispatcher
	s     *Store
	sub   *Subscription
	owner string
	log   *slog.Logger

	policy policy

	lanes    map[int16]*lane
	results  chan *job     // from the goroutines of busy lanes
	slots    chan struct{} // handlers running
	jobs     int           // goroutines of busy lanes, those of lost lanes too
	stopping bool

	stop      context.Context // Run's: no new events once it is done
	hard      context.Context // the handlers'
	leases    context.Context // child of hard, ends when the leases run out
	endLeases context.CancelCauseFunc
	watchdog  *time.Timer

	dueNow      chan struct{} // to chores, capacity one
	scheduledAt time.Time     // when the next scheduled event is due; zero: none is known
	newest      int64         // newest tick known
	wantTick    bool
	lastTick    time.Time
	heartbeatAt time.Time
	pollAt      time.Time
	advanceAt   time.Time // zero: nothing to advance
	failures    int       // round trips that failed in a row
	retryAt     time.Time
}

func newRunner(d *Dispatcher, owner string) *runner {
	cfg := &d.cfg
	return &runner{
		policy: policy{
			maxAttempts: max(cfg.MaxAttempts, 0),
			backoff:     backoff.Policy{Base: cfg.MinBackoff, Max: cfg.MaxBackoff}.Delay,
			skipDead:    d.sub.skipDead,
		},
		d: d, s: d.sub.store, sub: d.sub, owner: owner,
		log:     d.cfg.Logger.With(slog.String("subscription", d.sub.name), slog.String("owner", owner)),
		lanes:   make(map[int16]*lane),
		results: make(chan *job),
		dueNow:  make(chan struct{}, 1),
		slots:   make(chan struct{}, d.cfg.Concurrency),
	}
}

func (r *runner) run(ctx context.Context) error {
	hard, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	stop, endStop := context.WithCancel(ctx)
	defer endStop()
	r.stop, r.hard = stop, hard
	r.leases, r.endLeases = context.WithCancelCause(hard)
	defer func() {
		r.endLeases(nil)
		if r.watchdog != nil {
			r.watchdog.Stop()
		}
	}()
	r.wantTick = true
	var chores sync.WaitGroup
	chores.Go(func() { r.chores(stop) })
	defer chores.Wait()

	var fatal error
	for fatal == nil && ctx.Err() == nil {
		if fatal = r.turn(hard); fatal == nil {
			r.wait(ctx.Done())
		}
	}
	endStop()
	if err := r.drain(hard, cancel); fatal == nil && err != nil {
		r.log.Warn("outbox: dispatcher did not leave in order; its lanes are free when their leases run out",
			slog.Any("error", err))
	}
	if fatal != nil {
		return fmt.Errorf("outbox: dispatcher: %w", fatal)
	}
	return nil
}

// drain waits for the handlers, records what they did and gives the lanes back.
func (r *runner) drain(hard context.Context, cancel context.CancelFunc) error {
	r.stopping = true
	if r.d.cfg.ShutdownTimeout < 0 {
		cancel()
	}
	limit := time.AfterFunc(max(r.d.cfg.ShutdownTimeout, 0), cancel)
	defer limit.Stop()
	ctx := context.WithoutCancel(hard)
	for r.jobs > 0 {
		r.wait(nil)
		if r.jobs > 0 {
			_ = r.turn(ctx) // keeps the leases; what fails is tried below once more
		}
	}
	r.retryAt, r.failures = time.Time{}, 0
	if err := r.step(ctx); err != nil {
		return err
	}
	for _, l := range r.lanes {
		l.leaving = true
	}
	return r.release(ctx)
}

// turn does what is due. It returns only errors that end Run.
func (r *runner) turn(ctx context.Context) error {
	now := time.Now()
	if now.Before(r.retryAt) {
		return nil
	}
	err := r.due(ctx, now)
	switch {
	case err == nil:
		if r.failures > 0 {
			r.log.Info("outbox: dispatcher works again", slog.Int("failures", r.failures))
		}
		r.failures, r.retryAt = 0, time.Time{}
		return nil
	case errors.Is(err, ErrRebaseNeeded), errors.Is(err, ErrUnsubscribed):
		return err
	case isUndefined(err):
		return fmt.Errorf("%w: %w", ErrNotMigrated, err)
	}
	if r.failures++; r.failures == 1 {
		r.log.Warn("outbox: dispatcher cannot reach its tables; it goes on trying", slog.Any("error", err))
	}
	r.retryAt = time.Now().Add(databaseBackoff.Delay(r.failures))
	return nil
}

func (r *runner) due(ctx context.Context, now time.Time) error {
	if !now.Before(r.heartbeatAt) {
		if err := r.heartbeat(ctx); err != nil {
			return err
		}
		r.heartbeatAt = now.Add(r.heartbeatInterval())
	}
	if !r.stopping {
		if err := r.release(ctx); err != nil {
			return err
		}
	}
	if r.d.cfg.PollInterval > 0 && !now.Before(r.pollAt) {
		r.wantTick = true
		r.pollAt = now.Add(backoff.Spread(r.d.cfg.PollInterval, 0.1))
	}
	if !r.scheduledAt.IsZero() && !now.Before(r.scheduledAt) {
		r.scheduledAt = time.Time{} // the next tick tells anew
		select {
		case r.dueNow <- struct{}{}:
		default:
		}
	}
	return r.step(ctx)
}

// wait sleeps until something is due: a page that came back, a wake-up, a time, or stopping.
func (r *runner) wait(stop <-chan struct{}) {
	timer := time.NewTimer(time.Until(r.nextTime()))
	defer timer.Stop()
	select {
	case j := <-r.results:
		r.collect(j)
	case <-r.d.wake:
		r.wantTick = true
	case <-timer.C:
	case <-stop:
	}
	for { // whatever else has come by now goes into the same round trip
		select {
		case j := <-r.results:
			r.collect(j)
			continue
		case <-r.d.wake:
			r.wantTick = true
			continue
		default:
		}
		return
	}
}

func (r *runner) nextTime() time.Time {
	if r.failures > 0 {
		return r.retryAt
	}
	next := r.heartbeatAt
	earlier := func(t time.Time) {
		if t.Before(next) {
			next = t
		}
	}
	if r.stopping {
		return next
	}
	if r.d.cfg.PollInterval > 0 {
		earlier(r.pollAt)
	}
	if !r.advanceAt.IsZero() {
		earlier(r.advanceAt)
	}
	if !r.scheduledAt.IsZero() {
		earlier(r.scheduledAt)
	}
	for _, l := range r.lanes {
		switch {
		case l.state == adopting:
			earlier(l.askAt)
		case l.state == done, l.state == idle && (l.leaving || !l.paused && (l.now.to.id != 0 || l.now.from.id < r.newest)):
			return time.Time{}
		case l.state == idle && r.wantTick:
			earlier(r.lastTick.Add(tickInterval))
		}
		if l.state == idle {
			if at, ok := l.failed.nextDue(); ok {
				earlier(at)
			}
		}
	}
	return next
}

// collect takes a job back from the handlers.
func (r *runner) collect(j *job) {
	r.jobs--
	l := j.lane
	if r.lanes[l.id] != l {
		return // lost meanwhile
	}
	l.cancel(nil)
	l.cancel, l.job = nil, nil
	switch {
	case j.unsure:
		l.state, l.askAt = adopting, time.Time{}
	case j.recorded:
		l.state = idle
		r.dirty(l)
	case j.tried():
		l.state, l.next, l.changes = done, j.next(), j.tally()
	default:
		l.state = idle // stopped before anything ended: the page is read again
	}
	if l.failed.full() != l.paused {
		l.paused = !l.paused
		r.log.Warn("outbox: lane has too many waiting keys to read on, or no longer so", slog.Int("lane", int(l.id)),
			slog.Int("keys", len(l.failed.keys)), slog.Bool("paused", l.paused))
	}
}

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
		j.work()
		r.results <- j
	}()
}

// extend moves the moment at which this runner stops trusting its leases.
func (r *runner) extend(deadline time.Time) {
	if r.watchdog != nil {
		r.watchdog.Stop()
	}
	if r.leases.Err() != nil {
		r.leases, r.endLeases = context.WithCancelCause(r.hard)
	}
	end := r.endLeases
	r.watchdog = time.AfterFunc(time.Until(deadline), func() { end(errLaneLost) })
}

// send sends a group and waits for all of it, no longer than a lease lasts.
func (r *runner) send(ctx context.Context, b *pgx.Batch) error {
	ctx, cancel := context.WithTimeout(ctx, r.timeout())
	defer cancel()
	return r.s.ex.SendBatch(ctx, b).Close()
}

// timeout bounds a round trip: no longer than a lease lasts.
func (r *runner) timeout() time.Duration { return max(r.d.cfg.LeaseDuration, time.Second) }

func earliest(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}
