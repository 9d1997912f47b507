package notify

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// One statement for all channels. unnest with two arguments is a form of the FROM clause, recognised only without a
// schema, and means pg_catalog's then (parse_clause.c, transformRangeFunction): no search_path can divert it.
const notifySQL = `select pg_catalog.pg_notify(t.c, t.p) from unnest($1::text[], $2::text[]) as t(c, p)`

// The same after a failure, looking at the queue first. A queue that was full stays full although its slowest reader has
// caught up: only a successful notifier moves the tail (async.c, AtCommit_Notify), and there can be none. Asking for the
// usage moves it too (pg_notification_queue_usage calls asyncQueueAdvanceTail). Seen on 17 and 18.
const retrySQL = notifySQL + ` where (select pg_catalog.pg_notification_queue_usage()) is not null`

// closeAttempts is how often a closing Sender tries a statement that fails. Without a bound, Close with a context that
// never ends would wait for a server that never comes back, for the sake of hints.
const closeAttempts = 2

// work sends until nothing waits. There is at most one worker; what it finds is handed to it under mu, and it decides to
// leave under mu too, so no note can fall between two workers.
func (s *Sender) work() {
	for {
		s.mu.Lock()
		wait, left := s.nextLocked()
		if !left {
			s.working = false
			s.roundEndedLocked()
			s.mu.Unlock()
			return
		}
		if wait > 0 {
			s.mu.Unlock()
			s.sleep(wait)
			continue
		}
		batch, sql := s.takeLocked(), notifySQL
		if s.failures > 0 {
			sql = retrySQL
		}
		s.mu.Unlock()
		s.round(batch, sql)
	}
}

// nextLocked returns how long to wait until something may be sent, and false when nothing is left. Caller must hold mu.
func (s *Sender) nextLocked() (wait time.Duration, left bool) {
	if s.ctx.Err() != nil || s.closed && s.attempts <= 0 {
		s.stats.Dropped += int64(len(s.pending.take()) + len(s.deferred.take()))
	}
	var due time.Time
	switch {
	case len(s.pending.notes) > 0:
		due = s.last.Add(s.cfg.Window)
	case len(s.deferred.notes) > 0:
		due = s.deferred.notes[0].at.Add(s.cfg.Window)
		if s.ripen {
			due = s.last
		}
		if byRate := s.last.Add(s.cfg.Window); due.Before(byRate) {
			due = byRate
		}
	default:
		return 0, false
	}
	for _, notBefore := range []time.Time{s.resume, s.stretch} {
		if due.Before(notBefore) {
			due = notBefore
		}
	}
	return time.Until(due), true
}

func (s *Sender) sleep(d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-s.kick:
	case <-s.ctx.Done():
	}
}

// takeLocked returns what is due now. Caller must hold mu.
func (s *Sender) takeLocked() []note {
	now := time.Now()
	ripe := now.Add(-s.cfg.Window)
	if s.ripen {
		ripe, s.ripen = now, false
	}
	for _, n := range s.deferred.take() {
		switch {
		case n.at.After(ripe):
			s.deferred.add(n)
			continue
		case n.again.After(ripe):
			// It came once more, in a transaction that may commit only after this statement.
			s.deferred.add(note{channel: n.channel, payload: n.payload, send: true, wake: true, at: n.again})
		}
		s.pending.add(n)
	}
	batch := s.pending.take()
	s.sending = len(batch)
	s.last = now
	return batch
}

// round sends one batch and settles it.
func (s *Sender) round(batch []note, sql string) {
	start := time.Now()
	sent, err := s.send(batch, sql)
	took := time.Since(start)
	if err == nil {
		s.wakeSubscribers(batch)
	}

	s.mu.Lock()
	defer s.mu.Unlock()
	s.sending = 0
	if err == nil {
		s.done++
		if sent > 0 {
			s.succeededLocked(sent, took)
		}
	} else {
		s.failedLocked(batch, err)
	}
	s.roundEndedLocked()
}

// send runs the statement, if there is anything for the server in the batch.
func (s *Sender) send(batch []note, sql string) (sent int, err error) {
	channels, payloads := make([]string, 0, len(batch)), make([]string, 0, len(batch))
	for _, n := range batch {
		if n.send {
			channels, payloads = append(channels, n.channel), append(payloads, n.payload)
		}
	}
	if len(channels) == 0 {
		return 0, nil
	}
	ctx := s.ctx
	if s.cfg.Timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, s.cfg.Timeout)
		defer cancel()
	}
	args := make([]any, 0, len(s.cfg.Options)+2)
	args = append(append(args, s.cfg.Options...), channels, payloads)
	if _, err := s.db.Exec(ctx, sql, args...); err != nil {
		return 0, err
	}
	return len(channels), nil
}

