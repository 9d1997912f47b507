package notify

import (
	"context"
	"log/slog"
	"slices"
	"time"

	"github.com/bounceproof/bounceproof/internal/backoff"
)

// lastStatement bounds a statement that is under way when Close gives up.
const lastStatement = 5 * time.Second

// One statement for all channels. unnest with two arguments is a form of the FROM clause, recognised only without a
// schema, and means pg_catalog's then (parse_clause.c, transformRangeFunction): no search_path can divert it.
const notifySQL = `select pg_catalog.pg_notify(t.c, t.p) from unnest($1::text[], $2::text[]) as t(c, p)`

// The same after a failure, looking at the queue first. A queue that was full stays full although its slowest reader has
// caught up: only a successful notifier moves the tail (async.c, AtCommit_Notify), and there can be none. Asking for the
// usage moves it too (pg_notification_queue_usage calls asyncQueueAdvanceTail). Seen on 17 and 18.
const retrySQL = notifySQL + ` where (select pg_catalog.pg_notification_queue_usage()) is not null`

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
		b, sql := s.takeLocked(), notifySQL
		s.sending = b.notes
		if s.failures > 0 {
			sql = retrySQL
		}
		s.mu.Unlock()
		s.round(b, sql)
	}
}

// nextLocked returns how long to wait until something may be sent, and false when nothing is left. Caller must hold mu.
func (s *Sender) nextLocked() (wait time.Duration, left bool) {
	if s.ctx.Err() != nil || s.closed && s.attempts <= 0 {
		s.stats.Dropped += int64(len(s.pending.take()) + len(s.deferred.take()) + len(s.refused.take()))
	}
	due := s.last.Add(s.cfg.Window)
	switch {
	case s.pending.len()+s.refused.len() > 0:
	case s.deferred.len() == 0:
		return 0, false
	case !s.flushing:
		due = later(due, s.deferred.earliest().Add(s.commitWait))
	}
	return time.Until(later(due, later(s.retryAt, s.slowed))), true
}

func later(a, b time.Time) time.Time {
	if a.Before(b) {
		return b
	}
	return a
}

func (s *Sender) sleep(d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-s.wakeup:
	case <-s.ctx.Done():
	}
}

// batch is what one statement carries.
type batch struct {
	notes []note
	alone bool // of Sender.refused, not of Sender.pending
}

// takeLocked returns what is due now. Caller must hold mu.
func (s *Sender) takeLocked() batch {
	s.last = time.Now()
	s.releaseDeferredLocked(s.last)
	// By turns, so that neither waits for the other.
	if s.pending.len() == 0 || s.refused.len() > 0 && !s.refused.hadTurn {
		return batch{s.refused.takeGroup(), true}
	}
	notes := s.pending.take()
	if s.refused.known {
		if notes = s.setAsideLocked(notes); len(notes) == 0 {
			return batch{s.refused.takeGroup(), true}
		}
	}
	s.refused.hadTurn = false
	return batch{notes, false}
}

// releaseDeferredLocked makes pending what has waited long enough for its transaction. Caller must hold mu.
func (s *Sender) releaseDeferredLocked(now time.Time) {
	committed := now.Add(-s.commitWait)
	if s.flushing {
		committed, s.flushing = now, false
	}
	for _, n := range s.deferred.take() {
		if !n.first.After(committed) {
			s.addLocked(&s.pending, n)
			if !n.last.After(committed) {
				continue
			}
			// It came once more, in a transaction that may commit only after this statement.
			n.first = n.last
		}
		s.addLocked(&s.deferred, n)
	}
}

