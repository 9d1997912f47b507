package notify_test

import (
	"fmt"
	"slices"
	"strings"
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
	for name, silence := range map[string]func(*scripted){
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
					silence(pg)
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

// A pool without a free connection, or a server without one, says nothing against a listener that answers, and nothing for it.
func TestBusyPoolDoesNotCostAConnectionThatWorks(t *testing.T) {
	virtual(t, notify.ListenerConfig{}, func(t *testing.T, pg *scripted, l *listening) {
		l.must(t, notify.Proven)
		pg.with(func() { pg.silent, pg.down = true, true }) // its connection stays open
		time.Sleep(15 * time.Second)
		for range 3600 { // hundreds of heartbeats: the end of a note and the wake-up by it are not one moment
			l.must(t, notify.Unknown)
			time.Sleep(time.Second)
		}
		pg.Notify("news", "still heard")
		synctest.Wait()
		if !l.heard("still heard") {
			t.Error("nothing heard")
		}
		if st := l.Status(); st.Connects != 1 || st.Proofs != 1 || st.Losses != 0 || !strings.Contains(st.Reason, "cannot send a note") {
			t.Errorf("status %+v", st)
		}
		if n := l.kinds(notify.Polled); n < 3000 {
			t.Errorf("%d polls in an hour, want one a second", n)
		}
		if l.warnings() != 1 || !strings.Contains(l.log.All(), "remedy") {
			t.Errorf("want one warning with a remedy:\n%s", l.log.All())
		}
		pg.with(func() { pg.silent, pg.down = false, false })
		time.Sleep(15 * time.Second)
		l.must(t, notify.Proven)
		if st := l.Status(); st.Connects != 1 || st.Losses != 0 {
			t.Errorf("status %+v", st)
		}
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

func TestNotificationsOfOthersAreIgnored(t *testing.T) {
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