func (s *Sender) wakeSubscribers(batch []note) {
	for _, n := range batch {
		if !n.wake {
			continue
		}
		s.mu.Lock()
		subs := s.subs[n.channel]
		s.mu.Unlock()
		for _, sub := range subs {
			sub.wake(n.payload)
		}
	}
}

// succeededLocked and failedLocked: one log line per change of state, counters for the rest. Caller must hold mu.
func (s *Sender) succeededLocked(sent int, took time.Duration) {
	s.stats.Statements++
	s.stats.Sent += int64(sent)
	s.stats.LastLatency = took
	// The quickest of several: one slow statement is an accident, and no reason to be late with the next.
	s.took[s.stats.Statements%int64(len(s.took))] = took
	if s.drains == 0 {
		s.stretch = time.Now().Add(min(19*slices.Min(s.took[:]), s.cfg.MaxStretch))
	}
	s.stats.LastError = nil
	if s.failures > 0 {
		s.cfg.Logger.LogAttrs(s.ctx, slog.LevelInfo, "notify: sending works again", slog.Int("failures", s.failures))
	}
	s.failures = 0
	s.resume = time.Time{}
}

func (s *Sender) failedLocked(batch []note, err error) {
	s.stats.Failures++
	s.stats.LastError = err
	s.failures++
	s.attempts--
	if s.failures == 1 {
		s.cfg.Logger.LogAttrs(s.ctx, slog.LevelWarn, "notify: sending failed, will be tried again; listeners poll meanwhile",
			slog.Any("error", err))
	}
	s.resume = time.Now().Add(s.retry.Delay(s.failures))

	refused := isDataException(err)
	newer := s.pending.take()
	for _, n := range batch {
		if refused && n.payload == "" {
			// Even the channel's name cannot be said in this database's encoding. Keeping it would fail all others forever.
			s.stats.Dropped++
			continue
		}
		if refused {
			n.payload = ""
			s.stats.Collapsed++
		}
		s.pending.add(n)
	}
	for _, n := range newer {
		s.pending.add(n)
	}
}

// isDataException reports class 22: the server cannot represent a text it was given, and never will.
func isDataException(err error) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && strings.HasPrefix(pgErr.Code, "22")
}

// roundEndedLocked wakes those who wait in Flush and Close. Caller must hold mu.
func (s *Sender) roundEndedLocked() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// Flush returns when everything accepted before the call has been sent. It cuts a wait for the next attempt short, and
// those of [Sender.NotifyTx] and MaxStretch, but not the window. When ctx ends first it returns an error that wraps both its cause and the last failure, if any; the
// notifications stay queued.
func (s *Sender) Flush(ctx context.Context) error {
	if err := s.drain(ctx); err != nil {
		return fmt.Errorf("notify: flush: %w", err)
	}
	return nil
}

// Close sends what waits, then ends. From its start Notify returns [ErrClosed]. It gives up, and drops the rest, when ctx
// ends or the second attempt fails, and then returns an error that wraps the reason. A second Close waits for the first and
// returns nil. What is
// passed to [NewSender] stays the caller's.
func (s *Sender) Close(ctx context.Context) error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		_ = s.drain(ctx)
		return nil
	}
	s.closed = true
	s.attempts = closeAttempts
	before := s.stats.Dropped
	s.mu.Unlock()
	err := s.drain(ctx)
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

// drain waits for two rounds at most: the one under way, and the one that takes what waits now. A failed round is not
// counted, and hands its notes to the next one.
func (s *Sender) drain(ctx context.Context) error {
	s.mu.Lock()
	target := s.done
	if s.sending > 0 {
		target++
	}
	if len(s.pending.notes)+len(s.deferred.notes) > 0 {
		target++
	}
	s.resume, s.stretch = time.Time{}, time.Time{}
	s.ripen = len(s.deferred.notes) > 0
	s.drains++
	s.kickWorker()
	for s.done < target && s.working {
		changed := s.changed
		s.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			s.mu.Lock()
			s.drains--
			lastErr := s.stats.LastError
			s.mu.Unlock()
			if lastErr != nil {
				return fmt.Errorf("%w (last attempt: %w)", context.Cause(ctx), lastErr)
			}
			return context.Cause(ctx)
		}
		s.mu.Lock()
	}
	s.drains--
	s.mu.Unlock()
	return nil
}
