package outbox

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"reflect"
	"slices"
	"sync/atomic"
	"time"

	"github.com/bounceproof/bounceproof/notify"
)

// DispatcherConfig says how a dispatcher works. The zero value works. Durations: 0 is the default.
type DispatcherConfig struct {
	// LeaseDuration is how long lanes stay with a dispatcher that died, and so how long they rest then. It is renewed after a
	// third of it, at the latest after 2 s. Defaults to 15 s; at least 100 ms.
	LeaseDuration time.Duration

	// PollInterval is how often a dispatcher looks for events by itself, give or take a tenth. Defaults to 1 s. Negative: never, only
	// when woken.
	PollInterval time.Duration

	// Proven, if set, says that wake-ups are known to arrive; notify.Listener.Healthy is meant. While it returns true the dispatcher polls five
	// times as seldom.
	Proven func() bool

	// Concurrency is how many handlers run at once in this dispatcher, all lanes together. Defaults to 16.
	Concurrency int

	// PageSize is how many events of a lane are read, and completed, at once: also how many a crash may deliver again per lane.
	// Defaults to 100; at most 1,000.
	PageSize int

	// MaxAttempts is how many attempts an event has. After the last one it is dead: it stays in the table of failed events until
	// somebody decides. Defaults to 20; negative: no limit.
	MaxAttempts int

	// MinBackoff and MaxBackoff bound the wait between two attempts: it is drawn from zero to MinBackoff after the first and to twice
	// that after each further one, up to MaxBackoff. They default to 1 s and 10 min.
	MinBackoff, MaxBackoff time.Duration

	// ShutdownTimeout is how long handlers may go on when Run is told to stop. Then their context is done; Run waits for them
	// in any case. Defaults to 10 s. Negative: their context is done at once.
	ShutdownTimeout time.Duration

	// Middleware is called around every call of the handler; the first is the outermost.
	Middleware []Middleware

	// Owner begins the name under which the dispatcher holds its leases, for people to read. Defaults to the host's name and
	// the process id. What makes it unique is added.
	Owner string

	// Logger defaults to the store's.
	Logger *slog.Logger
}

func (cfg DispatcherConfig) resolve(s *Store) (DispatcherConfig, error) {
	if cfg.LeaseDuration == 0 {
		cfg.LeaseDuration = 15 * time.Second
	}
	if cfg.PollInterval == 0 {
		cfg.PollInterval = time.Second
	}
	if cfg.Concurrency == 0 {
		cfg.Concurrency = 16
	}
	if cfg.PageSize == 0 {
		cfg.PageSize = 100
	}
	if cfg.ShutdownTimeout == 0 {
		cfg.ShutdownTimeout = 10 * time.Second
	}
	if cfg.MaxAttempts == 0 {
		cfg.MaxAttempts = 20
	}
	if cfg.MinBackoff == 0 {
		cfg.MinBackoff = time.Second
	}
	if cfg.MaxBackoff == 0 {
		cfg.MaxBackoff = max(10*time.Minute, cfg.MinBackoff)
	}
	if cfg.Owner == "" {
		host, _ := os.Hostname() // an empty one is as good
		cfg.Owner = fmt.Sprintf("%s-%d", host, os.Getpid())
	}
	if cfg.Logger == nil {
		cfg.Logger = s.log
	}
	switch {
	case cfg.LeaseDuration < 100*time.Millisecond:
		return cfg, fmt.Errorf("outbox: DispatcherConfig.LeaseDuration %v: want at least 100 ms", cfg.LeaseDuration)
	case cfg.Concurrency < 0:
		return cfg, fmt.Errorf("outbox: DispatcherConfig.Concurrency %d: want at least 1", cfg.Concurrency)
	case cfg.PageSize < 0 || cfg.PageSize > 1000:
		return cfg, fmt.Errorf("outbox: DispatcherConfig.PageSize %d: want 1 to 1,000", cfg.PageSize)
	case cfg.MinBackoff < 0 || cfg.MaxBackoff < cfg.MinBackoff:
		return cfg, fmt.Errorf("outbox: DispatcherConfig.MinBackoff %v, MaxBackoff %v: want 0 or more, and the second not below the first", cfg.MinBackoff, cfg.MaxBackoff)
	case len(cfg.Owner) > 200 || !storable(cfg.Owner):
		return cfg, errors.New("outbox: DispatcherConfig.Owner: want text of at most 200 bytes")
	}
	for i, m := range cfg.Middleware {
		if m == nil {
			return cfg, fmt.Errorf("outbox: DispatcherConfig.Middleware[%d]: nil", i)
		}
	}
	cfg.Middleware = slices.Clone(cfg.Middleware)
	return cfg, nil
}

