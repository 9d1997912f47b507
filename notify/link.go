package notify

import (
	"context"
	"sync"
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
	retry  backoff.Policy
	slot   *puddle.Pool[*session]
	state  tracker

	mu        sync.Mutex         // guards what follows; no I/O under it
	listeners map[*Listener]bool // who runs, and whether it has been resynced on this connection
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
	remedy := "set ListenerConfig.Direct to a session connection: the server itself, or a pool in session mode"
	if direct != nil {
		remedy = "let ListenerConfig.Direct lead to the same server and database as the pool, by a session connection"
	}
	return &link{
		pool: pool, direct: direct, cfg: cfg, slot: slot,
		retry:     backoff.Policy{Base: cfg.ReconnectMin, Max: cfg.ReconnectMax},
		state:     tracker{logger: cfg.Logger, poll: cfg.PollInterval, remedy: remedy, changed: make(chan struct{})},
		listeners: make(map[*Listener]bool),
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
		err := k.read(ctx, s)
		switch {
		case err == nil:
		case ctx.Err() == nil:
			k.lost(s, err)
		case s.conn.IsClosed():
			s.close() // in the middle of a statement; whoever goes on opens another
		}
	}
}

func (k *link) attach(l *Listener) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.listeners[l] = false
	k.interruptLocked()
}

// detach closes the connection after the last listener. Nobody can hold the slot then: who holds it is attached.
func (k *link) detach(l *Listener) {
	k.mu.Lock()
	delete(k.listeners, l)
	last := len(k.listeners) == 0
	k.interruptLocked()
	k.mu.Unlock()
	if !last {
		return
	}
	for _, res := range k.slot.AcquireAllIdle() {
		s := res.Value()
		s.close()
		statement := s.statement
		res.ReleaseUnused()
		if statement != nil {
			<-statement
		}
		k.mu.Lock()
		if len(k.listeners) == 0 {
			k.state.stopped()
		}
		k.mu.Unlock()
	}
}

// open makes one attempt, after the wait that is due before it.
func (k *link) open(ctx context.Context, s *session) {
	if err := k.pause(ctx, s.wait); err != nil {
		return
	}
	s.attempt++
	refused := k.establish(ctx, s)
	switch {
	case ctx.Err() != nil:
		k.endSession(s) // half established at best: whoever goes on starts over
	case refused != nil:
		s.wait = k.retry.Delay(s.attempt)
		if refused.settled {
			s.wait = backoff.Spread(k.cfg.Reprove, 0.2)
		}
		k.state.set(refused.state, refused.reason, refused.err)
		k.endSession(s)
	}
}

func (k *link) pause(ctx context.Context, d time.Duration) error {
	if d < 0 {
		<-ctx.Done()
	}
	return backoff.Wait(ctx, d)
}

func (k *link) lost(s *session, err error) {
	if time.Since(s.opened) > k.cfg.ReconnectMax {
		s.attempt = 0 // a connection that lasted is not part of a series of failures
	}
	s.attempt++
	s.wait = k.retry.Delay(s.attempt)
	k.state.lost(err)
	k.endSession(s)
}

// endSession closes a connection, after the state was set, for it may take a while.
func (k *link) endSession(s *session) {
	if s.conn != nil {
		k.unlisten(s)
		s.close()
	}
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
