package notify

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// tracker holds the status of a link. All changes of it are methods here, and a change of state is logged here, once. It
// is safe for concurrent use.
type tracker struct {
	logger *slog.Logger
	poll   time.Duration // for the log
	remedy string        // for the log: what helps when notifications do not arrive

	mu      sync.Mutex // guards what follows
	status  Status
	changed chan struct{} // closed and replaced when the state changes
}

// watch returns the state and a channel that is closed when it changes.
func (t *tracker) watch() (State, <-chan struct{}) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.status.State, t.changed
}

func (t *tracker) snapshot() Status {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.status
}

// connected counts a connection.
func (t *tracker) connected(pooled bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.status.Connects++
	t.status.Pooled = pooled
}

// proven counts a note that came back.
func (t *tracker) proven(sent time.Time) {
	now := time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	t.status.Proofs++
	t.status.LastProof, t.status.ProofTime = now, now.Sub(sent)
}

// received counts a notification: how many handlers' inboxes took it, and whether for that payloads were merged in some.
func (t *tracker) received(inboxes, merged int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if inboxes == 0 {
		t.status.Ignored++
		return
	}
	t.status.Received++
	t.status.Merged += int64(merged)
}

// lost counts a connection that ended by itself, and tells the state.
func (t *tracker) lost(err error) {
	t.mu.Lock()
	t.status.Losses++
	t.mu.Unlock()
	t.set(Disconnected, "connection lost", err)
}

// stopped is called when nobody runs any more.
func (t *tracker) stopped() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.setLocked(Unknown, "")
}

func (t *tracker) setLocked(state State, reason string) (was State) {
	was = t.status.State
	t.status.Reason = reason
	if was == state {
		return was
	}
	t.status.State, t.status.Since = state, time.Now()
	close(t.changed)
	t.changed = make(chan struct{})
	return was
}

// set changes the state, and logs that once.
func (t *tracker) set(state State, reason string, err error) {
	full := reason
	if err != nil {
		full = reason + ": " + err.Error()
	}
	t.mu.Lock()
	was := t.setLocked(state, full)
	t.mu.Unlock()
	if was == state {
		return
	}
	attrs := []slog.Attr{slog.String("state", state.String()), slog.String("was", was.String())}
	if reason != "" {
		attrs = append(attrs, slog.String("reason", reason))
	}
	if err != nil {
		attrs = append(attrs, slog.Any("error", err))
	}
	level, msg := slog.LevelInfo, "bounceproof: notify: notifications are proven to arrive"
	switch state {
	case Isolated:
		level, msg = slog.LevelWarn, "bounceproof: notify: notifications do not arrive, polling instead"
		attrs = append(attrs, slog.Duration("poll", t.poll), slog.String("remedy", t.remedy))
	case Disconnected:
		level, msg = slog.LevelWarn, "bounceproof: notify: listener is disconnected, polling until it is back"
		attrs = append(attrs, slog.Duration("poll", t.poll))
	case Proven, Unknown:
	}
	t.logger.LogAttrs(context.Background(), level, msg, attrs...)
}
