package outbox

import (
	"context"
	"errors"
	"log/slog"
	"math/bits"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/internal/backoff"
	"github.com/bounceproof/bounceproof/prepare"
)

// round is one round trip of a runner: a tick, what is to be recorded, and the pages that come next, in one group.
type round struct {
	batch  pgx.Batch
	ticks  bool
	tick   tickResult
	record record
	reads  []*lane
	calm   []*lane // whose page came to its end after crashes
	pages  map[int16]*page
	due    map[int16]bool    // of reads, those with keys that were due
	again  map[int16][]*item // and the events of these keys
}

// lanes returns the lanes that the round is about.
func (g *round) lanes() []*lane {
	all := slices.Clone(g.record.of)
	for _, l := range slices.Concat(g.reads, g.calm) {
		if !slices.Contains(all, l) {
			all = append(all, l)
		}
	}
	return all
}

// roundTrip sends a round for all lanes. If a statement of it is refused, the tick and each lane go by themselves, so that
// only those rest whose statement it was.
func (r *runner) roundTrip(ctx context.Context) error {
	now := time.Now()
	g := r.newRound(now, r.someLanes(), !r.stopping && r.wantTick && now.Sub(r.lastTick) >= tickInterval && r.needsTick())
	err := r.do(ctx, g)
	lanes := g.lanes()
	if !isOfStatement(ctx, err) || len(lanes) == 0 {
		return err
	}
	if g.ticks {
		if err := r.do(ctx, r.newRound(now, nil, true)); err != nil {
			return err
		}
	}
	for _, l := range lanes {
		err := r.do(ctx, r.newRound(now, []*lane{l}, false))
		switch {
		case err == nil:
		case isOfStatement(ctx, err):
			r.rest(l, err)
		default:
			return err
		}
	}
	return nil
}

// someLanes returns the lanes of a round: all, but fewer after rounds that took too long.
func (r *runner) someLanes() []*lane {
	n := max(1, len(r.lanes)>>min(r.smaller, 30))
	all := make([]*lane, 0, n)
	for _, l := range r.lanes { // in another order each time
		if l.state == idle || l.state == finished {
			if all = append(all, l); len(all) == n {
				break
			}
		}
	}
	return all
}

// pageSize is how many events of a lane a round reads: fewer once rounds of one lane took too long.
func (r *runner) pageSize() int {
	less := max(0, r.smaller-bits.Len(uint(len(r.lanes)))) //nolint:gosec // not negative
	return max(1, r.d.cfg.PageSize>>min(less, 30))
}

// isTooLong reports whether a round ended by a limit on its time. It is not repeated as it was.
func isTooLong(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return ok && pgErr.Code == "57014" || errors.Is(err, context.DeadlineExceeded)
}

// isOfStatement reports whether a round failed by what it asked for, rather than by the connection or the server: so that it would do so again.
func isOfStatement(ctx context.Context, err error) bool {
	if err == nil || ctx.Err() != nil || isUndefined(err) || errors.Is(err, ErrRebaseNeeded) || isSequenceError(err) {
		return false
	}
	return isRefusal(err)
}

// laneBackoff is the wait of a lane whose statement was refused.
var laneBackoff = backoff.Policy{Base: 500 * time.Millisecond, Max: time.Minute}

// rest leaves a lane alone for a while. What its handlers did and could not be recorded comes again.
func (r *runner) rest(l *lane, err error) {
	if l.failures++; l.failures == 1 {
		r.log.Warn("bounceproof: outbox: a lane cannot go on; it rests, and its page comes again", slog.Int("lane", int(l.id)), slog.Any("error", err))
	}
	l.readopt(time.Now().Add(max(laneBackoff.Delay(l.failures), askInterval)))
}

// do sends a round and acts on what came back.
func (r *runner) do(ctx context.Context, g *round) error {
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
	r.applyPages(g)
	return nil
}

// newRound collects what is due of lanes, and a tick if it is wanted.
func (r *runner) newRound(now time.Time, lanes []*lane, ticks bool) *round {
	g := &round{ticks: ticks, pages: make(map[int16]*page), again: make(map[int16][]*item), due: make(map[int16]bool)}
	var reads pages
	var again retries
	advance := !r.advanceAt.IsZero() && (r.stopping || !now.Before(r.advanceAt))
	if advance { // and at no other time: rounds may follow each other faster than it comes
		r.advanceAt = time.Time{}
	}
	for _, l := range lanes {
		if l.state == busy || l.state == adopting {
			continue // its place is the job's, or not known
		}
		at := l.progress.now
		switch {
		case l.state == finished:
			g.record.add(l, at, nil)
			if l.crashes > 0 {
				g.calm = append(g.calm, l)
			}
		case advance && !l.progress.recorded():
			g.record.add(l, at, nil)
		}
		if l.state == idle && l.survived && l.crashes > 0 {
			g.calm = append(g.calm, l)
		}
		if r.stopping || l.leaving {
			continue
		}
		keys := l.blocked.dueKeys(now, r.pageSize())
		again.add(l, keys, r.pageSize())
		log := !l.paused && (at.to.id != 0 || g.ticks || at.from.id < r.newest)
		if log {
			reads.add(l, at, r.pageSize())
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
	if g.record.empty() && len(g.reads) == 0 && len(g.calm) == 0 {
		return g
	}
	g.batch.Queue(begin)
	g.batch.Queue(r.s.sql.plans, prepare.Stable)
	if !g.record.empty() {
		g.record.queue(&g.batch, r.sub)
	}
	if len(g.calm) > 0 {
		r.queueResetCrashes(&g.batch, g.calm)
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
	for _, l := range g.record.of {
		if g.record.moved[l.id] {
			l.failures = 0
		}
	}
	for _, l := range g.record.apply(&r.d.counts) {
		// Somebody else has changed the lane's token, or an answer was lost and this is recorded already. The row says which.
		l.readopt(time.Time{})
	}
	for _, l := range g.record.of {
		if l.state == finished {
			l.state, l.crashes = idle, 0
		}
	}
	for _, l := range g.calm {
		if l.survived {
			l.crashes, l.survived = 0, false
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
