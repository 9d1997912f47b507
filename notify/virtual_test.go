package notify_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/bounceproof/bounceproof/internal/pgscript"
	"github.com/bounceproof/bounceproof/notify"
)

// Tests of the listener in virtual time, with the default configuration and a scripted server.

// virtual runs f in a bubble with a scripted server and a listener on channel "news", which is stopped at the end.
func virtual(t *testing.T, cfg notify.ListenerConfig, f func(t *testing.T, pg *scripted, l *listening)) {
	t.Helper()
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		pg := newScripted(t, pgscript.Options{})
		l := listen(t, pg, cfg)
		f(t, pg, l)
		l.stop()
		// The bubble ends only when every goroutine has: no worker and no cancel request is left.
		synctest.Wait()
		if n := pg.Open(); n != 0 {
			t.Errorf("%d connections are left", n)
		}
	})
}

func (l *listening) must(t *testing.T, state notify.State) {
	t.Helper()
	synctest.Wait()
	if got := l.State(); got != state {
		t.Fatalf("state %v (%s), want %v", got, l.Status().Reason, state)
	}
}

func TestHeartbeatGoesOnAndKeepsTheStateProven(t *testing.T) {
	virtual(t, notify.ListenerConfig{}, func(t *testing.T, pg *scripted, l *listening) {
		l.must(t, notify.Proven)
		time.Sleep(10 * time.Minute)
		l.must(t, notify.Proven)
		if st := l.Status(); st.Proofs < 60 || st.Proofs > 80 || st.Connects != 1 || time.Since(st.LastProof) > 10*time.Second {
			t.Errorf("status %+v: want a proof at least every 10s and not many more", st)
		}
		if n := l.kinds(notify.Resynced); n != 1 {
			t.Errorf("%d resyncs, want 1", n)
		}
		if n := l.kinds(notify.Polled); n < 100 || n > 150 {
			t.Errorf("%d polls in 10 minutes, want one every 5s", n)
		}
	})
}

func TestBlackHoleIsNoticedWithin15Seconds(t *testing.T) {
	for name, hole := range map[string]func(*scripted){
		"listener's connection": (*scripted).StallAll,
		"everything":            func(pg *scripted) { pg.StallAll(); pg.with(func() { pg.silent = true }) },
		"everything, and nobody can connect": func(pg *scripted) {
			pg.StallAll()
			pg.with(func() { pg.silent, pg.down = true, true })
		},
	} {
		t.Run(name, func(t *testing.T) {
			virtual(t, notify.ListenerConfig{}, func(t *testing.T, pg *scripted, l *listening) {
				l.must(t, notify.Proven)
				var worst time.Duration
				for range 10 {
					time.Sleep(time.Since(pg.born) % (7 * time.Second)) // at some point of the heartbeat
					hole(pg)
					start := time.Now()
					// Not the state: with luck it reconnects at once.
					for losses := l.Status().Losses; l.Status().Losses == losses; {
						time.Sleep(10 * time.Millisecond)
						synctest.Wait()
					}
					worst = max(worst, time.Since(start))
					polled := l.kinds(notify.Polled)
					time.Sleep(3 * time.Second)
					if l.State() != notify.Proven && l.kinds(notify.Polled) == polled {
						t.Error("not polled while disconnected")
					}
					pg.with(func() { pg.silent, pg.down = false, false })
					time.Sleep(20 * time.Second)
					l.must(t, notify.Proven)
				}
				if worst > 15*time.Second {
					t.Errorf("noticed after %v", worst)
				}
				if st := l.Status(); st.Losses != 10 || l.kinds(notify.Resynced) != 11 {
					t.Errorf("%d resyncs, status %+v", l.kinds(notify.Resynced), st)
				}
				t.Logf("noticed after at most %v", worst)
			})
		})
	}
}

// A pool without a free connection, or a server without one, says nothing against a listener that answers.
func TestBusyPoolDoesNotCostAConnectionThatWorks(t *testing.T) {
	virtual(t, notify.ListenerConfig{}, func(t *testing.T, pg *scripted, l *listening) {
		l.must(t, notify.Proven)
		pg.with(func() { pg.silent, pg.down = true, true }) // its connection stays open
		time.Sleep(5 * time.Minute)
		l.must(t, notify.Proven)
		pg.Notify("news", "still heard")
		synctest.Wait()
		if !l.heard("still heard") {
			t.Error("nothing heard")
		}
		if st := l.Status(); st.Connects != 1 || st.Proofs != 1 {
			t.Errorf("status %+v", st)
		}
		pg.with(func() { pg.silent, pg.down = false, false })
	})
}

