package notify

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/internal/backoff"
)

// ErrClosed is returned by a [Sender] that was closed. It is possibly wrapped: use errors.Is.
var ErrClosed = errors.New("notify: sender is closed")

// Execer runs one statement, with the signature of pgx. *pgxpool.Pool, *executor.Executor and pgx.Tx are ones.
type Execer interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

// SenderConfig configures a [Sender]. The zero value is good.
type SenderConfig struct {
	// Window is the least time between the starts of two statements, so a process makes at most one notifying commit per
	// window however much it publishes. A lone notification does not wait for it. Defaults to 10ms; at least 1ms.
	Window time.Duration

	// MaxStretch bounds how much longer than Window the wait between two statements becomes when the server, the network
	// or the pool is slow for some time: nineteen times what the quickest of the last eight statements took, so that
	// notifying is a twentieth of the time at most. It is what keeps a server with many listeners, all of which a
	// notifying commit wakes, from spending itself on them. Defaults to 100ms; negative means no stretching.
	MaxStretch time.Duration

	// MaxPayload is the longest payload accepted, in bytes. Defaults to [MaxPayload], which it cannot exceed.
	MaxPayload int

	// MaxPending is how many distinct payloads of one channel may wait. One more and they become a single empty payload,
	// which means "anything on this channel may have changed". Defaults to 1000.
	MaxPending int

	// Timeout bounds one statement, the wait for a connection included. Defaults to 5s; negative means none.
	Timeout time.Duration

	// RetryMax bounds the wait before a failed statement is tried again: exponential from 100ms, with full jitter.
	// Defaults to 5s. Close and Flush cut the wait short.
	RetryMax time.Duration

	// Options are put in front of the statement's arguments, in the manner of pgx. nil means pgx.QueryExecModeExec, which
	// needs no prepared statement and so works behind every pooler; an executor passes prepare.Stable. Use an empty,
	// non-nil slice for none.
	Options []any

	// Logger gets one warning when sending starts to fail and one information when it works again. It never sees a
	// payload. Defaults to slog.Default().
	Logger *slog.Logger
}

func (c SenderConfig) resolve() (SenderConfig, error) {
	if c.Window == 0 {
		c.Window = 10 * time.Millisecond
	}
	if c.MaxStretch == 0 {
		c.MaxStretch = 100 * time.Millisecond
	}
	if c.MaxPayload == 0 {
		c.MaxPayload = MaxPayload
	}
	if c.MaxPending == 0 {
		c.MaxPending = 1000
	}
	if c.Timeout == 0 {
		c.Timeout = 5 * time.Second
	}
	if c.RetryMax == 0 {
		c.RetryMax = 5 * time.Second
	}
	if c.Options == nil {
		c.Options = []any{pgx.QueryExecModeExec}
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	switch {
	case c.Window < time.Millisecond:
		return c, fmt.Errorf("notify: configure sender: Window is %v, must be at least 1ms", c.Window)
	case c.MaxPayload < 0 || c.MaxPayload > MaxPayload:
		return c, fmt.Errorf("notify: configure sender: MaxPayload is %d, must be at most %d", c.MaxPayload, MaxPayload)
	case c.MaxPending < 1:
		return c, fmt.Errorf("notify: configure sender: MaxPending is %d, must be at least 1", c.MaxPending)
	case c.RetryMax < 0:
		return c, fmt.Errorf("notify: configure sender: RetryMax is %v, must not be negative", c.RetryMax)
	}
	return c, nil
}

// SenderStats is a snapshot of a [Sender]'s counters. All but the last three only grow.
type SenderStats struct {
	Accepted   int64 // calls of Notify and NotifyTx that returned nil
	Coalesced  int64 // of those, calls that found the same notification waiting
	Collapsed  int64 // times a channel's payloads became one empty payload, because it or the queue was full
	Dropped    int64 // notifications given up: too many channels, refused by the server, or left over by Close
	Statements int64 // statements sent with success, that is notifying commits outside of publishers' transactions
	Sent       int64 // notifications in them
	InTx       int64 // notifications that rode in a publisher's transaction
	Failures   int64 // statements that failed; what they carried is tried again

	Pending     int           // notifications waiting now
	LastLatency time.Duration // how long the last statement took; NOTIFY's cluster-wide lock shows here
	LastError   error         // of the last statement; nil once one succeeds
}

// Sender coalesces notifications: the first goes out at once, what follows within the window goes out together at its
// end, each (channel, payload) once, all channels in one statement.
//
// The statement runs by itself, after the publisher's commit, because PostgreSQL holds a cluster-wide lock from before
// a notifying commit until after its flush (src/backend/commands/async.c, PreCommit_Notify): a publisher that notifies in
// its own transaction makes all others wait for its disk. A transaction that only notifies holds that lock for
// microseconds, for it does not wait for the flush (xact.c, RecordTransactionCommit).
//
// A Sender has a goroutine only while something waits to be sent. All methods are safe for concurrent use.
type Sender struct {
	db    Execer
	cfg   SenderConfig
	retry backoff.Policy

	ctx  context.Context // of the worker's statements; done when Close gives up
	stop context.CancelFunc
	kick chan struct{} // capacity 1: something is due earlier than the worker thinks

	mu       sync.Mutex // guards everything below; never held over a statement or a callback
	pending  queue      // due as soon as the window allows
	deferred queue      // of transactions that are not known to have committed: due a window after they came in
	sending  int        // notes in the statement under way
	working  bool       // a worker exists
	closed   bool
	attempts int              // left to a closing Sender
	drains   int              // calls of Flush and Close that wait
	ripen    bool             // deferred notes go out without their wait
	last     time.Time        // start of the last statement
	took     [8]time.Duration // by the last statements
	stretch  time.Time        // no statement before: they were slow
	lastTx   time.Time        // of the last notification in a publisher's transaction
	resume   time.Time        // no statement before: backoff after a failure
	failures int              // in a row
	done     uint64           // rounds finished with success
	changed  chan struct{}    // closed and replaced when a round ends
	subs     map[string][]*subscriber
	stats    SenderStats
}

type subscriber struct{ wake func(payload string) }

// NewSender returns a Sender that notifies through db. It starts nothing and does no I/O. The error is about cfg alone.
func NewSender(db Execer, cfg SenderConfig) (*Sender, error) {
	if db == nil {
		panic("notify: NewSender without an Execer")
	}
	cfg, err := cfg.resolve()
	if err != nil {
		return nil, err
	}
	s := &Sender{
		db: db, cfg: cfg,
		retry:    backoff.Policy{Base: min(100*time.Millisecond, cfg.RetryMax), Max: cfg.RetryMax},
		kick:     make(chan struct{}, 1),
		pending:  newQueue(cfg.MaxPending),
		deferred: newQueue(cfg.MaxPending),
		changed:  make(chan struct{}),
		subs:     make(map[string][]*subscriber),
	}
	s.ctx, s.stop = context.WithCancel(context.Background())
	return s, nil
}

// Notify announces payload on channel, to the subscribers of this process at once and to everybody else with the next
// statement. Call it after the commit of what it announces.
//
// It never blocks and never reports what becomes of the notification: that is counted (see [Sender.Stats]), logged and
// tried again. It returns a *[LimitError] for what PostgreSQL would refuse, and [ErrClosed].
func (s *Sender) Notify(channel, payload string) error {
	if err := s.check(channel, payload); err != nil {
		return err
	}
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return ErrClosed
	}
	s.acceptLocked(&s.pending, note{channel: channel, payload: payload, send: true, at: time.Now()})
	subs := s.subs[channel]
	s.mu.Unlock()
	for _, sub := range subs {
		sub.wake(payload)
	}
	return nil
}

