package outbox

import (
	"context"
	"errors"
	"log/slog"
	"time"
)

// item is an event with the handlers.
type item struct {
	Delivery
	stored  bool // it comes from the table of failed events
	outcome outcome
	err     error // the handler's, of what was not handled
}

type outcome int8

const (
	untried outcome = iota
	handled
	notHandled
)

// job is what a lane has with the handlers: a page, retries that were due, or both.
type job struct {
	r    *runner
	lane *lane // the job's alone until it is collected, except its identity
	page *page // nil: only retries

	ticks  [2]int64  // that must be there when the job is recorded
	end    position  // where the lane stands when all of it is
	runs   [][]*item // by key, in order; an event without a key is a run of its own
	behind []*item   // of the page, whose key waits outside the log

	ctx   context.Context // the handlers'
	leave chan struct{}   // closed when the lane is to be given back

	// Of the kinds with a transaction:
	recorded bool  // the job has recorded the lane's progress itself
	unsure   bool  // what the database says has to be read
	err      error // why
}

// newJob sorts a page and retries into runs.
func newJob(r *runner, l *lane, p *page, again []*item) *job {
	j := &job{r: r, lane: l, page: p, leave: make(chan struct{})}
	j.ticks = [2]int64{l.progress.now.from.id, l.progress.now.to.id}
	if p != nil {
		j.ticks[1] = p.to.id
	}
	j.end = j.next()
	byKey := make(map[string]int)
	add := func(it *item) {
		if at, ok := byKey[it.Key]; ok && it.Key != "" {
			j.runs[at] = append(j.runs[at], it)
			return
		}
		byKey[it.Key] = len(j.runs)
		j.runs = append(j.runs, []*item{it})
	}
	for _, it := range again {
		add(it)
	}
	if p != nil {
		for i := range p.events {
			it := &item{Delivery: p.events[i]}
			if it.Key != "" && l.blocked.has(it.blockKey()) {
				j.behind = append(j.behind, it)
				continue
			}
			add(it)
		}
	}
	return j
}

// next is where the lane stands when the job is recorded.
func (j *job) next() position {
	if j.page == nil {
		return j.lane.progress.now
	}
	return j.lane.progress.now.after(j.page, j.page.last())
}

// tried reports whether any event came to an end.
func (j *job) tried() bool {
	for _, run := range j.runs {
		for _, it := range run {
			if it.outcome != untried {
				return true
			}
		}
	}
	return len(j.runs) == 0 // all of the page is to be put behind others
}

// finish notes in the lane what became of all events, to be recorded.
func (j *job) finish() {
	for _, run := range j.runs {
		for _, it := range run {
			switch it.outcome {
			case handled:
				j.lane.succeed(it)
			case notHandled:
				j.fail(it)
			case untried:
				j.lane.park(it)
			}
		}
	}
	for _, it := range j.behind {
		j.lane.park(it)
	}
	j.lane.progress.now = j.next()
}

// fail notes in the lane that an attempt failed.
func (j *job) fail(it *item) {
	if j.lane.fail(it, it.err, &j.r.policy) {
		j.r.d.counts.dead.Add(1)
		j.r.log.Warn("bounceproof: outbox: an event is dead", slog.Int("lane", it.Lane), slog.Int64("seq", it.Seq), slog.String("type", it.Type),
			slog.Int("attempts", it.Attempt), slog.Any("error", it.err))
	}
}

// note notes how a call of the handler for one event ended. It reports whether the run goes on.
func (j *job) note(it *item, err error) bool {
	counts := &j.r.d.counts
	if err == nil {
		it.outcome = handled
		counts.delivered.Add(1)
		return true
	}
	if _, ok := errors.AsType[*discarded](err); ok {
		it.outcome = handled
		counts.discarded.Add(1)
		return true
	}
	if j.ctx.Err() != nil {
		return false // it was not the event's fault
	}
	counts.retries.Add(1)
	it.outcome, it.err = notHandled, err
	return false
}

// slot waits for a place among the running handlers; false when no more events are to be started.
func (j *job) slot() bool {
	select {
	case j.r.slots <- struct{}{}:
		if !j.halted() {
			return true
		}
		<-j.r.slots
	case <-j.leave:
	case <-j.r.stop.Done():
	case <-j.ctx.Done():
	}
	return false
}

func (j *job) free() { <-j.r.slots }

// giveUp lets the job finish the events that are with the handlers, and no more. The runner alone calls it, and may again.
func (j *job) giveUp() {
	select {
	case <-j.leave:
	default:
		close(j.leave)
	}
}

func (j *job) leaving() bool {
	select {
	case <-j.leave:
		return true
	default:
		return false
	}
}

// suspect reports whether the lane's former owners died so often that each attempt is to be written down before it begins.
func (j *job) suspect() bool { return j.lane.crashes >= suspicious }

func (j *job) halted() bool { return j.r.stop.Err() != nil || j.ctx.Err() != nil || j.leaving() }

func (j *job) inOrder(run []*item, one func(*item) error) {
	for _, it := range run {
		if it.outcome == handled {
			continue
		}
		if !j.slot() {
			return
		}
		err := one(it)
		j.free()
		if !j.note(it, err) {
			return
		}
	}
}

func (j *job) size() (n int) {
	for _, run := range j.runs {
		n += len(run)
	}
	return n
}

// fresh returns the events of the page that may be handled, in order of their numbers.
func (j *job) fresh() (items []*item) {
	if j.page == nil {
		return nil
	}
	at := make(map[int64]*item, len(j.page.events))
	for _, run := range j.runs {
		for _, it := range run {
			if !it.stored {
				at[it.Seq] = it
			}
		}
	}
	for i := range j.page.events {
		if it := at[j.page.events[i].Seq]; it != nil {
			items = append(items, it)
		}
	}
	return items
}

func deliveries(items []*item) []Delivery {
	ds := make([]Delivery, len(items))
	for i, it := range items {
		ds[i] = it.Delivery
	}
	return ds
}

// outageFailures is how many runs of a job must fail, and be most of it, to be taken for an outage of what the handler needs
// rather than for the events' own fault.
const outageFailures = 10

func (j *job) outage() bool {
	bad := 0
	for _, run := range j.runs {
		for _, it := range run {
			if it.outcome == notHandled {
				bad++
			}
		}
	}
	return bad >= outageFailures && 2*bad > len(j.runs)
}

// untilNoOutage repeats what failed while most of the job fails: the lane rests, its cursor stays, no attempt counts.
func (j *job) untilNoOutage(try func()) {
	for pass := 1; ; pass++ {
		try()
		if !j.outage() {
			return
		}
		if pass == 1 {
			j.r.log.Warn("bounceproof: outbox: most of a page fails; the lane rests", slog.Int("lane", int(j.lane.id)), slog.Any("error", j.anError()))
		}
		for _, run := range j.runs {
			for _, it := range run {
				if it.outcome == notHandled {
					it.outcome = untried
				}
			}
		}
		if !j.pause(j.r.policy.backoff(pass)) {
			return
		}
	}
}

func (j *job) anError() error {
	for _, run := range j.runs {
		for _, it := range run {
			if it.outcome == notHandled {
				return it.err
			}
		}
	}
	return nil
}

// pause waits; false when the lane has something else to do.
func (j *job) pause(d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-j.leave:
	case <-j.r.stop.Done():
	case <-j.ctx.Done():
	}
	return false
}
