package notify

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/internal/backoff"
)

// ErrClosed is returned by a [Sender] that was closed. It is possibly wrapped: use errors.Is.
var ErrClosed = errors.New("notify: sender is closed")

// Execer runs one statement, with the signature of pgx. *pgxpool.Pool, *executor.Executor and pgx.Tx are ones.
type Execer interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

// SenderStats is a snapshot of a [Sender]'s counters. All but the last three only grow.
type SenderStats struct {
	Accepted   int64 // calls of Notify and NotifyTx that returned nil
	Coalesced  int64 // of those, calls that found the same notification waiting
	Collapsed  int64 // times that payloads became one empty payload: the channel or the queue was full, or the server refused one
	Dropped    int64 // notifications given up: too many channels, a channel the server refused, or left over by Close
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

	ctx    context.Context // of the worker; done when Close gives up
	stop   context.CancelFunc
	wakeup chan struct{} // capacity 1: something is due earlier than the worker thinks

	// commitWait is how long a transaction is given to commit before what it announced is sent outside of it.
	commitWait time.Duration

	mu       sync.Mutex // guards everything below; never held over a statement or a callback
	calls    uint64     // accepted
	pending  queue      // due as soon as the window allows
	deferred queue      // of transactions that are not known to have committed: due commitWait after they came in
	refused  refused    // what the server may not take
	sending  []note     // in the statement under way
	working  bool       // a worker exists
	closed   bool
	attempts int // left to a closing Sender
	waiters  map[*waiter]struct{}
	flushing bool             // deferred notes go out without their wait
	last     time.Time        // start of the last statement
	took     [8]time.Duration // by the last statements
	slowed   time.Time        // no statement before: they were slow
	lastTx   time.Time        // of the last notification in a publisher's transaction
	retryAt  time.Time        // no statement before: backoff after a failure
	failures int              // in a row
	changed  chan struct{}    // closed and replaced when a round ends
	subs     map[string][]*subscriber
	stats    SenderStats
}

type subscriber struct{ wake func(payload string) }

// NewSender returns a Sender that notifies through db. It starts nothing and does no I/O. The error is about cfg alone.
func NewSender(db Execer, cfg SenderConfig) (*Sender, error) {
	if db == nil {
		panic("notify: NewSender: nil db")
	}
	cfg, err := cfg.resolve()
	if err != nil {
		return nil, err
	}
	s := &Sender{
		db: db, cfg: cfg,
		retry:    backoff.Policy{Base: min(100*time.Millisecond, cfg.RetryMax), Max: cfg.RetryMax},
		wakeup:   make(chan struct{}, 1),
		pending:  newQueue(cfg.MaxPending),
		deferred: newQueue(cfg.MaxPending),
		refused:  refused{queue: newQueue(cfg.MaxPending)},
		changed:  make(chan struct{}),
		subs:     make(map[string][]*subscriber),
		waiters:  make(map[*waiter]struct{}),
	}
	if s.commitWait = cfg.Window; s.commitWait == 0 {
		s.commitWait = defaultWindow
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
	s.acceptLocked(&s.pending, note{channel: channel, payload: payload, send: true}, time.Now())
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

// acceptLocked puts the note of a call into q and sees to it that a worker will find it. Caller must hold mu.
func (s *Sender) acceptLocked(q *queue, n note, now time.Time) {
	s.calls++
	n.call, n.first, n.last = s.calls, now, now
	s.stats.Accepted++
	first := q.len() == 0
	switch s.addLocked(q, n) {
	case addedMerged:
		s.stats.Coalesced++
	case addedDropped:
		return
	case addedNew, addedCollapsed:
	}
	if !s.working {
		s.working = true
		go s.work()
	} else if first {
		s.wakeWorker()
	}
}

// addLocked adds n to q and counts what is lost by it. Caller must hold mu.
func (s *Sender) addLocked(q *queue, n note) added {
	result := q.add(n)
	switch result {
	case addedCollapsed:
		s.stats.Collapsed++
	case addedDropped:
		s.stats.Dropped++
	case addedNew, addedMerged:
	}
	return result
}

func (s *Sender) wakeWorker() {
	select {
	case s.wakeup <- struct{}{}:
	default:
	}
}

// Subscribe has wake called for every notification of this process on channel, without a detour over the server. wake
// runs on the goroutine of the publisher, so it must be quick and must not block: typically it sends to a channel of
// capacity one if there is room. For a notification made by [Sender.NotifyTx] it is called a window later, when the
// transaction may have committed (10ms where there is no window). The returned function ends the subscription; calls under way may still finish.
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
	stats.Pending = s.pending.len() + s.deferred.len() + s.refused.len() + len(s.sending)
	return stats
}
