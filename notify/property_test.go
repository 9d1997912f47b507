package notify_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/bounceproof/bounceproof/notify"
)

// Whatever the order of publishers, transactions, failures, slow statements and pauses: each notification, or an empty
// payload on its channel, goes out by a statement that started after it came in (a window after it, if it came from a
// transaction that did not carry it), and statements keep their distance.
func TestEveryNotificationIsFollowedByAStatement(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		window := time.Duration(rapid.IntRange(1, 20).Draw(rt, "window")) * time.Millisecond
		bound := rapid.IntRange(1, 8).Draw(rt, "bound")
		steps := rapid.SliceOfN(rapid.IntRange(0, 9), 1, 80).Draw(rt, "steps")
		payloads := rapid.SliceOfN(rapid.IntRange(0, 12), len(steps), len(steps)).Draw(rt, "payloads")
		synctest.Test(t, func(t *testing.T) {
			db, tx := newFakeDB(), newFakeDB()
			var failing, slow bool
			failed := map[int]bool{}
			db.hook = func(_ context.Context, n int) error {
				db.mu.Lock()
				fail, wait := failing, slow
				failed[n-1] = fail
				db.mu.Unlock()
				if wait {
					time.Sleep(3 * window)
				}
				if fail {
					return errors.New("down")
				}
				return nil
			}
			s := newSender(t, db, notify.SenderConfig{Window: window, MaxPending: bound, RetryMax: 50 * time.Millisecond})
			type call struct {
				channel, payload string
				after            time.Duration
			}
			var all []call
			for i, step := range steps {
				channel, payload := fmt.Sprint("c", payloads[i]%3), fmt.Sprint(payloads[i])
				now := time.Since(db.born)
				switch step {
				case 0, 1, 2, 3:
					notifyAll(t, s, channel, payload)
					all = append(all, call{channel, payload, now})
				case 4, 5:
					inside := len(tx.statements())
					if err := s.NotifyTx(t.Context(), tx, channel, payload); err != nil {
						rt.Fatal(err)
					}
					if len(tx.statements()) == inside {
						all = append(all, call{channel, payload, now + window})
					}
				case 6:
					db.mu.Lock()
					failing = !failing
					db.mu.Unlock()
				case 7:
					db.mu.Lock()
					slow = !slow
					db.mu.Unlock()
				case 8:
					time.Sleep(window / 3)
				case 9:
					time.Sleep(time.Duration(payloads[i]) * window / 2)
				}
			}
			db.mu.Lock()
			failing = false
			db.mu.Unlock()
			time.Sleep(10 * time.Second)

			got := db.statements()
			for _, n := range all {
				found := false
				for i, st := range got {
					for _, sent := range st.notes {
						if (sent == n.channel+" "+n.payload || sent == n.channel+" ") && st.at >= n.after && !failed[i] {
							found = true
						}
					}
				}
				if !found {
					rt.Fatalf("%+v did not go out; statements %+v", n, got)
				}
			}
			for i := 1; i < len(got); i++ {
				if d := got[i].at - got[i-1].at; d < window {
					rt.Fatalf("statements %v apart, the window is %v", d, window)
				}
			}
			if st := s.Stats(); st.Pending != 0 || st.Dropped != 0 {
				rt.Fatalf("stats %+v", st)
			}
		})
	})
}

// A channel or payload that passes the checks is one that PostgreSQL takes.
func TestLimitsAreThoseOfTheServer(t *testing.T) {
	t.Parallel()
	everyPostgres(t, checkLimits)
}
