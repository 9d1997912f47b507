package notify_test

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/bounceproof/bounceproof/notify"
)

// What a statement takes longer because it notifies is what waking listeners costs, and makes it be sent less often; what it takes
// anyway, by the network or a busy pool, does as little as before.
func TestWakingManyStretchesTheWindowMore(t *testing.T) {
	t.Parallel()
	const ms, us = time.Millisecond, time.Microsecond
	for _, c := range []struct {
		anyway, notifying time.Duration
		want              time.Duration // between the starts of two that notify
		compares          bool
	}{
		{anyway: 0, notifying: 0, want: 10 * ms},
		{anyway: 500 * us, notifying: 0, want: 10 * ms},
		{anyway: 500 * us, notifying: 500 * us, want: 1*ms + 59*500*us, compares: true},
		{anyway: 500 * us, notifying: 1500 * us, want: 2*ms + 59*1500*us, compares: true},
		{anyway: 500 * us, notifying: 4 * ms, want: 4500*us + 100*ms, compares: true},
		{anyway: 3 * ms, notifying: 0, want: 3*ms + 19*3*ms, compares: true},
		{anyway: 3 * ms, notifying: 500 * us, want: 3500*us + 19*3500*us, compares: true},
	} {
		t.Run(fmt.Sprint(c.anyway, " and ", c.notifying), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db := newFakeDB()
				db.hook = func(_ context.Context, n int) error {
					time.Sleep(c.anyway)
					if len(db.statements()[n-1].notes) > 0 {
						time.Sleep(c.notifying)
					}
					return nil
				}
				s := newSender(t, db, notify.SenderConfig{})
				for range 25_000 {
					notifyAll(t, s, "a", "1")
					time.Sleep(ms)
				}
				var at []time.Duration // when notifying statements began
				silent := 0
				for _, st := range db.statements() {
					if len(st.notes) == 0 {
						silent++
						continue
					}
					at = append(at, st.at)
				}
				if got := at[40] - at[39]; got < c.want || got > c.want+ms {
					t.Errorf("statements %v apart, want %v", got, c.want)
				}
				if silent > 3 || (silent > 0) != c.compares {
					t.Errorf("%d statements that notify nobody in 25s", silent)
				}
				time.Sleep(time.Minute)
				n, start := len(db.statements()), time.Now()
				for range 30 { // none of them waits, so there is nothing to compare
					notifyAll(t, s, "a", "lone")
					synctest.Wait()
					if got := db.statements(); len(got) != n+1 || len(got[n].notes) == 0 || time.Since(db.born)-got[n].at > 0 {
						t.Errorf("a lone notification waited, or something else was sent: %d statements after %v", len(got)-n, time.Since(start))
					}
					n++
					time.Sleep(time.Second)
				}
				if err := s.Close(t.Context()); err != nil {
					t.Fatal(err)
				}
			})
		})
	}
}