func TestLostConnectionResyncsAfterListen(t *testing.T) {
	virtual(t, notify.ListenerConfig{}, func(t *testing.T, pg *scripted, l *listening) {
		l.must(t, notify.Proven)
		for i := range 5 {
			pg.CutAll()
			l.must(t, notify.Disconnected)
			if l.Status().Reason == "" {
				t.Error("no reason")
			}
			time.Sleep(10 * time.Second)
			l.must(t, notify.Proven)
			if n := l.kinds(notify.Resynced); n != i+2 {
				t.Errorf("%d resyncs after %d losses", n, i+1)
			}
			pg.Notify("news", fmt.Sprint(i))
			synctest.Wait()
			if !l.heard(fmt.Sprint(i)) {
				t.Error("nothing heard after reconnecting")
			}
		}
		if w := l.warnings(); w != 5 {
			t.Errorf("%d warnings for 5 losses", w)
		}
		if i := l.informations(); i != 6 {
			t.Errorf("%d informations, want 6", i)
		}
	})
}

func TestReconnectsAreSpread(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		pg := newScripted(t, pgscript.Options{})
		const many = 50
		var all []*listening
		for range many {
			all = append(all, listen(t, pg, notify.ListenerConfig{}))
		}
		synctest.Wait()
		pg.with(func() { pg.down, pg.dials = true, nil })
		pg.CutAll()
		time.Sleep(3 * time.Second)
		pg.with(func() { pg.down = false })
		time.Sleep(30 * time.Second)
		for _, l := range all {
			l.must(t, notify.Proven)
			l.stop()
		}
		dials := pg.dialled()
		slices.Sort(dials)
		busiest := 0
		for i := range dials {
			j := i
			for j < len(dials) && dials[j] < dials[i]+100*time.Millisecond {
				j++
			}
			busiest = max(busiest, j-i)
		}
		t.Logf("%d attempts over %v, at most %d in any 100ms", len(dials), dials[len(dials)-1]-dials[0], busiest)
		if busiest > many*2/5 {
			t.Errorf("%d of %d arrived within 100ms", busiest, many)
		}
	})
}

func TestAttemptsBackOffWhileTheServerIsDown(t *testing.T) {
	virtual(t, notify.ListenerConfig{}, func(t *testing.T, pg *scripted, l *listening) {
		l.must(t, notify.Proven)
		pg.with(func() { pg.down, pg.dials = true, nil })
		pg.CutAll()
		time.Sleep(10 * time.Minute)
		l.must(t, notify.Disconnected)
		if n := len(pg.dialled()); n < 60 || n > 240 {
			t.Errorf("%d attempts in 10 minutes, want one every 5s or so", n)
		}
		if n := l.kinds(notify.Polled); n < 500 {
			t.Errorf("%d polls in 10 minutes", n)
		}
		if w := l.warnings(); w != 1 {
			t.Errorf("%d warnings for one loss:\n%s", w, l.log.All())
		}
		pg.with(func() { pg.down = false })
		time.Sleep(15 * time.Second)
		l.must(t, notify.Proven)
	})
}

// 58P01: the notification queue refers to a transaction whose status VACUUM has cut off (fixed in the minor releases of
// early 2026, never in 13).
func TestRefusedListenIsPolledAndTriedAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		pg := newScripted(t, pgscript.Options{})
		pg.listenErr = "58P01"
		l := listen(t, pg, notify.ListenerConfig{})
		l.must(t, notify.Isolated)
		if !strings.Contains(l.Status().Reason, "58P01") {
			t.Errorf("reason %q", l.Status().Reason)
		}
		time.Sleep(time.Minute)
		if n := l.kinds(notify.Polled); n < 45 {
			t.Errorf("%d polls in a minute", n)
		}
		if n := len(pg.dialled()); n < 5 || n > 40 {
			t.Errorf("%d attempts in a minute", n)
		}
		pg.with(func() { pg.listenErr = "" })
		time.Sleep(15 * time.Second)
		l.must(t, notify.Proven)
		if l.warnings() != 1 || l.informations() != 1 {
			t.Errorf("want one warning and one information:\n%s", l.log.All())
		}
		l.stop()
	})
}

