package notify_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"pgregory.net/rapid"

	"github.com/bounceproof/bounceproof/internal/pgscript"
	"github.com/bounceproof/bounceproof/notify"
)

// A model of what can happen to listeners that share a connection, in virtual time and with the default configuration. Whatever the
// history, no listener tells one of two lies: that it is healthy while what publishers send is not heard, or that it is not while the
// world has been in order for as long as an attempt may take.

const (
	unheardFor = 15 * time.Second // Heartbeat + HeartbeatTimeout
	// inOrderFor is Reprove with its jitter, or two waits of the backoff, and the attempts themselves.
	inOrderFor = 36*time.Second + 10*time.Second + 5*time.Second
)

// participant is one of the listeners.
type participant struct {
	*notify.Listener
	channel string
	stop    func() // nil: it does not run
	since   time.Time

	mu        sync.Mutex           // guards what follows
	published map[string]time.Time // what publishers have sent, and is not heard
}

// forget drops one payload, or all of them for "".
func (p *participant) forget(payload string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if payload == "" {
		clear(p.published)
	}
	delete(p.published, payload)
}

func (p *participant) remember(payload string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.published[payload] = time.Now()
}

// oldest returns when the oldest note was published that is not heard, and false if there is none.
func (p *participant) oldest() (at time.Time, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, t := range p.published {
		if !ok || t.Before(at) {
			at, ok = t, true
		}
	}
	return at, ok
}

func (p *participant) HandleEvent(_ context.Context, e notify.Event) {
	switch e.Kind {
	case notify.Notified:
		p.forget(e.Payload)
	case notify.Resynced:
		p.forget("") // whoever resyncs has looked
	case notify.Polled: // would hide what is not heard
	}
}

// world is a scripted world, and what is wrong with it.
type world struct {
	t       *testing.T
	pg      *scripted
	parts   []*participant
	wrong   map[string]time.Time // until when
	inOrder time.Time            // since when nothing is
	sent    int
	lies    []string
	lyingOf map[string]bool
}

// faults are what can be wrong for a while: how it begins, how it ends, and for how long at least. What loses notes silently has to last
// until a heartbeat must have noticed: nothing tells of a note that was lost between two of them.
var faults = map[string]struct {
	begin, end func(*scripted)
	least      time.Duration
}{
	"nobody can connect":         {func(s *scripted) { s.down = true }, func(s *scripted) { s.down = false }, 0},
	"notifying hangs":            {func(s *scripted) { s.silent = true }, func(s *scripted) { s.silent = false }, 0},
	"the queue is full":          {func(s *scripted) { s.execErr = errors.New("full") }, func(s *scripted) { s.execErr = nil }, 0},
	"LISTEN is refused":          {func(s *scripted) { s.listenErr = "58P01" }, func(s *scripted) { s.listenErr = "" }, 0},
	"LISTEN hangs":               {func(s *scripted) { s.stalledListen = true }, func(s *scripted) { s.stalledListen = false }, 0},
	"the pool leads elsewhere":   {func(s *scripted) { s.lost = true }, func(s *scripted) { s.lost = false }, unheardFor + time.Second},
	"the pooler shares silently": {func(s *scripted) { s.LoseNotifications(true) }, func(s *scripted) { s.LoseNotifications(false) }, unheardFor + time.Second},
}

// faultNames are those of faults in a fixed order, so that a history can be played again.
var faultNames = []string{
	"nobody can connect", "notifying hangs", "the queue is full", "LISTEN is refused", "LISTEN hangs", "the pool leads elsewhere",
	"the pooler shares silently",
}

// pass lets time pass, with publishers and checks.
func (w *world) pass(d time.Duration) {
	const step = 250 * time.Millisecond
	for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(step) {
		for _, name := range faultNames {
			if until, ok := w.wrong[name]; ok && !time.Now().Before(until) {
				w.pg.with(func() { faults[name].end(w.pg) })
				delete(w.wrong, name)
				if len(w.wrong) == 0 {
					w.inOrder = time.Now()
				}
			}
		}
		synctest.Wait()
		w.check()
		w.publish()
	}
}

// publish sends a note to everybody, on the way of the pool.
func (w *world) publish() {
	w.pg.mu.Lock()
	hangs := w.pg.silent
	w.pg.mu.Unlock()
	if hangs {
		return
	}
	for _, p := range w.parts {
		w.sent++
		payload := fmt.Sprint(w.sent)
		if p.stop != nil {
			p.remember(payload)
		}
		if _, err := w.pg.Exec(w.t.Context(), "", pgx.QueryExecModeExec, p.channel, payload); err != nil {
			p.forget(payload)
		}
	}
	synctest.Wait()
}

