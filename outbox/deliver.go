package outbox

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/bounceproof/bounceproof/internal/backoff"
)

// retryBackoff is the wait between two attempts at one event.
var retryBackoff = backoff.Policy{Base: 200 * time.Millisecond, Max: 5 * time.Minute}

// job is a page with the handlers.
type job struct {
	lane *lane
	page *page
	ok   []atomic.Bool // by event: handled
}

func newJob(l *lane, p *page) *job {
	return &job{lane: l, page: p, ok: make([]atomic.Bool, len(p.events))}
}

// prefix returns how many events from the first on are handled.
func (j *job) prefix() int {
	for i := range j.ok {
		if !j.ok[i].Load() {
			return i
		}
	}
	return len(j.ok)
}

// runs splits a page by key, in order; an event without a key is a run of its own.
func (j *job) runs() [][]int {
	runs := make([][]int, 0, len(j.page.events))
	byKey := make(map[string]int)
	for i := range j.page.events {
		key := j.page.events[i].Key
		if at, ok := byKey[key]; ok && key != "" {
			runs[at] = append(runs[at], i)
			continue
		}
		byKey[key] = len(runs)
		runs = append(runs, []int{i})
	}
	return runs
}

// deliver calls the handler for the events of a job, runs side by side. When stop is done it starts no more; ctx is the
// handlers'. It returns when all calls have.
func (d *Dispatcher) deliver(ctx, stop context.Context, slots chan struct{}, f HandlerFunc, j *job) {
	runs := j.runs()
	var next atomic.Int64
	var wg sync.WaitGroup
	for range min(len(runs), cap(slots)) {
		wg.Go(func() {
			for {
				i := int(next.Add(1)) - 1
				if i >= len(runs) {
					return
				}
				for _, e := range runs[i] {
					if !d.deliverOne(ctx, stop, slots, f, j.page.events[e]) {
						return
					}
					j.ok[e].Store(true)
				}
			}
		})
	}
	wg.Wait()
}

// deliverOne calls the handler until it succeeds; false when it was told to stop first.
func (d *Dispatcher) deliverOne(ctx, stop context.Context, slots chan struct{}, f HandlerFunc, e Delivery) bool {
	for {
		select {
		case slots <- struct{}{}:
		case <-stop.Done():
			return false
		case <-ctx.Done():
			return false
		}
		if stop.Err() != nil || ctx.Err() != nil {
			<-slots
			return false
		}
		err := f.call(ctx, e)
		<-slots
		if err == nil {
			d.counts.delivered.Add(1)
			return true
		}
		d.counts.retries.Add(1)
		if backoff.Wait(stop, retryBackoff.Delay(e.Attempt)) != nil || ctx.Err() != nil {
			return false
		}
		e.Attempt++
	}
}
