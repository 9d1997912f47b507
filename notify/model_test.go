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

// A model of what can happen to three processes that listen, one of them with three listeners that share a connection, in virtual time
// and with the default configuration. Whatever the history, no listener tells one of two lies: that it is healthy while what publishers
// of its process send is not heard, whatever other processes hear and send, or that it is not while the world has been in order for as
// long as an attempt may take.

const (
	unheardFor = 15 * time.Second // Heartbeat + HeartbeatTimeout
	// inOrderFor is Reprove with its jitter, or two waits of the backoff, and the attempts themselves.
	inOrderFor = 36*time.Second + 10*time.Second + 5*time.Second
)

// participant is one of the listeners.
type participant struct {
	*notify.Listener
	process *peer
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
	peers   []*peer // the processes
	parts   []*participant
	wrong   map[wrong]time.Time // until when
	inOrder time.Time           // since when nothing is
	sent    int
	lies    []string
	lyingOf map[string]bool
}

// wrong is a fault, and whose.
type wrong struct {
	fault   string
	process int // 0 where it is everybody's
}

// fault is what can be wrong for a while: how it begins, how it ends, and for how long at least. What loses notes silently has to last
// until a heartbeat must have noticed: nothing tells of a note that was lost between two of them.
type fault struct {
	name  string
	set   func(pg *scripted, p *peer, wrong bool)
	least time.Duration
	own   bool          // a process's
	trail time.Duration // how long it goes on when it has ended
}

var faults = []fault{
	{name: "nobody can connect", set: func(s *scripted, _ *peer, wrong bool) { s.with(func() { s.down = wrong }) }},
	{name: "notifying hangs", set: func(s *scripted, _ *peer, wrong bool) { s.with(func() { s.silent = wrong }) }},
	{name: "the queue is full", set: func(s *scripted, _ *peer, wrong bool) {
		s.with(func() { s.execErr = map[bool]error{true: errors.New("full")}[wrong] })
	}},
	{name: "LISTEN is refused", set: func(s *scripted, _ *peer, wrong bool) {
		s.with(func() { s.listenErr = map[bool]string{true: "58P01"}[wrong] })
	}},
	{name: "LISTEN hangs", set: func(s *scripted, _ *peer, wrong bool) { s.with(func() { s.stalledListen = wrong }) }},
	{name: "the pooler shares silently", set: func(s *scripted, _ *peer, wrong bool) { s.LoseNotifications(wrong) }, least: unheardFor + time.Second},
	{
		name: "the pool leads elsewhere", set: func(_ *scripted, p *peer, wrong bool) { p.with(func() { p.elsewhere = wrong }) },
		least: unheardFor + time.Second, own: true,
	},
	{name: "all is heard 20s late", set: func(_ *scripted, p *peer, wrong bool) { p.late(wrong, 20*time.Second) }, own: true, trail: 20 * time.Second},
	{name: "all is heard 3s late", set: func(_ *scripted, p *peer, wrong bool) { p.late(wrong, 3*time.Second) }, own: true, trail: 20 * time.Second},
}

const sharesSilently, leadsElsewhere = 5, 6

func (p *peer) late(wrong bool, by time.Duration) {
	p.with(func() {
		if p.delay = 0; wrong {
			p.delay = by
		}
		if until := time.Now().Add(by); until.After(p.delayedUntil) {
			p.delayedUntil = until
		}
	})
}

func (p *peer) delayed() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.delay > 0 || time.Now().Before(p.delayedUntil)
}

// pass lets time pass, with publishers and checks.
func (w *world) pass(d time.Duration) {
	const step = 250 * time.Millisecond
	for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(step) {
		for _, f := range faults {
			for i, p := range w.peers {
				key := wrong{f.name, i}
				if until, ok := w.wrong[key]; ok && !time.Now().Before(until) {
					f.set(w.pg, p, false)
					delete(w.wrong, key)
					w.inOrderFrom(time.Now().Add(f.trail))
				}
			}
		}
		synctest.Wait()
		w.check()
		w.publish()
	}
}

