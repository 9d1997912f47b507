package notify

import (
	"context"
	"log/slog"
	"maps"
	"strings"
	"sync"
	"time"
)

// tracker is what is known of the delivery to the listeners of a link. Nobody else writes it: what happens is told by its methods, each
// being one kind of evidence, and a change of the link's state is logged here, once. What a listener says of itself is worked out from
// that when it is asked, so nothing has to be remembered for it to stop being true. It is safe for concurrent use.
type tracker struct {
	logger *slog.Logger
	poll   time.Duration // for the log
	holds  time.Duration // how long after it was sent a note that came back is a proof; 0: as long as the connection

	mu      sync.Mutex // guards what follows
	status  Status     // of the connection: Proven says that its latest heartbeat came back
	sent    time.Time  // when the latest note that came back was sent
	members map[*Listener]*member
	changed chan struct{} // closed and replaced when the state of some listener may have changed
}

// member is a listener that runs.
type member struct {
	since   time.Time       // of the last change of what follows
	heard   map[string]bool // its channels for which the server has answered a LISTEN on this connection
	refused string          // why not for the others, if the server refused one; it is in words
}

func newTracker(cfg ListenerConfig) *tracker {
	t := &tracker{logger: cfg.Logger, poll: cfg.PollInterval, members: make(map[*Listener]*member), changed: make(chan struct{})}
	if cfg.Heartbeat > 0 {
		t.holds = cfg.Heartbeat + cfg.HeartbeatTimeout
	}
	return t
}

// watch returns the state of a listener and a channel that is closed when it may have changed.
func (t *tracker) watch(l *Listener) (State, <-chan struct{}) {
	t.mu.Lock()
	defer t.mu.Unlock()
	state, _, _ := t.stateLocked(l)
	return state, t.changed
}

func (t *tracker) snapshot(l *Listener) Status {
	t.mu.Lock()
	defer t.mu.Unlock()
	st := t.status
	st.State, st.Reason, st.Since = t.stateLocked(l)
	return st
}

// stateLocked is all there is between the evidence and what a listener says of itself.
func (t *tracker) stateLocked(l *Listener) (state State, reason string, since time.Time) {
	m := t.members[l]
	since = t.status.Since
	if m != nil && m.since.After(since) {
		since = m.since
	}
	switch {
	case m == nil:
		return Unknown, "Run is not under way", l.ended()
	case t.status.State != Proven:
		return t.status.State, t.status.Reason, since
	case m.refused != "":
		return Isolated, m.refused, since
	case len(m.heard) < len(l.inboxes):
		return Unknown, "the server has not answered LISTEN yet", since
	case t.holds > 0 && time.Since(t.sent) > t.holds:
		return Unknown, "the heartbeat is late", t.sent.Add(t.holds)
	}
	return Proven, "", since
}

// joined and left: a Run began, or ended.
func (t *tracker) joined(l *Listener) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.members[l] = &member{since: time.Now()}
	t.changedLocked()
}

func (t *tracker) left(l *Listener) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.members, l)
	if len(t.members) == 0 {
		t.setLocked(Unknown, "")
	}
	t.changedLocked()
}

// connected: there is a new connection, on which nobody has asked for anything yet.
func (t *tracker) connected(pooled bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.status.Connects++
	t.status.Pooled = pooled
}

// listening: the server has answered. It returns, for each listener, the channels that are heard from now on.
func (t *tracker) listening(channels map[string]bool, refused map[string]*refusedChannel) map[*Listener][]string {
	t.mu.Lock()
	defer t.mu.Unlock()
	fresh := make(map[*Listener][]string)
	for l, m := range t.members {
		was := m.refused
		m.refused = ""
		for channel := range l.inboxes {
			switch {
			case channels[channel] && !m.heard[channel]:
				fresh[l] = append(fresh[l], channel)
			case refused[channel] != nil && m.refused == "":
				m.refused = "the server refused LISTEN for channel " + channel + ": " + oneLine(refused[channel].err.Error())
			}
		}
		if len(fresh[l]) == 0 && m.refused == was {
			continue
		}
		m.heard, m.since = maps.Clone(m.heard), time.Now()
		if m.heard == nil {
			m.heard = make(map[string]bool)
		}
		for _, channel := range fresh[l] {
			m.heard[channel] = true
		}
		t.changedLocked()
	}
	return fresh
}

