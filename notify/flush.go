package notify

import (
	"context"
	"fmt"
	"slices"
	"time"
)

// closeAttempts is how often a closing Sender tries a statement that fails. Without a bound, Close with a context that
// never ends would wait for a server that never comes back, for the sake of hints.
const closeAttempts = 2

// Flush returns when everything accepted before the call has been sent. It cuts a wait for the next attempt short, and
// those of [Sender.NotifyTx] and MaxStretch, but not the window. When ctx ends first it returns an error that wraps both
// its cause and the last failure, if any; the notifications stay queued. When the server refused one of them, so that it was
// dropped, it returns an error that wraps the server's. (One that goes without its payload is sent.)
func (s *Sender) Flush(ctx context.Context) error {
	if err := s.await(ctx); err != nil {
		return fmt.Errorf("notify: flush: %w", err)
	}
	return nil
}

// Close sends what waits, then ends. From its start Notify returns [ErrClosed]. It gives up, and drops the rest, when ctx
// ends or the second attempt fails, and then returns an error that wraps the reason; and one as Flush does when the server refused a
// notification. A statement that is under way then is not
// cancelled, for behind a pooler a cancel request can hit somebody else's: it is given 5s at most to end by itself.
// A second Close waits for the first and returns nil. What is passed to [NewSender] stays the caller's.
func (s *Sender) Close(ctx context.Context) error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		_ = s.await(ctx)
		return nil
	}
	s.closed = true
	s.attempts = closeAttempts
	before := s.stats.Dropped
	s.mu.Unlock()
	err := s.await(ctx)
	s.stop()

	s.mu.Lock()
	defer s.mu.Unlock()
	if err == nil && s.stats.Dropped > before {
		err = s.stats.LastError
	}
	if err != nil {
		return fmt.Errorf("notify: close sender: %w", err)
	}
	return nil
}

// waiter is a call of Flush or Close that waits.
type waiter struct {
	calls uint64 // that it waits for: this one and all before
	err   error  // why a notification of these was given up
}

// tellWaitersLocked says that a note was given up, to those who wait for it. Caller must hold mu.
func (s *Sender) tellWaitersLocked(n note, err error) {
	for w := range s.waiters {
		if n.call <= w.calls && w.err == nil {
			w.err = fmt.Errorf("the server refused a notification, which was dropped: %w", err)
		}
	}
}

// await returns when no call that was accepted before it waits any more.
func (s *Sender) await(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	w := &waiter{calls: s.calls}
	s.retryAt, s.slowed = time.Time{}, time.Time{}
	s.flushing = s.deferred.len() > 0
	s.waiters[w] = struct{}{}
	defer delete(s.waiters, w)
	s.wakeWorker()
	for s.working && s.waitsLocked(w.calls) {
		changed := s.changed
		s.mu.Unlock()
		select {
		case <-changed:
			s.mu.Lock()
		case <-ctx.Done():
			s.mu.Lock()
			if s.stats.LastError != nil {
				return fmt.Errorf("%w (last attempt: %w)", context.Cause(ctx), s.stats.LastError)
			}
			return context.Cause(ctx)
		}
	}
	return w.err
}

// waitsLocked reports whether one of the calls up to the given one waits. Caller must hold mu.
func (s *Sender) waitsLocked(call uint64) bool {
	for _, q := range []*queue{&s.pending, &s.deferred, &s.refused.queue} {
		for n := range q.all {
			if n.call <= call {
				return true
			}
		}
	}
	return slices.ContainsFunc(s.sending, func(n note) bool { return n.call <= call })
}
