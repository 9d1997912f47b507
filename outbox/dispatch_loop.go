package outbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/internal/backoff"
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

	policy    retryPolicy
	limitIdle string // opens the transactions of handlers

	lanes    map[int16]*lane
	results  chan *job     // from the goroutines of busy lanes
	slots    chan struct{} // handlers running
	jobs     int           // goroutines of busy lanes, those of lost lanes too
	stopping bool

	stop      context.Context // Run's: no new events once it is done
	handling  context.Context // the handlers'
	leases    context.Context // child of handling, ends when the leases run out
	endLeases context.CancelCauseFunc
	watchdog  *time.Timer

	dueNow      chan struct{} // to housekeeping, capacity one
	scheduledAt time.Time     // when the next scheduled event is due; zero: none is known
	newest      int64         // newest tick known
	wantTick    bool
	lastTick    time.Time
	heartbeatAt time.Time
	belowShare  bool // it has fewer lanes than its share
	pollAt      time.Time
	advanceAt   time.Time // zero: nothing to advance
	failures    int       // round trips that failed in a row
	smaller     int       // how often rounds are to be halved, because they took too long
	inTime      int       // rounds that did not, since
	retryAt     time.Time
}

func newRunner(d *Dispatcher, owner string) *runner {
	cfg := &d.cfg
	return &runner{
		policy: retryPolicy{
			maxAttempts: max(cfg.MaxAttempts, 0),
			backoff:     backoff.Policy{Base: cfg.MinBackoff, Max: cfg.MaxBackoff}.Delay,
			skipDead:    d.sub.skipDead,
		},
		limitIdle: idleLimit(cfg.LeaseDuration),
		d:         d, s: d.sub.store, sub: d.sub, owner: owner,
		log:     d.cfg.Logger.With(slog.String("subscription", d.sub.name), slog.String("owner", owner)),
		lanes:   make(map[int16]*lane),
		results: make(chan *job),
		dueNow:  make(chan struct{}, 1),
		slots:   make(chan struct{}, d.cfg.Concurrency),
	}
}

func (r *runner) run(ctx context.Context) error {
	handling, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	stop, endStop := context.WithCancel(ctx)
	defer endStop()
	r.stop, r.handling = stop, handling
	r.leases, r.endLeases = context.WithCancelCause(handling)
	defer func() {
		r.endLeases(nil)
		if r.watchdog != nil {
			r.watchdog.Stop()
		}
	}()
	r.wantTick = true
	if err := r.checkPoolMode(ctx); err != nil {
		return err
	}
	var housekeeping sync.WaitGroup
	housekeeping.Go(func() { r.housekeeping(stop) })
	defer housekeeping.Wait()

	var fatal error
	for fatal == nil && ctx.Err() == nil {
		if fatal = r.runDue(handling); fatal == nil {
			r.wait(ctx.Done())
		}
	}
	endStop()
	if err := r.drain(handling, cancel); fatal == nil && err != nil {
		r.log.Warn("bounceproof: outbox: dispatcher did not leave in order; its lanes are free when their leases run out",
			slog.Any("error", err))
	}
	if fatal != nil {
		return fmt.Errorf("outbox: dispatcher: %w", fatal)
	}
	return nil
}

// checkPoolMode refuses handlers with a transaction where there are none.
func (r *runner) checkPoolMode(ctx context.Context) error {
	if !r.d.kind.transactional() {
		return nil
	}
	top, err := r.s.ex.Topology(ctx)
	if err == nil && top.Mode == fallback.ModeStatement {
		return fmt.Errorf("outbox: dispatcher: %w", executor.ErrStatementMode)
	}
	return nil // an error here is met again, and dealt with, below
}

// drain waits for the handlers, records what they did and gives the lanes back.
func (r *runner) drain(handling context.Context, cancel context.CancelFunc) error {
	r.stopping = true
	if r.d.cfg.ShutdownTimeout < 0 {
		cancel()
	}
	limit := time.AfterFunc(max(r.d.cfg.ShutdownTimeout, 0), cancel)
	defer limit.Stop()
	ctx := context.WithoutCancel(handling)
	for r.jobs > 0 {
		r.wait(nil)
		if r.jobs > 0 {
			_ = r.runDue(ctx) // keeps the leases; what fails is tried below once more
		}
	}
	r.retryAt, r.failures = time.Time{}, 0
	if err := r.roundTrip(ctx); err != nil {
		return err
	}
	for _, l := range r.lanes {
		l.leaving = true
	}
	return r.release(ctx)
}

