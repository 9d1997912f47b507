package notify

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/internal/backoff"
	"github.com/bounceproof/bounceproof/internal/connstring"
)

// ErrRunning is returned by [Listener.Run] while another call of it runs. Use errors.Is.
var ErrRunning = errors.New("notify: listener is running already")

// Pool is what a [Listener] needs of a pool; *pgxpool.Pool is one. Config tells how to connect (the pool's own
// connections are never borrowed for listening); Exec sends the notes by which delivery is proven, from another session, on the
// path that publishers use, and asks where that path leads, for which the number of rows in the command tag is all that is needed.
type Pool interface {
	Execer
	Config() *pgxpool.Config
}

// ListenerConfig configures a [Listener]. The zero value is good for a pool that connects to the server itself or to a
// pooler in session mode. A duration of 0 means the default, and a negative one off where that has a meaning.
type ListenerConfig struct {
	// Direct is the connection string of a session connection: to the server itself, or to a pooler in session mode. Set
	// it when the pool goes through a pooler in transaction mode, where LISTEN cannot work. The pool's BeforeConnect is
	// not applied to it. Parameters of a pool (pool_max_conns and its like) are passed over. Empty means the pool's own configuration. No error
	// repeats a piece of it.
	Direct string

	// DirectBeforeConnect, if set, is called before each connection by Direct, with a copy of its configuration to change: what
	// BeforeConnect of a pgxpool.Config is to a pool. Set it where credentials expire. An error of it is that of an attempt to connect: the
	// listener polls, and tries again with backoff. It is an error without Direct.
	DirectBeforeConnect func(context.Context, *pgx.ConnConfig) error

	// PollInterval is the mean time between [Polled] events while notifications are not proven to arrive. Each wait is
	// drawn from 80 to 120 percent of it. Defaults to 1s; negative means no polling.
	PollInterval time.Duration

	// ProvenPollInterval is the same while they are. It bounds the harm of a notification that was never sent, for
	// instance because its sender died after the commit. Defaults to 5s; negative means no polling.
	ProvenPollInterval time.Duration

	// Heartbeat is the longest time between two proofs of delivery and HeartbeatTimeout how long one may take, so their
	// sum bounds how long a dead connection goes unnoticed. The note of another listener of the same database is a proof too, so
	// all of them together send about one a Heartbeat; each runs one short statement through its pool meanwhile. HeartbeatTimeout also bounds how long a new connection may
	// take to be proven or found isolated. Default to 10s and 5s. A negative Heartbeat means that delivery is proven once a
	// connection (and when another listener takes it over), and that a dead one is noticed when its socket fails, if it
	// ever does. HeartbeatTimeout must not be negative: without it nothing could be found isolated.
	Heartbeat, HeartbeatTimeout time.Duration

	// ReconnectMin and ReconnectMax bound the exponential backoff, with full jitter, between attempts to connect. Default
	// to 1s, so that the first attempts of many processes are spread over a second, and 10s. They must not be negative: a
	// server that is down would be asked without a pause.
	ReconnectMin, ReconnectMax time.Duration

	// Reprove is the mean time between two attempts to listen while isolated. Defaults to 30s; negative means never again.
	Reprove time.Duration

	// MaxPending is how many distinct payloads of one channel may wait for its handler. One more and they become a single
	// empty payload. Defaults to 1000.
	MaxPending int

	// Sender, if set, wakes handlers directly for what this process publishes through it, whatever the state of the
	// connection. The same notification usually arrives once more over the server.
	Sender *Sender

	// Logger gets one line per change of state. It never sees a payload. Defaults to slog.Default().
	Logger *slog.Logger
}