func TestSilentPathIsIsolatedWithin5SecondsAndFoundAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		pg := newScripted(t, pgscript.Options{Kind: pgscript.Session})
		pg.LoseNotifications(true)
		l := listen(t, pg, notify.ListenerConfig{})
		time.Sleep(5 * time.Second)
		l.must(t, notify.Isolated)
		time.Sleep(10 * time.Minute)
		l.must(t, notify.Isolated)
		if n := len(pg.dialled()); n < 30 || n > 50 { // two connections an attempt
			t.Errorf("%d connections in 10 minutes, want two every 30s", n)
		}
		pg.LoseNotifications(false)
		time.Sleep(40 * time.Second)
		l.must(t, notify.Proven)
		pg.LoseNotifications(true) // and back again: the pooler's mode changed under an open connection
		start := time.Now()
		for l.State() == notify.Proven {
			time.Sleep(10 * time.Millisecond)
			synctest.Wait()
		}
		if took := time.Since(start); took > 15*time.Second {
			t.Errorf("noticed after %v", took)
		}
		time.Sleep(15 * time.Second)
		l.must(t, notify.Isolated)
		l.stop()
	})
}

// A server that takes connections and drops them at once is a failing server.
func TestConnectionsThatDoNotLastBackOff(t *testing.T) {
	virtual(t, notify.ListenerConfig{}, func(t *testing.T, pg *scripted, l *listening) {
		for range 10 * 60 * 10 {
			synctest.Wait()
			pg.CutAll()
			time.Sleep(100 * time.Millisecond)
		}
		if n := len(pg.dialled()); n > 200 {
			t.Errorf("%d connections in 10 minutes, want one every 5s", n)
		}
		time.Sleep(20 * time.Second)
		l.must(t, notify.Proven)
	})
}

func TestForgedOrLateNoteIsNoProof(t *testing.T) {
	virtual(t, notify.ListenerConfig{}, func(t *testing.T, pg *scripted, l *listening) {
		l.must(t, notify.Proven)
		var proof string
		pg.with(func() { pg.lost = true })
		for _, channel := range pg.Channels() {
			if strings.HasPrefix(channel, notify.ProofPrefix) {
				proof = channel
			}
		}
		for range 15 {
			time.Sleep(time.Second)
			pg.Notify(proof, "of an earlier beat")
		}
		synctest.Wait()
		if st := l.Status(); st.Losses != 1 || st.Proofs != 1 || proof == "" {
			t.Errorf("status %+v", st)
		}
		pg.with(func() { pg.lost = false })
	})
}

func TestIgnoredNotificationsAreIgnored(t *testing.T) {
	virtual(t, notify.ListenerConfig{PollInterval: -1, ProvenPollInterval: -1}, func(t *testing.T, pg *scripted, l *listening) {
		l.must(t, notify.Proven)
		pg.Broadcast("elsewhere", "")
		pg.Broadcast(notify.ProofPrefix+"of somebody else", "")
		synctest.Wait()
		if n := l.count(func(e notify.Event) bool { return e.Kind != notify.Resynced }); n != 0 {
			t.Errorf("%d events", n)
		}
		if st := l.Status(); st.Ignored != 2 || st.Received != 0 {
			t.Errorf("status %+v", st)
		}
	})
}

func TestNoHeartbeatWhenTurnedOff(t *testing.T) {
	virtual(t, notify.ListenerConfig{Heartbeat: -1}, func(t *testing.T, pg *scripted, l *listening) {
		l.must(t, notify.Proven)
		time.Sleep(24 * time.Hour)
		if st := l.Status(); st.Proofs != 1 || st.Connects != 1 || st.State != notify.Proven {
			t.Errorf("status %+v, want the proof of the new connection alone", st)
		}
		pg.Notify("news", "still heard")
		synctest.Wait()
		if !l.heard("still heard") {
			t.Error("nothing heard")
		}
		pg.CutAll() // a connection that ends is noticed all the same
		time.Sleep(5 * time.Second)
		if st := l.Status(); st.Proofs != 2 || st.Losses != 1 || st.State != notify.Proven {
			t.Errorf("status %+v", st)
		}
	})
}

func TestSecondRunIsAnError(t *testing.T) {
	virtual(t, notify.ListenerConfig{}, func(t *testing.T, pg *scripted, l *listening) {
		l.must(t, notify.Proven)
		if err := l.Run(t.Context()); !errors.Is(err, notify.ErrRunning) {
			t.Errorf("Run = %v", err)
		}
		pg.Notify("news", "undisturbed")
		synctest.Wait()
		if !l.heard("undisturbed") {
			t.Error("the first Run was disturbed")
		}
	})
}