// round sends one batch and settles it.
func (s *Sender) round(b batch, sql string) {
	start := time.Now()
	notes := slices.DeleteFunc(slices.Clone(b.notes), func(n note) bool { return !n.send })
	err := s.send(notes, sql)
	took := time.Since(start)
	// Whether the server took it or not: it is time for the subscribers of this process to look.
	s.wakeSubscribers(b.notes)
	for i := range notes {
		notes[i].wake = false
	}

	s.mu.Lock()
	defer s.mu.Unlock()
	s.sending = nil
	switch code, refused := dataException(err); {
	case err == nil && len(notes) > 0:
		s.succeededLocked(batch{notes, b.alone}, took)
	case refused:
		s.refusedLocked(batch{notes, b.alone}, code, err)
	case err != nil:
		s.failedLocked(batch{notes, b.alone}, err)
	}
	s.roundEndedLocked()
}

// send runs the statement, if there is anything to send.
func (s *Sender) send(notes []note, sql string) error {
	if len(notes) == 0 {
		return nil
	}
	channels, payloads := make([]string, len(notes)), make([]string, len(notes))
	for i, n := range notes {
		channels[i], payloads[i] = n.channel, n.payload
	}
	// Not the end of s.ctx: pgx would send a cancel request, which behind a pooler can hit somebody else's statement.
	ctx, cancel := context.WithCancel(context.WithoutCancel(s.ctx))
	defer cancel()
	if s.cfg.Timeout > 0 {
		ctx, cancel = context.WithTimeout(ctx, s.cfg.Timeout)
		defer cancel()
	}
	defer context.AfterFunc(s.ctx, func() {
		_ = backoff.Wait(ctx, lastStatement)
		cancel()
	})()
	args := make([]any, 0, len(s.cfg.Options)+2)
	args = append(append(args, s.cfg.Options...), channels, payloads)
	_, err := s.db.Exec(ctx, sql, args...)
	return err
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
			mustReturn("a subscriber of channel "+n.channel, func() { sub.wake(n.payload) })
		}
	}
}

// succeededLocked and failedLocked: one log line per change of state, counters for the rest. Caller must hold mu.
func (s *Sender) succeededLocked(b batch, took time.Duration) {
	s.stats.Statements++
	s.stats.Sent += int64(len(b.notes))
	s.stats.LastLatency = took
	// The quickest of several: one slow statement is an accident, and no reason to be late with the next.
	s.took[s.stats.Statements%int64(len(s.took))] = took
	if len(s.waiters) == 0 {
		s.slowed = time.Now().Add(min(19*slices.Min(s.took[:]), s.cfg.MaxStretch))
	}
	s.stats.LastError = nil
	if b.alone {
		s.refused.accepted()
	}
	s.reachableLocked()
}

// reachableLocked is called when the server has answered. Caller must hold mu.
func (s *Sender) reachableLocked() {
	if s.failures > 0 {
		s.cfg.Logger.LogAttrs(s.ctx, slog.LevelInfo, "bounceproof: notify: sending works again", slog.Int("failures", s.failures))
	}
	s.failures = 0
	s.retryAt = time.Time{}
}

func (s *Sender) failedLocked(b batch, err error) {
	s.stats.Failures++
	s.stats.LastError = err
	s.failures++
	s.attempts--
	if s.failures == 1 {
		s.cfg.Logger.LogAttrs(s.ctx, slog.LevelWarn,
			"bounceproof: notify: sending failed, will be tried again; listeners poll meanwhile", slog.Any("error", err))
	}
	s.retryAt = time.Now().Add(max(s.retry.Delay(s.failures), minPause))
	if b.alone {
		s.putBackLocked(&s.refused.queue, b.notes)
	} else {
		s.putBackLocked(&s.pending, b.notes)
	}
}

// putBackLocked adds notes to q in front of what came in since. Caller must hold mu.
func (s *Sender) putBackLocked(q *queue, notes []note) {
	newer := q.take()
	for _, n := range notes {
		s.addLocked(q, n)
	}
	for _, n := range newer {
		s.addLocked(q, n)
	}
}

// roundEndedLocked wakes those who wait in Flush and Close. Caller must hold mu.
func (s *Sender) roundEndedLocked() {
	close(s.changed)
	s.changed = make(chan struct{})
}
