package notify_test

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/bounceproof/bounceproof/internal/await"
	"github.com/bounceproof/bounceproof/internal/pgscript"
	"github.com/bounceproof/bounceproof/notify"
)

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

func TestAPollIsLateByOneCallAtMost(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ call, interval time.Duration }{
		"a quick handler":                    {5 * time.Millisecond, 200 * time.Millisecond},
		"a handler slower than the interval": {300 * time.Millisecond, 100 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				pg := newScripted(t, pgscript.Options{})
				l, err := notify.NewListener(pg, notify.ListenerConfig{
					PollInterval: c.interval, ProvenPollInterval: c.interval, Logger: slog.New(slog.DiscardHandler),
				})
				if err != nil {
					t.Fatal(err)
				}
				rec := &recorder{}
				var polls []time.Time
				var worst time.Duration
				last := time.Now()
				l.Handle("news", notify.HandlerFunc(func(ctx context.Context, e notify.Event) {
					rec.HandleEvent(ctx, e)
					if e.Kind == notify.Polled {
						polls = append(polls, time.Now())
						worst = max(worst, time.Since(last))
						last = time.Now()
					}
					time.Sleep(c.call)
					if e.Kind == notify.Notified {
						pg.Notify("news", e.Payload) // ten payloads always arrive
					}
				}))
				stop := run(t, l)
				synctest.Wait()
				for i := range 10 {
					pg.Notify("news", fmt.Sprint(i))
				}
				time.Sleep(20 * time.Second)
				stop()
				// A wait is up to 120 percent of the interval; a payload's call may be under way, and after a poll another one's turn is.
				if limit := c.interval*6/5 + 2*c.call; worst > limit || len(polls) == 0 {
					t.Errorf("%d polls, at most %v apart, want %v", len(polls), worst, limit)
				}
				if n := rec.kinds(notify.Notified); n < int(20*time.Second/c.call)/3 {
					t.Errorf("%d notifications handled beside %d polls", n, len(polls))
				}
			})
		})
	}
}

func TestSeveralHandlersOfOneChannelEachGetEverything(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		pg := newScripted(t, pgscript.Options{})
		s := newSender(t, newFakeDB(), notify.SenderConfig{})
		l, err := notify.NewListener(pg, notify.ListenerConfig{Sender: s, Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		first, second := &recorder{}, &recorder{}
		release := make(chan struct{})
		l.Handle("news", notify.HandlerFunc(func(ctx context.Context, e notify.Event) {
			first.HandleEvent(ctx, e)
			if e.Kind == notify.Notified {
				<-release
			}
		}))
		l.Handle("news", second)
		stop := run(t, l)
		synctest.Wait()
		pg.Notify("news", "1")
		notifyAll(t, s, "news", "2")
		synctest.Wait()
		if !second.heard("1") || !second.heard("2") || second.kinds(notify.Resynced) != 1 || l.Status().Received != 1 {
			t.Errorf("the second handler is held up by the first: %+v", l.Status())
		}
		close(release)
		time.Sleep(10 * time.Second)
		if !first.heard("1") || !first.heard("2") || first.kinds(notify.Resynced) != 1 || first.kinds(notify.Polled) == 0 || second.kinds(notify.Polled) == 0 {
			t.Error("the first handler did not get everything")
		}
		stop()
		if err := s.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// It is played in a process of its own, for it ends the program.
func TestGoexitOfTheProgramsFunctionsIsAPanic(t *testing.T) {
	t.Parallel()
	const key = "NOTIFY_TEST_GOEXIT"
	switch os.Getenv(key) {
	case "handler":
		l, err := notify.NewListener(newScripted(t, pgscript.Options{}), notify.ListenerConfig{})
		if err != nil {
			t.Fatal(err)
		}
		l.Handle("news", notify.HandlerFunc(func(context.Context, notify.Event) { runtime.Goexit() }))
		run(t, l)
		select {}
	case "subscriber":
		s := newSender(t, newFakeDB(), notify.SenderConfig{Window: time.Hour})
		s.Subscribe("news", func(string) { runtime.Goexit() })
		for range 2 { // the second is announced by the worker
			if err := s.NotifyTx(t.Context(), newFakeDB(), "news", ""); err != nil {
				t.Fatal(err)
			}
		}
		_ = s.Flush(t.Context())
		select {}
	}
	ctx, cancel := context.WithTimeout(t.Context(), await.Deadline)
	defer cancel()
	for who, want := range map[string]string{
		"handler":    "panic: notify: the handler of channel news called runtime.Goexit",
		"subscriber": "panic: notify: a subscriber of channel news called runtime.Goexit",
	} {
		cmd := exec.CommandContext(ctx, os.Args[0], "-test.run=^TestGoexitOfTheProgramsFunctionsIsAPanic$") //nolint:gosec // itself
		cmd.Env = append(os.Environ(), key+"="+who)
		if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), want) {
			t.Errorf("%s: %v\n%.1000s", who, err, out)
		}
	}
}