func (c ListenerConfig) resolve() (ListenerConfig, error) {
	for _, d := range []struct {
		name     string
		field    *time.Duration
		byItself time.Duration
		off      bool // negative means off
	}{
		{"PollInterval", &c.PollInterval, time.Second, true},
		{"ProvenPollInterval", &c.ProvenPollInterval, 5 * time.Second, true},
		{"Heartbeat", &c.Heartbeat, 10 * time.Second, true},
		{"HeartbeatTimeout", &c.HeartbeatTimeout, 5 * time.Second, false},
		{"ReconnectMin", &c.ReconnectMin, time.Second, false},
		{"ReconnectMax", &c.ReconnectMax, max(10*time.Second, c.ReconnectMin), false},
		{"Reprove", &c.Reprove, 30 * time.Second, true},
	} {
		if *d.field == 0 {
			*d.field = d.byItself
		}
		if *d.field < 0 && !d.off {
			return c, fmt.Errorf("notify: configure listener: %s is %v, must not be negative", d.name, *d.field)
		}
	}
	if c.MaxPending == 0 {
		c.MaxPending = 1000
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	switch {
	case c.Direct == "" && c.DirectBeforeConnect != nil:
		return c, errors.New("notify: configure listener: DirectBeforeConnect is set without Direct, to whose connections it belongs")
	case c.MaxPending < 1:
		return c, fmt.Errorf("notify: configure listener: MaxPending is %d, must be at least 1", c.MaxPending)
	case c.ReconnectMax < c.ReconnectMin:
		return c, fmt.Errorf("notify: configure listener: ReconnectMax is %v, must be at least ReconnectMin, %v",
			c.ReconnectMax, c.ReconnectMin)
	}
	return c, nil
}

// Listener calls handlers when something happens on their channels. It owns one connection, apart from the pool, and
// holds no other for longer than it takes to find out what kind of connection it has.
//
// Handle and Run must not be called concurrently; all other methods are safe for concurrent use.
type Listener struct {
	cfg  ListenerConfig
	link *link

	inboxes map[string][]*inbox
	mu      sync.Mutex // guards what follows
	ran     bool
	running bool
	endedAt time.Time // of the latest Run
}

// NewListener returns a Listener without handlers. It starts nothing and does no I/O. The error is about cfg alone.
func NewListener(pool Pool, cfg ListenerConfig) (*Listener, error) {
	if pool == nil {
		panic("notify: NewListener: nil pool")
	}
	cfg, err := cfg.resolve()
	if err != nil {
		return nil, err
	}
	var direct *pgx.ConnConfig
	if cfg.Direct != "" {
		c, err := connstring.Parse(cfg.Direct)
		if err != nil {
			return nil, fmt.Errorf("notify: configure listener: Direct: %w", err)
		}
		direct = c.ConnConfig
	}
	return &Listener{cfg: cfg, link: newLink(pool, direct, cfg), inboxes: make(map[string][]*inbox)}, nil
}

// Share returns a Listener without handlers that has the configuration of l and uses the same connection. Each is run by
// itself; the connection is open while at least one of them runs, and is handed from one to the next without being
// closed.
func (l *Listener) Share() *Listener {
	return &Listener{cfg: l.cfg, link: l.link, inboxes: make(map[string][]*inbox)}
}

// Handle registers a handler of a channel. A channel may have several: each gets every event, at its own pace. It panics when
// called after Run, without a handler, or with a channel that [CheckChannel] refuses.
func (l *Listener) Handle(channel string, h Handler) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if h == nil {
		panic("notify: Handle: nil handler for channel " + channel)
	}
	if err := CheckChannel(channel); err != nil {
		panic(err.Error())
	}
	if l.ran {
		panic("notify: Handle: called after Run, for channel " + channel)
	}
	l.inboxes[channel] = append(l.inboxes[channel], newInbox(channel, h, l.cfg.MaxPending))
}

// Run connects, listens and calls the handlers until ctx is done, and returns nil then, when the last handler has
// returned. Nothing that goes wrong on the way makes it return: it reconnects, or polls. It may be run again afterwards;
// while it is running already it returns [ErrRunning].
//
// The last Run of a connection also waits for the heartbeat's statement, if one is under way on the pool, for a third of
// HeartbeatTimeout at most: a statement that is cancelled can cost somebody else his, behind a pooler.
func (l *Listener) Run(ctx context.Context) error {
	l.mu.Lock()
	if l.running {
		l.mu.Unlock()
		return ErrRunning
	}
	l.ran, l.running = true, true
	l.mu.Unlock()
	defer func() {
		l.mu.Lock()
		l.running, l.endedAt = false, time.Now()
		l.mu.Unlock()
	}()

	defer l.subscribe()()
	var wg sync.WaitGroup
	defer wg.Wait()
	for _, inboxes := range l.inboxes {
		for _, in := range inboxes {
			wg.Go(func() { in.run(ctx) })
		}
	}
	wg.Go(func() { l.poll(ctx) })
	l.link.serve(ctx, l)
	return nil
}

// subscribe has this process's own Sender put its notifications into the inboxes, if there is one.
func (l *Listener) subscribe() (cancel func()) {
	var cancels []func()
	if l.cfg.Sender != nil {
		for channel, inboxes := range l.inboxes {
			cancels = append(cancels, l.cfg.Sender.Subscribe(channel, func(payload string) {
				for _, in := range inboxes {
					in.put(Notified, payload)
				}
			}))
		}
	}
	return func() {
		for _, cancel := range cancels {
			cancel()
		}
	}
}

// poll leaves Polled events in all inboxes, at the pace of the state.
func (l *Listener) poll(ctx context.Context) {
	last := time.Now()
	draw := func(d time.Duration) time.Duration { return backoff.Spread(d, 0.2) }
	// The first wait is drawn from the whole interval: processes that start together must not poll together.
	first := backoff.Policy{Base: max(l.cfg.PollInterval, 0)}.Delay(1)
	for {
		state, changed := l.link.state.watch(l)
		interval := l.cfg.PollInterval
		if state == Proven {
			interval = l.cfg.ProvenPollInterval
		}
		var tick <-chan time.Time
		var timer *time.Timer
		if interval > 0 {
			wait := draw(interval)
			if first > 0 {
				wait = min(wait, first)
			}
			timer = time.NewTimer(time.Until(last.Add(wait)))
			tick = timer.C
		}
		select {
		case <-ctx.Done():
		case <-changed:
		case <-tick:
			first = 0
			last = time.Now()
			for _, inboxes := range l.inboxes {
				for _, in := range inboxes {
					in.put(Polled, "")
				}
			}
		}
		if timer != nil {
			timer.Stop()
		}
		if ctx.Err() != nil {
			return
		}
	}
}

func (l *Listener) ended() time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.endedAt
}

// State returns what is known about delivery to this listener now. It takes no I/O, and the evidence of the moment it is called.
func (l *Listener) State() State {
	state, _ := l.link.state.watch(l)
	return state
}

// Healthy reports whether the state is [Proven].
func (l *Listener) Healthy() bool { return l.State() == Proven }

// Status returns a snapshot of the state, its reason and the counters.
func (l *Listener) Status() Status { return l.link.state.snapshot(l) }