func (s *Sender) check(channel, payload string) error {
	if err := CheckChannel(channel); err != nil {
		return err
	}
	return checkPayload(channel, payload, s.cfg.MaxPayload)
}

// acceptLocked puts n into q and sees to it that a worker will find it. Caller must hold mu.
func (s *Sender) acceptLocked(q *queue, n note) {
	s.stats.Accepted++
	first := len(q.notes) == 0
	switch q.add(n) {
	case addedNew:
	case addedMerged:
		s.stats.Coalesced++
	case addedCollapsed:
		s.stats.Collapsed++
	case addedDropped:
		s.stats.Dropped++
		return
	}
	if !s.working {
		s.working = true
		go s.work()
	} else if first {
		s.kickWorker()
	}
}

func (s *Sender) kickWorker() {
	select {
	case s.kick <- struct{}{}:
	default:
	}
}

// Subscribe has wake called for every notification of this process on channel, without a detour over the server. wake
// runs on the goroutine of the publisher, so it must be quick and must not block: typically it sends to a channel of
// capacity one if there is room. For a notification made by [Sender.NotifyTx] it is called a window later, when the
// transaction may have committed. The returned function ends the subscription; calls under way may still finish.
func (s *Sender) Subscribe(channel string, wake func(payload string)) (cancel func()) {
	sub := &subscriber{wake}
	s.mu.Lock()
	defer s.mu.Unlock()
	// Copied on write, so that Notify may walk the slice without the lock.
	s.subs[channel] = append(slices.Clip(s.subs[channel]), sub)
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		rest := slices.DeleteFunc(slices.Clone(s.subs[channel]), func(o *subscriber) bool { return o == sub })
		if len(rest) == 0 {
			delete(s.subs, channel)
		} else {
			s.subs[channel] = rest
		}
	}
}

// Stats returns a snapshot of the counters.
func (s *Sender) Stats() SenderStats {
	s.mu.Lock()
	defer s.mu.Unlock()
	stats := s.stats
	stats.Pending = len(s.pending.notes) + len(s.deferred.notes) + s.sending
	return stats
}