// runDue does what is due, and notes whether that worked. It returns only errors that end Run.
func (r *runner) runDue(ctx context.Context) error {
	now := time.Now()
	if now.Before(r.retryAt) {
		return nil
	}
	err := r.doDue(ctx, now)
	switch {
	case err == nil:
		if r.inTime++; r.smaller > 0 && r.inTime >= 20 {
			r.smaller, r.inTime = r.smaller-1, 0
		}
		if r.failures > 0 {
			r.log.Info("bounceproof: outbox: dispatcher works again", slog.Int("failures", r.failures))
		}
		r.failures, r.retryAt = 0, time.Time{}
		return nil
	case errors.Is(err, ErrRebaseNeeded), errors.Is(err, ErrUnsubscribed):
		return err
	case isSequenceError(err):
		return err
	case isUndefined(err):
		return fmt.Errorf("%w: %w", ErrNotMigrated, err)
	}
	if isTooLong(err) {
		r.smaller, r.inTime = min(r.smaller+1, 30), 0
	}
	if r.failures++; r.failures == 1 {
		r.log.Warn("bounceproof: outbox: dispatcher cannot reach its tables; it goes on trying", slog.Any("error", err))
	}
	r.retryAt = time.Now().Add(databaseBackoff.Delay(r.failures))
	return nil
}

func isSequenceError(err error) bool {
	_, ok := errors.AsType[*SequenceError](err)
	return ok
}

func (r *runner) doDue(ctx context.Context, now time.Time) error {
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
		interval := r.d.cfg.PollInterval
		if r.d.cfg.Proven != nil && r.d.cfg.Proven() {
			interval *= 5
		}
		r.pollAt = now.Add(backoff.Spread(interval, 0.1))
	}
	if !r.scheduledAt.IsZero() && !now.Before(r.scheduledAt) {
		r.scheduledAt = time.Time{} // the next tick tells anew
		select {
		case r.dueNow <- struct{}{}:
		default:
		}
	}
	if err := r.adopt(ctx, now); err != nil {
		return err
	}
	return r.roundTrip(ctx)
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
		case l.state == finished, l.state == idle && (l.leaving || l.hasMore(r.newest)):
			return time.Time{}
		case l.state == idle && r.wantTick:
			earlier(r.lastTick.Add(tickInterval))
		}
		if l.state == idle {
			if at, ok := l.blocked.nextDue(); ok {
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
	case j.unsure && isOfStatement(r.handling, j.err):
		r.rest(l, j.err)
	case j.unsure:
		l.readopt(time.Time{})
	case j.recorded:
		l.state = idle
		l.survived = j.page != nil && l.progress.recorded() && l.progress.now == j.end
	case j.tried():
		j.finish()
		l.state = finished
	default:
		l.state = idle // stopped before anything ended: the page is read again
	}
	if l.blocked.full() != l.paused {
		l.paused = !l.paused
		r.log.Warn("bounceproof: outbox: lane has too many waiting keys to read on, or no longer so", slog.Int("lane", int(l.id)),
			slog.Int("waiting_keys", len(l.blocked.keys)), slog.Bool("paused", l.paused))
	}
}

// extend moves the moment at which this runner stops trusting its leases.
func (r *runner) extend(deadline time.Time) {
	if r.watchdog != nil {
		r.watchdog.Stop()
	}
	if r.leases.Err() != nil {
		r.leases, r.endLeases = context.WithCancelCause(r.handling)
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

// timeout bounds a round trip: no longer than a lease lasts, and not long when the caller of Run waits for its return.
func (r *runner) timeout() time.Duration {
	limit := max(r.d.cfg.LeaseDuration, time.Second)
	if r.stop.Err() != nil {
		return min(limit, 5*time.Second)
	}
	return limit
}

func earliest(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}
