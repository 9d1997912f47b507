package notify_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5/pgconn"
	"pgregory.net/rapid"

	"github.com/bounceproof/bounceproof/notify"
)

func TestTransactionNotifiesInsideOncePerWindowAndTrailsOutside(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, tx := newFakeDB(), newFakeDB()
		s := newSender(t, db, notify.SenderConfig{})
		for i := range 25 { // one every millisecond
			if err := s.NotifyTx(t.Context(), tx, "a", fmt.Sprint(i)); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Millisecond)
		}
		time.Sleep(time.Second)
		if diff := cmp.Diff([]int64{0, 10, 20}, tx.times()); diff != "" {
			t.Errorf("inside: %s", diff)
		}
		sent := map[string]time.Duration{}
		for _, st := range db.statements() {
			for _, n := range st.notes {
				sent[n] = st.at
			}
		}
		for i := range 25 {
			at, ok := sent[fmt.Sprint("a ", i)]
			if inside := i%10 == 0; ok == inside {
				t.Errorf("notification %d: inside %v, outside %v", i, inside, ok)
			} else if ok && (at < time.Duration(i+10)*time.Millisecond || at > time.Duration(i+20)*time.Millisecond) {
				t.Errorf("notification %d of %dms trails at %v, want one to two windows later", i, i, at)
			}
		}
		if st := s.Stats(); st.InTx != 3 || st.Accepted != 25 {
			t.Errorf("stats %+v", st)
		}
	})
}

// The same notification over and over must neither be put off for ever nor go out before its transaction had a window
// to commit.
func TestRepeatedTransactionNotificationIsNotStarved(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, tx := newFakeDB(), newFakeDB()
		s := newSender(t, db, notify.SenderConfig{})
		for range 100 {
			if err := s.NotifyTx(t.Context(), tx, "a", "same"); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Millisecond)
		}
		last := time.Since(db.born) - time.Millisecond
		time.Sleep(time.Second)
		got := db.statements()
		if len(got) < 4 {
			t.Errorf("only %d statements outside in 100ms: %v", len(got), db.times())
		}
		if at := got[len(got)-1].at; at < last+10*time.Millisecond {
			t.Errorf("last note at %v, last statement at %v: its transaction had no window to commit", last, at)
		}
	})
}

func TestTransactionNotificationWakesSubscribersAWindowLater(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, tx := newFakeDB(), newFakeDB()
		s := newSender(t, db, notify.SenderConfig{})
		woken := make(chan time.Duration, 10)
		s.Subscribe("a", func(string) { woken <- time.Since(db.born) })
		for range 2 { // one inside, one outside
			if err := s.NotifyTx(t.Context(), tx, "a", "1"); err != nil {
				t.Fatal(err)
			}
		}
		if at := <-woken; at != 10*time.Millisecond {
			t.Errorf("woken at %v, want 10ms", at)
		}
	})
}

func TestPlainNotificationDoesNotWaitForADeferredOne(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, tx := newFakeDB(), newFakeDB()
		s := newSender(t, db, notify.SenderConfig{})
		_ = s.NotifyTx(t.Context(), tx, "a", "1")
		_ = s.NotifyTx(t.Context(), tx, "a", "2") // deferred to 10ms
		synctest.Wait()
		time.Sleep(time.Millisecond)
		notifyAll(t, s, "b", "1")
		synctest.Wait()
		if diff := cmp.Diff([]int64{1}, db.times()); diff != "" {
			t.Errorf("statements %s", diff)
		}
		start := time.Now()
		if err := s.Flush(t.Context()); err != nil || time.Since(start) > 10*time.Millisecond {
			t.Fatalf("Flush = %v after %v", err, time.Since(start))
		}
		got := db.statements()
		if diff := cmp.Diff([]string{"a 2"}, got[len(got)-1].notes); diff != "" {
			t.Error(diff)
		}
	})
}

func TestDeferredNotificationKeepsTheDistanceToo(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, tx := newFakeDB(), newFakeDB()
		s := newSender(t, db, notify.SenderConfig{})
		_ = s.NotifyTx(t.Context(), tx, "a", "1")
		_ = s.NotifyTx(t.Context(), tx, "a", "2") // due at 10ms
		time.Sleep(7 * time.Millisecond)
		notifyAll(t, s, "b", "1")
		time.Sleep(time.Second)
		if diff := cmp.Diff([]int64{7, 17}, db.times()); diff != "" {
			t.Error(diff)
		}
	})
}

// A notification that rode in its transaction must not take one along that did not.
func TestMergedNotificationsAreSentIfOneOfThemIsDue(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, tx := newFakeDB(), newFakeDB()
		s := newSender(t, db, notify.SenderConfig{MaxPending: 1})
		_ = s.NotifyTx(t.Context(), tx, "a", "inside")
		time.Sleep(9 * time.Millisecond)
		_ = s.NotifyTx(t.Context(), tx, "a", "outside") // the window is not over
		s.Subscribe("a", func(string) {})
		time.Sleep(time.Millisecond)
		_ = s.NotifyTx(t.Context(), tx, "a", "inside again") // only to wake the subscriber, and there is no room
		time.Sleep(time.Second)
		if len(tx.statements()) != 2 || s.Stats().Collapsed != 1 {
			t.Fatalf("%d statements inside, stats %+v: nothing is shown", len(tx.statements()), s.Stats())
		}
		if got := db.statements(); len(got) == 0 || got[0].notes[0] != "a " || got[0].at != 19*time.Millisecond {
			t.Errorf("statements %+v, want the empty payload a window after it came in", got)
		}
	})
}