// Dispatcher delivers the events of a subscription to a handler. Several dispatchers, in one process or many, share a
// subscription's lanes. Safe for concurrent use.
type Dispatcher struct {
	sub     *Subscription
	kind    kind
	cfg     DispatcherConfig
	wake    chan struct{} // capacity 1
	running atomic.Bool
	counts  counts
}

// NewDispatcher returns a dispatcher that does nothing until Run. It calls the method of the most specific interface that h implements, see
// [Handler]; functions of all kinds have adapters: [HandlerFunc], [BatchHandlerFunc], [TxHandlerFunc] and [BatchTxHandlerFunc]. The error
// names the field of cfg that is wrong, or a handler that is a nil function. A nil subscription or handler panics.
func NewDispatcher(sub *Subscription, h Handler, cfg DispatcherConfig) (*Dispatcher, error) {
	if sub == nil {
		panic("outbox: NewDispatcher: nil subscription")
	}
	if h == nil {
		panic("outbox: NewDispatcher: nil handler")
	}
	if v := reflect.ValueOf(h); v.Kind() == reflect.Func && v.IsNil() {
		return nil, fmt.Errorf("outbox: NewDispatcher: the handler is a nil %T", h)
	}
	cfg, err := cfg.resolve(sub.store)
	if err != nil {
		return nil, err
	}
	return &Dispatcher{sub: sub, kind: kindOf(h), cfg: cfg, wake: make(chan struct{}, 1)}, nil
}

// ErrRunning is returned by a Run while another one of the same dispatcher runs.
var ErrRunning = errors.New("outbox: dispatcher: already running")

// Run delivers until ctx is done. Then it starts no more events, waits for the handlers that run, records what they did, gives
// its lanes back, which the others take within two seconds, and returns nil. It outlives any failure of the database, which it logs once; what it
// returns are states that do not pass: [ErrNotMigrated], [ErrRebaseNeeded], [ErrUnsubscribed], a [*SequenceError], and executor.ErrStatementMode for handlers
// of a kind with a transaction. The others work in statement mode too, for each of a dispatcher's transactions is one request.
//
// A dispatcher uses one connection of the executor's pool at a time, for scheduled events and sweeping now and then a second, and one
// for each lane that is with a handler of a kind with a transaction. None is held between uses.
func (d *Dispatcher) Run(ctx context.Context) error {
	if !d.running.CompareAndSwap(false, true) {
		return ErrRunning
	}
	defer d.running.Store(false)
	defer d.sub.store.listen(d.wake)()
	r := newRunner(d, d.cfg.Owner+"/"+randomID())
	return r.run(ctx)
}

// randomID makes an owner unique: one that started again is not the one that died.
func randomID() string {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}

// Wake makes the dispatcher look for events now. It never blocks.
func (d *Dispatcher) Wake() {
	select {
	case d.wake <- struct{}{}:
	default:
	}
}

// HandleEvent makes a dispatcher a notify.Handler. Register it for [Store.Channel] to be woken by publishers of other processes.
func (d *Dispatcher) HandleEvent(context.Context, notify.Event) { d.Wake() }

var _ notify.Handler = (*Dispatcher)(nil)

// DispatcherStats are counts since the dispatcher was made.
type DispatcherStats struct {
	Delivered            int64 // events whose handler succeeded, whether or not that could be recorded
	Discarded            int64 // events whose handler returned Discard
	Retries              int64 // attempts that failed
	Dead                 int64 // events that failed for the last time
	Pages                int64 // pages with events
	LeasesLost           int64 // lanes that another dispatcher took, or that ran out
	CompletionRoundTrips int64 // round trips that recorded progress
	Ticks                int64 // ticks this dispatcher made
}

type counts struct {
	delivered, discarded, retries, dead, pages, leasesLost, completions, ticks atomic.Int64
}

// Stats returns the counts so far.
func (d *Dispatcher) Stats() DispatcherStats {
	return DispatcherStats{
		Delivered: d.counts.delivered.Load(), Discarded: d.counts.discarded.Load(), Retries: d.counts.retries.Load(),
		Dead: d.counts.dead.Load(), Pages: d.counts.pages.Load(),
		LeasesLost: d.counts.leasesLost.Load(), CompletionRoundTrips: d.counts.completions.Load(), Ticks: d.counts.ticks.Load(),
	}
}
