package notify

import (
	"context"
	"sync"
)

// inbox stands between the read loop, which must never wait, and one handler, which may. It is bounded: waiting
// payloads are a set, and a set that outgrows its limit becomes one empty payload.
type inbox struct {
	channel string
	handler Handler
	limit   int
	wake    chan struct{} // capacity 1

	mu       sync.Mutex // guards what follows
	resync   bool
	poll     bool
	polled   bool     // the event before was a poll
	payloads []string // in order of arrival
	known    map[string]struct{}
	merged   bool // payloads is one empty payload that stands for many
}

func newInbox(channel string, h Handler, limit int) *inbox {
	return &inbox{
		channel: channel, handler: h, limit: limit,
		wake: make(chan struct{}, 1), known: make(map[string]struct{}),
	}
}

// put leaves an event for the handler and returns at once. It reports whether payloads were merged to make room.
func (m *inbox) put(kind Kind, payload string) (mergedNow bool) {
	m.mu.Lock()
	switch kind {
	case Resynced:
		m.resync = true
	case Polled:
		m.poll = true
	case Notified:
		mergedNow = m.addLocked(payload)
	}
	m.mu.Unlock()
	select {
	case m.wake <- struct{}{}:
	default:
	}
	return mergedNow
}

func (m *inbox) addLocked(payload string) (mergedNow bool) {
	if m.merged {
		return false
	}
	if _, ok := m.known[payload]; ok {
		return false
	}
	if len(m.payloads) >= m.limit {
		m.payloads = []string{""}
		clear(m.known)
		m.merged = true
		return true
	}
	m.known[payload] = struct{}{}
	m.payloads = append(m.payloads, payload)
	return false
}

// take returns the next event. It is removed before the handler runs, so the same payload arriving meanwhile is a new
// event, and what it announces is not missed.
func (m *inbox) take() (Event, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	e := Event{Channel: m.channel}
	switch {
	case m.resync:
		m.resync, m.poll = false, false // whoever resyncs has looked
		e.Kind = Resynced
	case m.poll && (!m.polled || len(m.payloads) == 0):
		// Before the payloads, or a channel where they never end would not be polled; but only one by one, or a handler slower than
		// the interval would do nothing else.
		m.poll = false
		e.Kind = Polled
	case len(m.payloads) > 0:
		e.Kind, e.Payload = Notified, m.payloads[0]
		m.payloads = m.payloads[1:]
		delete(m.known, e.Payload)
		if len(m.payloads) == 0 {
			m.payloads, m.merged = nil, false
		}
	default:
		return Event{}, false
	}
	m.polled = e.Kind == Polled
	return e, true
}

// run calls the handler until ctx is done.
func (m *inbox) run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-m.wake:
		}
		for ctx.Err() == nil {
			e, ok := m.take()
			if !ok {
				break
			}
			mustReturn("the handler of channel "+m.channel, func() { m.handler.HandleEvent(ctx, e) })
		}
	}
}

// mustReturn calls a function of the program's on a goroutine of this package. A runtime.Goexit in it is what a panic is, the end of
// the program: nobody would be called any more, and nobody would know.
func mustReturn(who string, f func()) {
	returned := false
	defer func() {
		if returned {
			return
		}
		if r := recover(); r != nil {
			panic(r)
		}
		panic("notify: " + who + " called runtime.Goexit")
	}()
	f()
	returned = true
}
