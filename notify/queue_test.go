package notify_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/bounceproof/bounceproof/notify"
)

// stuck is a sender whose statement is under way and does not end until the function is called.
func stuck(t *testing.T) (s *notify.Sender, release func()) {
	t.Helper()
	db := newFakeDB()
	hold := make(chan struct{})
	db.hook = func(context.Context, int) error { <-hold; return nil }
	s = newSender(t, db, notify.SenderConfig{Timeout: -1})
	return s, func() { close(hold) }
}

// However much waits, one more notification costs the same: what waits is folded, and each note is looked at once for that.
func TestNotifyTakesNoLongerWhenMoreWaits(t *testing.T) {
	// Not parallel: it measures.
	perCall := func(channels, rounds int) time.Duration {
		s, release := stuck(t)
		payload := strings.Repeat("x", 200)
		fill := func(round int) {
			for i := range channels {
				if err := s.Notify(fmt.Sprint("channel ", i), fmt.Sprint(payload, round)); err != nil {
					t.Fatal(err)
				}
			}
		}
		fill(0)
		start := time.Now()
		for round := range rounds {
			fill(round + 1)
		}
		took := time.Since(start) / time.Duration(channels*rounds)
		release()
		if err := s.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		return took
	}
	few, many := time.Hour, time.Hour
	for range 3 {
		few, many = min(few, perCall(900, 10)), min(many, perCall(9000, 1))
	}
	t.Logf("a notification takes %v with 900 waiting, %v with 9,000", few, many)
	if many > 5*few+20*time.Microsecond {
		t.Errorf("a notification takes %v with 900 waiting, %v with 9,000", few, many)
	}
}

func TestWhatWaitsIsFoldedAndKeepsEveryChannel(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newFakeDB()
		hold := make(chan struct{})
		db.hook = func(_ context.Context, n int) error {
			if n == 1 {
				<-hold
			}
			return nil
		}
		s := newSender(t, db, notify.SenderConfig{Timeout: -1})
		notifyAll(t, s, "first", "")
		synctest.Wait()
		for round := range 5 {
			for i := range 2000 {
				notifyAll(t, s, fmt.Sprint(i), strings.Repeat("x", 500)+fmt.Sprint(round))
			}
		}
		if st := s.Stats(); st.Collapsed == 0 || st.Dropped != 0 {
			t.Errorf("stats %+v", st)
		}
		close(hold)
		if err := s.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		size, channels := 0, map[string]bool{}
		for _, st := range db.statements()[1:] {
			for _, n := range st.notes {
				name, payload, _ := strings.Cut(n, " ")
				channels[name] = true
				size += len(payload)
			}
		}
		if len(channels) != 2000 || size > 1<<20 {
			t.Errorf("%d channels, payloads of %d bytes", len(channels), size)
		}
	})
}