// A note that many became is due a window after the last of them, not after the first.
func TestMergedNotificationsKeepTheLatestTime(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, tx := newFakeDB(), newFakeDB()
		s := newSender(t, db, notify.SenderConfig{MaxPending: 2})
		_ = s.NotifyTx(t.Context(), tx, "a", "inside")
		for _, payload := range []string{"1", "2", "3"} { // the third finds the channel full
			time.Sleep(2 * time.Millisecond)
			_ = s.NotifyTx(t.Context(), tx, "a", payload)
		}
		time.Sleep(2 * time.Millisecond) // and one more is merged into the empty payload
		_ = s.NotifyTx(t.Context(), tx, "a", "4")
		time.Sleep(time.Second)
		if st := s.Stats(); len(tx.statements()) != 1 || st.Collapsed != 1 {
			t.Fatalf("stats %+v: nothing is shown", st)
		}
		if diff := cmp.Diff([]int64{12, 22}, db.times()); diff != "" {
			t.Errorf("want statements a window after the first one and after the last one: %s", diff)
		}
		for _, st := range db.statements() {
			if diff := cmp.Diff([]string{"a "}, st.notes); diff != "" {
				t.Error(diff)
			}
		}
	})
}

// A note that was merged stands behind others that came later, and does not wait for them.
func TestMergedNotificationIsNotLate(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, tx := newFakeDB(), newFakeDB()
		s := newSender(t, db, notify.SenderConfig{MaxPending: 1})
		_ = s.NotifyTx(t.Context(), tx, "a", "inside")
		time.Sleep(time.Millisecond)
		_ = s.NotifyTx(t.Context(), tx, "a", "1")
		time.Sleep(5 * time.Millisecond)
		_ = s.NotifyTx(t.Context(), tx, "b", "1")
		_ = s.NotifyTx(t.Context(), tx, "a", "2") // merged with the first, and now behind b
		time.Sleep(time.Second)
		if got := db.statements(); got[0].at != 11*time.Millisecond || got[0].notes[0] != "a " {
			t.Errorf("statements %+v, want the first at 11ms", got)
		}
	})
}

// Subscribers of the process do not need the server.
func TestTransactionNotificationWakesSubscribersWhateverTheServerDoes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, tx := newFakeDB(), newFakeDB()
		db.hook = func(context.Context, int) error { return errors.New("down") }
		s := newSender(t, db, notify.SenderConfig{})
		var woken []string
		s.Subscribe("a", func(p string) { woken = append(woken, p) })
		_ = s.NotifyTx(t.Context(), tx, "a", "inside")
		_ = s.NotifyTx(t.Context(), tx, "a", "outside")
		time.Sleep(time.Minute)
		synctest.Wait()
		if diff := cmp.Diff([]string{"inside", "outside"}, woken); diff != "" {
			t.Error(diff)
		}
		_ = s.Close(t.Context())
	})
}

func TestErrorInsideTheTransactionIsReturned(t *testing.T) {
	t.Parallel()
	db, tx := newFakeDB(), newFakeDB()
	tx.hook = func(context.Context, int) error { return &pgconn.PgError{Code: "25006"} }
	s := newSender(t, db, notify.SenderConfig{})
	var pgErr *pgconn.PgError
	if err := s.NotifyTx(t.Context(), tx, "a", "1"); !errors.As(err, &pgErr) {
		t.Errorf("NotifyTx = %v", err)
	}
}

// What a transaction announces goes out a window later at the earliest: each statement outside carries only what was due by then.
func TestATransactionsNotificationNeverGoesOutBeforeItsWindow(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		const window = 10 * time.Millisecond
		bound := rapid.IntRange(1, 4).Draw(rt, "bound")
		steps := rapid.SliceOfN(rapid.IntRange(0, 30), 1, 60).Draw(rt, "steps")
		synctest.Test(t, func(t *testing.T) {
			db, tx := newFakeDB(), newFakeDB()
			s := newSender(t, db, notify.SenderConfig{Window: window, MaxPending: bound})
			type call struct {
				channel, payload string
				due              time.Duration
			}
			var all []call
			for _, step := range steps {
				switch {
				case step < 20:
					inside := len(tx.statements())
					channel, payload := fmt.Sprint("c", step%2), fmt.Sprint(step)
					if err := s.NotifyTx(t.Context(), tx, channel, payload); err != nil {
						rt.Fatal(err)
					}
					if len(tx.statements()) == inside {
						all = append(all, call{channel, payload, time.Since(db.born) + window})
					}
				default:
					time.Sleep(time.Duration(step-19) * time.Millisecond)
				}
			}
			time.Sleep(time.Second)
			for i, st := range db.statements() {
				for _, n := range st.notes {
					// Some call that it may stand for was due, and was not sent since.
					var before time.Duration = -1
					for _, earlier := range db.statements()[:i] {
						for _, m := range earlier.notes {
							if m == n || m == n[:3] {
								before = earlier.at
							}
						}
					}
					ok := false
					for _, c := range all {
						if (n == c.channel+" "+c.payload || n == c.channel+" ") && c.due <= st.at && c.due > before {
							ok = true
						}
					}
					if !ok {
						rt.Fatalf("%q went out at %v, before what it stands for: %+v; statements %+v", n, st.at, all, db.statements())
					}
				}
			}
		})
	})
}