func TestNoPollingWhenTurnedOff(t *testing.T) {
	virtual(t, notify.ListenerConfig{PollInterval: -1, ProvenPollInterval: -1}, func(t *testing.T, pg *scripted, l *listening) {
		time.Sleep(time.Minute)
		pg.with(func() { pg.down = true })
		pg.CutAll()
		time.Sleep(time.Minute)
		if n := l.kinds(notify.Polled); n != 0 {
			t.Errorf("%d polls", n)
		}
		pg.with(func() { pg.down = false })
	})
}

func TestPollsOfManyListenersAreSpread(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		pg := newScripted(t, pgscript.Options{})
		pg.down = true
		var mu sync.Mutex
		perSlice := map[time.Duration]int{}
		var stops []func()
		for range 50 {
			l, err := notify.NewListener(pg, notify.ListenerConfig{Logger: slog.New(slog.DiscardHandler)})
			if err != nil {
				t.Fatal(err)
			}
			l.Handle("news", notify.HandlerFunc(func(context.Context, notify.Event) {
				mu.Lock()
				defer mu.Unlock()
				perSlice[time.Since(pg.born).Truncate(50*time.Millisecond)]++
			}))
			stops = append(stops, run(t, l))
		}
		time.Sleep(20 * time.Second)
		for _, stop := range stops {
			stop()
		}
		busiest, total := 0, 0
		for _, n := range perSlice {
			busiest, total = max(busiest, n), total+n
		}
		t.Logf("%d polls of 50 listeners in 20s, at most %d in 50ms", total, busiest)
		if total < 800 || busiest > 15 {
			t.Errorf("%d polls, %d of them within 50ms", total, busiest)
		}
	})
}

func TestSlowHandlerDelaysNobodyAndMissesNothing(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		pg := newScripted(t, pgscript.Options{})
		l, err := notify.NewListener(pg, notify.ListenerConfig{MaxPending: 100, Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		slow, quick := &recorder{}, &recorder{}
		release := make(chan struct{})
		l.Handle("slow", notify.HandlerFunc(func(ctx context.Context, e notify.Event) {
			slow.HandleEvent(ctx, e)
			if e.Kind == notify.Notified {
				<-release
			}
		}))
		l.Handle("quick", quick)
		stop := run(t, l)
		synctest.Wait()
		pg.Notify("slow", "same")
		synctest.Wait() // its handler runs
		pg.Notify("slow", "same")
		for i := range 50 {
			pg.Notify("slow", fmt.Sprint(i))
		}
		pg.Notify("quick", "now")
		synctest.Wait()
		if !quick.heard("now") {
			t.Error("a slow handler held up another channel")
		}
		close(release)
		synctest.Wait()
		if n := slow.count(func(e notify.Event) bool { return e.Payload == "same" }); n != 2 {
			t.Errorf("the payload that came during its own call was delivered %d times, want 2", n)
		}
		if n := slow.kinds(notify.Notified); n != 52 {
			t.Errorf("%d notifications handled, want 52", n)
		}

		release = make(chan struct{})
		pg.Notify("slow", "block")
		synctest.Wait()
		for i := range 5000 {
			pg.Notify("slow", fmt.Sprint("flood", i))
		}
		synctest.Wait()
		close(release)
		synctest.Wait()
		if n := slow.kinds(notify.Notified); n > 52+102 || !slow.heard("") {
			t.Errorf("%d notifications handled after a flood, want the flood merged into an empty payload", n)
		}
		if l.Status().Merged == 0 {
			t.Error("Merged is 0")
		}
		pg.Notify("slow", "after")
		synctest.Wait()
		if !slow.heard("after") {
			t.Error("the detail did not come back after the flood")
		}
		stop()
	})
}