// refused: the server refused LISTEN for one channel.
func (t *tracker) refused(channel string, err error) {
	t.logger.LogAttrs(context.Background(), slog.LevelWarn, "bounceproof: notify: the server refused LISTEN for a channel, polling instead",
		slog.String("channel", channel), slog.Any("error", err), slog.Duration("poll", t.poll),
		slog.String("remedy", remedyForRefusal(err, "the listener")))
}

// proven: a note from another session came, its own or that of another listener. It reports whether there was a time before in which
// nothing was proven.
func (t *tracker) proven(sent time.Time, own bool) (gap bool) {
	now := time.Now()
	t.mu.Lock()
	t.status.Proofs++
	t.status.LastProof = now
	if own {
		t.status.ProofTime = now.Sub(sent)
	}
	gap = t.status.State != Proven || t.holds > 0 && now.Sub(t.sent) > t.holds
	t.sent = sent
	t.mu.Unlock()
	t.set(&refusal{state: Proven})
	return gap
}

// late: no note came back in time, though the connection may be good.
func (t *tracker) late(why *refusal) {
	why.state = Unknown
	t.set(why)
}

// received: a notification came; how many handlers' inboxes took it, and for how many of them payloads were merged.
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

// closed: the connection ends, or an attempt to have one. Where that shows nothing (Unknown), the state stays what it was, unless that was
// Proven. lost counts a connection that was in use.
func (t *tracker) closed(why *refusal, lost bool) {
	t.mu.Lock()
	if lost {
		t.status.Losses++
	}
	for _, m := range t.members {
		m.heard, m.refused = nil, ""
	}
	t.changedLocked()
	nothing := why.state == Unknown
	switch {
	case nothing && t.status.State == Proven:
		t.setLocked(Unknown, why.String())
	case nothing && why.reason != "":
		t.setLocked(t.status.State, why.String())
	}
	t.mu.Unlock()
	if !nothing {
		t.set(why)
	}
}

func (t *tracker) changedLocked() {
	close(t.changed)
	t.changed = make(chan struct{})
}

func (t *tracker) setLocked(state State, reason string) (was State) {
	was = t.status.State
	t.status.Reason = reason
	if was != state {
		t.status.State, t.status.Since = state, time.Now()
		t.changedLocked()
	}
	return was
}

// set changes the link's state, and logs that once.
func (t *tracker) set(why *refusal) {
	t.mu.Lock()
	was := t.setLocked(why.state, why.String())
	t.mu.Unlock()
	if was == why.state {
		return
	}
	attrs := []slog.Attr{slog.String("state", why.state.String()), slog.String("was", was.String())}
	if why.reason != "" {
		attrs = append(attrs, slog.String("reason", why.reason))
	}
	if why.err != nil {
		attrs = append(attrs, slog.Any("error", why.err))
	}
	level, msg := slog.LevelInfo, "bounceproof: notify: notifications are proven to arrive"
	switch why.state {
	case Isolated:
		level, msg = slog.LevelWarn, "bounceproof: notify: notifications do not arrive, polling instead"
	case Disconnected:
		level, msg = slog.LevelWarn, "bounceproof: notify: listener is disconnected, polling until it is back"
	case Unknown:
		level, msg = slog.LevelWarn, "bounceproof: notify: notifications are not proven to arrive any more, polling too"
	case Proven:
	}
	if why.state != Proven {
		attrs = append(attrs, slog.Duration("poll", t.poll))
	}
	if why.remedy != "" {
		attrs = append(attrs, slog.String("remedy", why.remedy))
	}
	t.logger.LogAttrs(context.Background(), level, msg, attrs...)
}

// oneLine keeps a text with several lines, as errors.Join makes, from breaking a line of a log or a page.
func oneLine(text string) string {
	return strings.Join(strings.FieldsFunc(text, func(r rune) bool { return r == '\n' || r == '\r' }), "; ")
}