func (w *world) lie(kind string, p *participant, args ...any) {
	if !w.lyingOf[kind] {
		w.lyingOf[kind] = true
		w.lies = append(w.lies, fmt.Sprintf("at %v, %s: %s; wrong %v; %+v %v", time.Since(w.pg.born), p.channel, kind, w.wrong, p.Status(), args))
	}
}

func (w *world) check() {
	for _, p := range w.parts {
		healthy := p.Healthy()
		if p.stop == nil {
			if healthy || p.State() != notify.Unknown {
				w.lie("it does not run, and says more than that it knows nothing", p)
			}
			continue
		}
		if healthy && w.pg.Open() == 0 {
			w.lie("it is healthy without a connection", p)
		}
		if at, ok := p.oldest(); ok && healthy && time.Since(at) > unheardFor {
			w.lie("it is healthy, and what was published is not heard", p, at.Sub(w.pg.born))
		}
		since := w.inOrder
		if p.since.After(since) {
			since = p.since
		}
		if len(w.wrong) == 0 && time.Since(since) > inOrderFor && !healthy {
			w.lie("it is not healthy, and nothing is wrong", p)
		}
		if !healthy && p.State() != notify.Disconnected && p.Status().Reason == "" && time.Since(p.since) > time.Minute {
			w.lie("it does not say why", p)
		}
	}
}

// act is one event of a history.
func (w *world) act(kind, which int, lasts time.Duration) {
	switch {
	case kind < len(faultNames):
		f := faults[faultNames[kind]]
		w.pg.with(func() { f.begin(w.pg) })
		w.wrong[faultNames[kind]] = time.Now().Add(max(lasts, f.least))
	case kind == len(faultNames):
		w.pg.CutAll()
		w.inOrder = time.Now()
	case kind == len(faultNames)+1:
		w.pg.StallAll()
		w.inOrder = time.Now().Add(unheardFor) // by then it is noticed
	default:
		w.startOrStop(w.parts[which])
	}
}

func (w *world) startOrStop(p *participant) {
	if p.stop == nil {
		p.forget("")
		p.since = time.Now()
		p.stop = run(w.t, p.Listener)
		return
	}
	p.stop()
	p.stop = nil
	p.forget("")
	w.inOrder = time.Now() // a statement in the middle may have cost the connection
}

func newWorld(t *testing.T, kind pgscript.Kind, cfg notify.ListenerConfig) *world {
	w := &world{t: t, pg: newScripted(t, pgscript.Options{Kind: kind}), wrong: map[string]time.Time{}, inOrder: time.Now(), lyingOf: map[string]bool{}}
	cfg.Logger = slog.New(slog.DiscardHandler)
	first, err := notify.NewListener(w.pg, cfg)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		p := &participant{Listener: first, channel: fmt.Sprint("channel ", i), published: map[string]time.Time{}}
		if i > 0 {
			p.Listener = first.Share()
		}
		p.Handle(p.channel, p)
		w.parts = append(w.parts, p)
	}
	return w
}

func TestNoListenerLies(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		kind := rapid.SampledFrom([]pgscript.Kind{pgscript.Direct, pgscript.Session}).Draw(rt, "kind")
		type event struct {
			kind, which   int
			lasts, before time.Duration
		}
		history := rapid.SliceOfN(rapid.Custom(func(rt *rapid.T) event {
			return event{
				rapid.IntRange(0, len(faultNames)+4).Draw(rt, "kind"), rapid.IntRange(0, 2).Draw(rt, "which"),
				time.Duration(rapid.IntRange(0, 40_000).Draw(rt, "lasts")) * time.Millisecond,
				time.Duration(rapid.IntRange(0, 20_000).Draw(rt, "before")) * time.Millisecond,
			}
		}), 1, 20).Draw(rt, "history")
		var lies []string
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, kind, notify.ListenerConfig{})
			w.startOrStop(w.parts[0])
			for _, e := range history {
				w.act(e.kind, e.which, e.lasts)
				w.pass(e.before)
			}
			w.pass(2 * time.Minute)
			for _, p := range w.parts {
				if p.stop != nil {
					p.stop()
				}
			}
			synctest.Wait()
			if n := w.pg.Open(); n != 0 {
				w.lies = append(w.lies, fmt.Sprint(n, " connections are left"))
			}
			lies = w.lies
		})
		if len(lies) > 0 {
			rt.Fatalf("%v", lies)
		}
	})
}

// The control: with heartbeats off nobody notices, and the model does.
func TestTheModelFindsALie(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, pgscript.Direct, notify.ListenerConfig{Heartbeat: -1})
		w.startOrStop(w.parts[0])
		w.pass(time.Second)
		w.act(6, 0, time.Minute)
		w.pass(time.Minute)
		w.startOrStop(w.parts[0])
		if len(w.lies) != 1 {
			t.Errorf("lies: %v", w.lies)
		}
	})
}
