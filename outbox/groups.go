package outbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/bounceproof/bounceproof/executor"
)

const (
	maxGroupEvents = 1000
	maxGroupBytes  = 1 << 20
	maxGroups      = 4                     // sent at a time
	stuckAfter     = 10 * time.Millisecond // a group that takes longer has others sent beside it
)

// groups brings concurrent calls of [Store.PublishNow] together. A worker exists while something waits that it may send: one is enough until its group is
// stuck. Calls with a key that a group under way has wait for that group: it would only wait for the same lock, and make others wait with it.
type groups struct {
	send func(context.Context, []*groupCall) error

	mu      sync.Mutex
	waiting []*groupCall
	workers int
	sentAt  time.Time // of the last group
	locks   map[int64]struct{}
}

// groupCall is one call.
type groupCall struct {
	ctx   context.Context //nolint:containedctx // the group sends for it
	c     *columns
	done  chan error // holds the outcome
	group *group     // nil: waits
}

// group is what is sent together. Its context ends when all of its calls have given up.
type group struct {
	calls  []*groupCall
	live   int
	cancel context.CancelFunc
}

func (g *groups) add(call *groupCall) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.waiting = append(g.waiting, call)
	if g.workers == 0 {
		g.workers++
		go g.work()
	}
}

// relieve starts another worker if all that is under way has been so for long.
func (g *groups) relieve() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.waiting) > 0 && g.workers < maxGroups && time.Since(g.sentAt) >= stuckAfter {
		g.workers++
		g.sentAt = time.Now() // the worker is on its way
		go g.work()
	}
}

// leave takes a call out whose context has ended, and returns its outcome.
func (g *groups) leave(call *groupCall) error {
	g.mu.Lock()
	if call.group == nil {
		g.waiting = slices.DeleteFunc(g.waiting, func(c *groupCall) bool { return c == call })
		g.mu.Unlock()
		return call.ctx.Err()
	}
	call.group.live--
	last := call.group.live == 0
	if last {
		call.group.cancel()
	}
	g.mu.Unlock()
	if !last {
		select {
		case err := <-call.done:
			return err
		default:
			return fmt.Errorf("%w: %w", executor.ErrCommitUnknown, call.ctx.Err())
		}
	}
	err := <-call.done // soon: its context has ended
	switch {
	case err == nil || errors.Is(err, call.ctx.Err()):
		return err
	case errors.Is(err, context.Canceled): // the group's own context
		return fmt.Errorf("%w (%w)", call.ctx.Err(), err)
	}
	return err
}

func (g *groups) work() {
	for {
		sending, ctx := g.next()
		if sending == nil {
			return
		}
		g.finish(ctx, sending.calls)
		sending.cancel()
		g.release(sending)
	}
}

// next takes what is sent next, or ends the worker.
func (g *groups) next() (*group, context.Context) {
	g.mu.Lock()
	defer g.mu.Unlock()
	var next group
	var events, bytes int
	own := make(map[int64]struct{})
	rest := g.waiting[:0]
	for i, call := range g.waiting {
		if g.busy(call) {
			rest = append(rest, call)
			continue
		}
		n, size, keys := call.c.size(own)
		if len(next.calls) > 0 && (events+n > maxGroupEvents || bytes+size > maxGroupBytes || len(own)+keys > MaxKeys) {
			rest = append(rest, g.waiting[i:]...)
			break
		}
		events, bytes = events+n, bytes+size
		for lock := range call.c.keyLocks() {
			own[lock] = struct{}{}
		}
		call.group = &next
		next.calls = append(next.calls, call)
	}
	clear(g.waiting[len(rest):])
	g.waiting = rest
	if len(next.calls) == 0 {
		g.workers--
		return nil, nil
	}
	for lock := range own {
		g.locks[lock] = struct{}{}
	}
	g.sentAt = time.Now()
	next.live = len(next.calls)
	var ctx context.Context
	ctx, next.cancel = context.WithCancel(context.WithoutCancel(next.calls[0].ctx))
	return &next, ctx
}

// busy reports whether a group under way has one of the call's keys.
func (g *groups) busy(call *groupCall) bool {
	if len(g.locks) == 0 {
		return false
	}
	for lock := range call.c.keyLocks() {
		if _, ok := g.locks[lock]; ok {
			return true
		}
	}
	return false
}

// size returns what a call adds to a group that has locks.
func (c *columns) size(locks map[int64]struct{}) (events, bytes, keys int) {
	for _, p := range c.payloads {
		bytes += len(p)
	}
	if c.keyed {
		added := make(map[int64]struct{})
		for lock := range c.keyLocks() {
			if _, ok := locks[lock]; !ok {
				added[lock] = struct{}{}
			}
		}
		keys = len(added)
	}
	return len(c.types), bytes, keys
}

// finish sends calls until each has an outcome.
func (g *groups) finish(ctx context.Context, calls []*groupCall) {
	err := g.send(ctx, calls)
	if len(calls) > 1 && refusedForContent(err) && ctx.Err() == nil {
		half := len(calls) / 2
		g.finish(ctx, calls[:half])
		g.finish(ctx, calls[half:])
		return
	}
	for _, call := range calls {
		call.done <- err
	}
}

// release lets the group's keys go.
func (g *groups) release(sent *group) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, call := range sent.calls {
		for lock := range call.c.keyLocks() {
			delete(g.locks, lock)
		}
	}
}
