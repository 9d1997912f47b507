package notify_test

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

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
