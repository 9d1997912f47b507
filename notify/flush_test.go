package notify_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/bounceproof/bounceproof/notify"
)

func TestFlushWaitsForWhatWasAcceptedBefore(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newFakeDB()
		db.hook = func(context.Context, int) error { time.Sleep(100 * time.Millisecond); return nil }
		s := newSender(t, db, notify.SenderConfig{})
		if err := s.Flush(t.Context()); err != nil || len(db.statements()) != 0 {
			t.Fatalf("Flush of nothing = %v", err)
		}
		notifyAll(t, s, "a", "1")
		synctest.Wait() // under way
		notifyAll(t, s, "a", "2")
		// Others go on notifying: Flush must not wait for them.
		stop := make(chan struct{})
		go func() {
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				case <-time.After(time.Millisecond):
					_ = s.Notify("noise", fmt.Sprint(i))
				}
			}
		}()
		start := time.Now()
		if err := s.Flush(t.Context()); err != nil {
			t.Fatal(err)
		}
		close(stop)
		if took := time.Since(start); took > 250*time.Millisecond {
			t.Errorf("Flush took %v, two statements take 200ms", took)
		}
		if !slices.Contains(db.statements()[1].notes, "a 2") {
			t.Error("Flush returned before the notification was sent")
		}
		if err := s.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
	})
}

func TestFlushReportsWhyItGaveUpAndKeepsTheNotifications(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newFakeDB()
		down := errors.New("down")
		failing := true
		db.hook = func(context.Context, int) error {
			if failing {
				return down
			}
			return nil
		}
		s := newSender(t, db, notify.SenderConfig{})
		notifyAll(t, s, "a", "1")
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		if err := s.Flush(ctx); !errors.Is(err, down) || !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("Flush = %v, want both the deadline and the cause", err)
		}
		failing = false
		// A second Flush does not sit out the backoff that has grown meanwhile.
		start := time.Now()
		if err := s.Flush(t.Context()); err != nil || time.Since(start) > 20*time.Millisecond {
			t.Fatalf("Flush = %v after %v", err, time.Since(start))
		}
	})
}

func TestCloseSendsWhatWaitsThenRefuses(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newFakeDB()
		s := newSender(t, db, notify.SenderConfig{})
		notifyAll(t, s, "a", "1")
		synctest.Wait()
		notifyAll(t, s, "a", "2")
		if err := s.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := db.statements(); len(got) != 2 || got[1].notes[0] != "a 2" {
			t.Errorf("statements %v", got)
		}
		if err := s.Notify("a", "3"); !errors.Is(err, notify.ErrClosed) {
			t.Errorf("Notify = %v", err)
		}
		if err := s.NotifyTx(t.Context(), db, "a", "3"); !errors.Is(err, notify.ErrClosed) {
			t.Errorf("NotifyTx = %v", err)
		}
		if err := s.Close(t.Context()); err != nil {
			t.Errorf("second Close = %v", err)
		}
	})
}

func TestCloseDoesNotWaitForAServerThatIsGone(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newFakeDB()
		down := errors.New("down")
		db.hook = func(context.Context, int) error { return down }
		s := newSender(t, db, notify.SenderConfig{})
		notifyAll(t, s, "a", "1")
		time.Sleep(time.Minute) // deep in backoff
		before := len(db.statements())
		start := time.Now()
		err := s.Close(t.Context()) // a context without an end
		if !errors.Is(err, down) {
			t.Errorf("Close = %v, want the cause", err)
		}
		if took := time.Since(start); took > 6*time.Second {
			t.Errorf("Close took %v", took)
		}
		if tries := len(db.statements()) - before; tries != 2 {
			t.Errorf("%d attempts, want 2", tries)
		}
		if st := s.Stats(); st.Dropped != 1 || st.Pending != 0 {
			t.Errorf("stats %+v", st)
		}
	})
}

func TestConcurrentUseLosesNothing(t *testing.T) {
	t.Parallel()
	db := newFakeDB()
	s := newSender(t, db, notify.SenderConfig{Window: time.Millisecond})
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			for i := range 200 {
				_ = s.Notify(fmt.Sprint("c", g), fmt.Sprint(i))
				if i%50 == 0 {
					_ = s.Flush(t.Context())
				}
			}
		})
	}
	wg.Wait()
	if err := s.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for _, st := range db.statements() {
		for _, n := range st.notes {
			seen[n] = true
		}
	}
	if len(seen) != 8*200 {
		t.Errorf("%d distinct notifications of 1600 went out", len(seen))
	}
}
