package notify

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/puddle/v2"

	"github.com/bounceproof/bounceproof/internal/backoff"
)

// link is the dedicated connection of one or more listeners: who uses it, in what state it is, and the loop that keeps
// it alive.
//
// The loop runs on the goroutine of one listener's Run. The others wait for the slot, a puddle pool of size one, and
// whoever gets it next goes on reading from the same connection. So no goroutine exists that no caller of Run owns, and
// no connection is left unread, which would hold up the cluster's notification queue.
type link struct {
	pool   Pool
	direct *pgx.ConnConfig // nil: the pool's configuration
	cfg    ListenerConfig
	pace   pace
	retry  backoff.Policy
	slot   *puddle.Pool[*session]
	state  *tracker
	plain  atomic.Bool // notes carry no identity: the server does not tell

	mu        sync.Mutex // guards what follows; no I/O under it
	listeners map[*Listener]struct{}
	moved     bool               // since the channels were looked at
	interrupt context.CancelFunc // ends the wait of the loop
	pending   bool               // an interrupt that found no wait
}

func newLink(pool Pool, direct *pgx.ConnConfig, cfg ListenerConfig) *link {
	slot, err := puddle.NewPool(&puddle.Config[*session]{
		// Connecting is the loop's work, under the context of a Run and with its backoff; puddle's constructor would do it
		// on a goroutine of its own.
		Constructor: func(context.Context) (*session, error) { return &session{}, nil },
		Destructor:  func(s *session) { s.close() },
		MaxSize:     1,
	})
	if err != nil {
		panic("bug: " + err.Error())
	}
	return &link{
		pool: pool, direct: direct, cfg: cfg, pace: cfg.pace(), slot: slot,
		retry:     backoff.Policy{Base: cfg.ReconnectMin, Max: cfg.ReconnectMax},
		state:     newTracker(cfg),
		listeners: make(map[*Listener]struct{}),
	}
}

// serve runs the link on behalf of l until ctx is done.
func (k *link) serve(ctx context.Context, l *Listener) {
	k.attach(l)
	defer k.detach(l)
	res, err := k.slot.Acquire(ctx)
	if err != nil {
		return // ctx is done
	}
	defer res.Release()
	s := res.Value()
	for ctx.Err() == nil {
		if s.conn == nil {
			k.open(ctx, s)
			continue
		}
		if why := k.read(ctx, s); why != nil {
			k.lost(ctx, s, why)
		}
	}
}

func (k *link) attach(l *Listener) {
	k.state.joined(l)
	k.mu.Lock()
	defer k.mu.Unlock()
	k.listeners[l] = struct{}{}
	k.moved = true
	k.interruptLocked()
}

// detach closes the connection after the last listener. Nobody can hold the slot then: who holds it is attached.
func (k *link) detach(l *Listener) {
	k.state.left(l)
	k.mu.Lock()
	delete(k.listeners, l)
	k.moved = true
	last := len(k.listeners) == 0
	k.interruptLocked()
	k.mu.Unlock()
	if !last {
		return
	}
	for _, res := range k.slot.AcquireAllIdle() {
		s := res.Value()
		statement := s.statement
		k.endSession(s, &refusal{}, false)
		*s = session{past: past{statement: statement}} // whoever runs it again starts afresh
		res.ReleaseUnused()
		if statement != nil {
			<-statement
		}
	}
}

// open makes one attempt, after the wait that is due before it.
func (k *link) open(ctx context.Context, s *session) {
	if err := backoff.Wait(ctx, time.Until(s.next)); err != nil {
		return
	}
	s.attempt++
	why := k.establish(ctx, s)
	switch {
	case why == nil:
	case ctx.Err() != nil:
		k.endSession(s, &refusal{}, false) // half established, and nobody's fault: whoever goes on starts over
	default:
		k.pause(s, why)
		k.endSession(s, why, false)
	}
}

// pause sets when to try again.
func (k *link) pause(s *session, why *refusal) {
	wait := k.retry.Delay(s.attempt)
	switch {
	case why.atOnce:
		wait = 0
	case why.settled && k.cfg.Reprove < 0:
		wait = never
	case why.settled:
		wait = backoff.Spread(k.cfg.Reprove, 0.2)
	}
	s.next = time.Now().Add(wait)
}

func (k *link) lost(ctx context.Context, s *session, why *refusal) {
	if ctx.Err() != nil {
		// In the middle of a statement. Whoever goes on opens another at once.
		why.reason = "the listener that read it has stopped"
		s.next = time.Time{}
		k.endSession(s, why, true)
		return
	}
	if time.Since(s.opened) > k.cfg.ReconnectMax {
		s.attempt = 0 // a connection that lasted is not part of a series of failures
	}
	s.attempt++
	k.pause(s, why)
	k.endSession(s, why, true)
}

// endSession is the only end of a connection: it changes the state first, for closing may take a while.
func (k *link) endSession(s *session, why *refusal, lost bool) {
	k.state.closed(why, lost)
	s.endBeat()
	if s.conn != nil {
		k.unlisten(s)
		s.close()
	}
}

// unhurried bounds a statement on the connection. It outlives ctx by a moment, for in the middle of a statement a connection cannot
// be handed on, and whoever stops seldom is the only one who uses it.
func (k *link) unhurried(ctx context.Context, timeout time.Duration) (context.Context, context.CancelFunc) {
	longer, cancel := context.WithTimeout(context.WithoutCancel(ctx), timeout)
	stop := context.AfterFunc(ctx, func() {
		_ = backoff.Wait(longer, k.cfg.HeartbeatTimeout/10)
		cancel()
	})
	return longer, func() { stop(); cancel() }
}

// interruptible returns a context that ends at deadline, or as soon as somebody calls interruptLocked.
func (k *link) interruptible(ctx context.Context, deadline time.Time) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithDeadline(ctx, deadline)
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.pending {
		k.pending = false
		cancel()
	}
	k.interrupt = cancel
	return ctx, cancel
}

func (k *link) interruptLocked() {
	if k.interrupt != nil {
		k.interrupt()
	}
	k.pending = true
}