func (w *world) inOrderFrom(t time.Time) {
	if t.After(w.inOrder) {
		w.inOrder = t
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
		if _, err := p.process.Exec(w.t.Context(), "", pgx.QueryExecModeExec, p.channel, payload); err != nil {
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
		if healthy && w.pg.Open() == 0 && !p.process.delayed() { // what is heard late is the end of a connection too
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
	case kind < len(faults):
		f := faults[kind]
		process := 0
		if f.own {
			process = which % len(w.peers)
		}
		f.set(w.pg, w.peers[process], true)
		w.wrong[wrong{f.name, process}] = time.Now().Add(max(lasts, f.least))
	case kind == len(faults):
		w.pg.CutAll()
		w.inOrderFrom(time.Now())
	case kind == len(faults)+1:
		w.pg.StallAll()
		w.inOrderFrom(time.Now().Add(unheardFor)) // by then it is noticed
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
	w.inOrderFrom(time.Now()) // a statement in the middle may have cost the connection
}

func newWorld(t *testing.T, kind pgscript.Kind, cfg notify.ListenerConfig) *world {
	w := &world{t: t, pg: newScripted(t, pgscript.Options{Kind: kind}), wrong: map[wrong]time.Time{}, inOrder: time.Now(), lyingOf: map[string]bool{}}
	cfg.Logger = slog.New(slog.DiscardHandler)
	var first *notify.Listener
	for i := range 5 {
		p := &participant{channel: fmt.Sprint("channel ", i), published: map[string]time.Time{}}
		if 0 < i && i < 3 { // the first three are of one process
			p.process, p.Listener = w.peers[0], first.Share()
		} else {
			p.process = &peer{scripted: w.pg}
			w.peers = append(w.peers, p.process)
			var err error
			if p.Listener, err = notify.NewListener(p.process, cfg); err != nil {
				t.Fatal(err)
			}
			if i == 0 {
				first = p.Listener
			}
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
				rapid.IntRange(0, len(faults)+5).Draw(rt, "kind"), rapid.IntRange(0, 4).Draw(rt, "which"),
				time.Duration(rapid.IntRange(0, 40_000).Draw(rt, "lasts")) * time.Millisecond,
				time.Duration(rapid.IntRange(0, 20_000).Draw(rt, "before")) * time.Millisecond,
			}
		}), 1, 20).Draw(rt, "history")
		var lies []string
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, kind, notify.ListenerConfig{})
			for _, i := range []int{0, 3, 4} { // one of each process
				w.startOrStop(w.parts[i])
			}
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
			time.Sleep(time.Minute)
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

// The controls: with heartbeats off nobody notices, nor does who takes the notes of other processes for all that is to be known; and the
// model does.
func TestTheModelFindsALie(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		cfg   notify.ListenerConfig
		spoil func(*peer)
		fault int
		lies  int
	}{
		"heartbeats off":        {notify.ListenerConfig{Heartbeat: -1}, func(*peer) {}, sharesSilently, 1},
		"looks that find all":   {notify.ListenerConfig{}, func(p *peer) { p.credulous = true }, leadsElsewhere, 1},
		"looks that are honest": {notify.ListenerConfig{}, func(*peer) {}, leadsElsewhere, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, pgscript.Direct, c.cfg)
				c.spoil(w.peers[0])
				w.startOrStop(w.parts[0])
				for i := range 40 {
					if i == 10 {
						w.act(c.fault, 0, time.Minute)
					}
					w.pg.Notify(notify.ProofChannel, "another's "+w.pg.Stamp()) // so that its own turn never comes
					w.pass(2 * time.Second)
				}
				w.startOrStop(w.parts[0])
				if len(w.lies) != c.lies {
					t.Errorf("lies: %v", w.lies)
				}
				time.Sleep(time.Minute)
			})
		})
	}
}
