package notify

import (
	"context"
	"fmt"
	"time"
)

// closeAttempts is how often a closing Sender tries a statement that fails. Without a bound, Close with a context that
// never ends would wait for a server that never comes back, for the sake of hints.
const closeAttempts = 2

// Flush returns when everything accepted before the call has been sent. It cuts a wait for the next attempt short, and
// those of [Sender.NotifyTx] and MaxStretch, but not the window. When ctx ends first it returns an error that wraps both
// its cause and the last failure, if any; the notifications stay queued.
func (s *Sender) Flush(ctx context.Context) error {
	if err := s.await(ctx); err != nil {
		return fmt.Errorf("notify: flush: %w", err)
	}
	return nil
}

// Close sends what waits, then ends. From its start Notify returns [ErrClosed]. It gives up, and drops the rest, when ctx
// ends or the second attempt fails, and then returns an error that wraps the reason. A statement that is under way then is not
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

// await returns when no call that was accepted before it waits any more.
func (s *Sender) await(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	before := s.calls
	s.retryAt, s.slowed = time.Time{}, time.Time{}
	s.flushing = len(s.deferred.notes) > 0
	s.waiters++
	defer func() { s.waiters-- }()
	s.wakeWorker()
	for s.working && s.waitsLocked(before) {
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
	return nil
}

// waitsLocked reports whether one of the calls up to the given one waits. Caller must hold mu.
func (s *Sender) waitsLocked(call uint64) bool {
	for _, notes := range [][]note{s.pending.notes, s.deferred.notes, s.refused.notes, s.sending} {
		for i := range notes {
			if notes[i].call <= call {
				return true
			}
		}
	}
	return false
}