func TestListenersShareOneConnectionAndHandItOn(t *testing.T) {
	virtual(t, notify.ListenerConfig{PollInterval: -1, ProvenPollInterval: -1}, func(t *testing.T, pg *scripted, first *listening) {
		first.must(t, notify.Proven)
		pg.Reset()

		second := &recorder{}
		other := first.Share()
		other.Handle("weather", second)
		other.Handle("news", second)
		stopOther := run(t, other)
		synctest.Wait()
		if second.kinds(notify.Resynced) != 2 || first.kinds(notify.Resynced) != 1 {
			t.Errorf("resyncs: %d of the newcomer, want one a channel; %d of the first, want 1",
				second.kinds(notify.Resynced), first.kinds(notify.Resynced))
		}
		if log := pgscript.Strings(pg.Sent()); len(log) != 1 || !strings.HasPrefix(log[0], `Query listen "weather"`) {
			t.Errorf("statements for the newcomer: %q", log)
		}
		pg.Notify("news", "both")
		pg.Notify("weather", "one")
		synctest.Wait()
		if !first.heard("both") || !second.heard("both") || !second.heard("one") {
			t.Error("not everybody heard")
		}

		proofs := first.Status().Proofs
		first.stop() // it was the one that read
		synctest.Wait()
		if other.Status().Proofs != proofs+1 {
			t.Error("whoever goes on did not prove the connection first")
		}
		pg.Notify("news", "handed on")
		synctest.Wait()
		if !second.heard("handed on") || other.State() != notify.Proven {
			t.Error("nobody reads any more")
		}
		time.Sleep(time.Minute)
		if st := other.Status(); st.Connects != 1 || st.Losses != 0 || st.State != notify.Proven {
			t.Errorf("status %+v: the connection was not handed on", st)
		}
		stopOther()
		synctest.Wait()
		if n := pg.Open(); n != 0 {
			t.Errorf("%d connections are left", n)
		}
		if st := other.Status(); st.State != notify.Unknown {
			t.Errorf("state %v after the last one left", st.State)
		}
		// And it can be run again.
		stopOther = run(t, other)
		synctest.Wait()
		if other.State() != notify.Proven {
			t.Errorf("state %v of the second run", other.State())
		}
		stopOther()
	})
}

func TestSenderOfTheSameProcessWakesHandlersWithoutTheServer(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		pg := newScripted(t, pgscript.Options{})
		pg.down = true
		s := newSender(t, newFakeDB(), notify.SenderConfig{})
		l := listen(t, pg, notify.ListenerConfig{Sender: s})
		synctest.Wait()
		notifyAll(t, s, "news", "local")
		notifyAll(t, s, "other", "x")
		synctest.Wait()
		if !l.heard("local") || l.kinds(notify.Notified) != 1 {
			t.Error("not heard")
		}
		l.stop()
		notifyAll(t, s, "news", "late")
		if l.heard("late") {
			t.Error("heard after Run")
		}
		if err := s.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

func TestMisusePanics(t *testing.T) {
	t.Parallel()
	pg := newScripted(t, pgscript.Options{})
	fresh := func() *notify.Listener {
		l, err := notify.NewListener(pg, notify.ListenerConfig{})
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	h := notify.HandlerFunc(func(context.Context, notify.Event) {})
	done, cancel := context.WithCancel(context.Background())
	cancel()
	for want, f := range map[string]func(){
		"notify: NewListener: nil pool":                   func() { _, _ = notify.NewListener(nil, notify.ListenerConfig{}) },
		"notify: NewSender: nil db":                       func() { _, _ = notify.NewSender(nil, notify.SenderConfig{}) },
		"notify: Handle: nil handler for channel a":       func() { fresh().Handle("a", nil) },
		"notify: channel is too long":                     func() { fresh().Handle(strings.Repeat("x", 64), h) },
		"notify: Handle: second handler for channel a":    func() { l := fresh(); l.Handle("a", h); l.Handle("a", h) },
		"notify: Handle: called after Run, for channel a": func() { l := fresh(); _ = l.Run(done); l.Handle("a", h) },
	} {
		func() {
			defer func() {
				if text, _ := recover().(string); !strings.HasPrefix(text, want) {
					t.Errorf("panic %q, want %q", text, want)
				}
			}()
			f()
		}()
	}
}

func TestListenerConfigIsChecked(t *testing.T) {
	t.Parallel()
	for field, cfg := range map[string]notify.ListenerConfig{
		"Direct":           {Direct: "postgres://user:secret@host:port/db"},
		"HeartbeatTimeout": {HeartbeatTimeout: -1},
		"ReconnectMin ":    {ReconnectMin: -1},
		"ReconnectMax":     {ReconnectMin: time.Minute, ReconnectMax: time.Second},
		"MaxPending":       {MaxPending: -1},
	} {
		_, err := notify.NewListener(newScripted(t, pgscript.Options{}), cfg)
		if err == nil || !strings.Contains(err.Error(), field) || strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: %v", field, err)
		}
	}
}
