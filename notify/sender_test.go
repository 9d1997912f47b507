package notify_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/notify"
)

func TestLoneNotificationGoesOutAtOnceAndLeavesNoWorker(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newFakeDB()
		s := newSender(t, db, notify.SenderConfig{})
		for range 3 {
			notifyAll(t, s, "a", "1")
			synctest.Wait() // nothing here advances the clock: the statement ran in no time
			time.Sleep(time.Second)
		}
		if diff := cmp.Diff([]int64{0, 1000, 2000}, db.times()); diff != "" {
			t.Error(diff)
		}
		// The bubble would not end with a worker in it; this is the proof that none is left, for nothing closed s.
	})
}

func TestWindowHasALeadingAndATrailingEdge(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newFakeDB()
		s := newSender(t, db, notify.SenderConfig{})
		notifyAll(t, s, "a", "1")
		synctest.Wait()
		time.Sleep(3 * time.Millisecond)
		notifyAll(t, s, "a", "2", "3", "2")
		notifyAll(t, s, "b", "2")
		time.Sleep(time.Second)
		got := db.statements()
		if len(got) != 2 {
			t.Fatalf("%d statements, want one for each edge: %v", len(got), db.times())
		}
		if got[0].at != 0 || got[1].at != 10*time.Millisecond {
			t.Errorf("statements at %v and %v, want 0s and 10ms", got[0].at, got[1].at)
		}
		if diff := cmp.Diff([]string{"a 2", "a 3", "b 2"}, got[1].notes); diff != "" {
			t.Errorf("trailing edge: %s", diff)
		}
		st := s.Stats()
		if st.Accepted != 5 || st.Coalesced != 1 || st.Sent != 4 || st.Statements != 2 || st.Pending != 0 {
			t.Errorf("stats %+v", st)
		}
	})
}

func TestAtMostAHundredStatementsASecondAtAnyRate(t *testing.T) {
	t.Parallel()
	for _, every := range []time.Duration{100 * time.Microsecond, time.Millisecond, 7 * time.Millisecond} {
		t.Run(every.String(), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db := newFakeDB()
				s := newSender(t, db, notify.SenderConfig{})
				for i := range int(10 * time.Second / every) {
					notifyAll(t, s, "a", fmt.Sprint(i%50))
					time.Sleep(every)
				}
				if err := s.Close(t.Context()); err != nil {
					t.Fatal(err)
				}
				times := db.statements()
				for i, st := range times { // every second, wherever it starts
					j := i
					for j < len(times) && times[j].at < st.at+time.Second {
						j++
					}
					if j-i > 100 {
						t.Fatalf("%d statements in the second from %v", j-i, st.at)
					}
				}
				// The control: the bound is reached, so it is the window that holds it.
				if every < 10*time.Millisecond && len(times) < 700 {
					t.Errorf("only %d statements in 10s", len(times))
				}
			})
		})
	}
}

func TestSlowServerMeansFewerStatementsNotMoreAtOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newFakeDB()
		var inFlight, most int
		db.hook = func(context.Context, int) error {
			db.mu.Lock()
			inFlight++
			most = max(most, inFlight)
			db.mu.Unlock()
			time.Sleep(250 * time.Millisecond)
			db.mu.Lock()
			inFlight--
			db.mu.Unlock()
			return nil
		}
		s := newSender(t, db, notify.SenderConfig{})
		for i := range 1000 {
			notifyAll(t, s, "a", fmt.Sprint(i%10))
			time.Sleep(time.Millisecond)
		}
		if err := s.Flush(t.Context()); err != nil {
			t.Fatal(err)
		}
		if most != 1 {
			t.Errorf("%d statements at once", most)
		}
		if n := len(db.statements()); n > 6 {
			t.Errorf("%d statements in a second of 250ms each", n)
		}
	})
}

func TestOneSlowStatementDoesNotStretchTheWindow(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newFakeDB()
		db.hook = func(_ context.Context, n int) error {
			if n%8 == 0 {
				time.Sleep(40 * time.Millisecond)
			}
			return nil
		}
		s := newSender(t, db, notify.SenderConfig{})
		for range 1000 {
			notifyAll(t, s, "a", "1")
			time.Sleep(time.Millisecond)
		}
		got := db.times()
		for i := 1; i < len(got); i++ {
			if d := got[i] - got[i-1]; d > 41 {
				t.Errorf("statements %dms apart", d)
			}
		}
		if err := s.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
	})
}

// A statement that takes long costs the server, and whoever shares the pool: it is sent less often, within bounds.
func TestSlowStatementsStretchTheWindow(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		takes, stretch time.Duration
		want           int64 // between the starts, in milliseconds
	}{
		{0, 0, 10},
		{500 * time.Microsecond, 0, 10},
		{3 * time.Millisecond, 0, 60},
		{50 * time.Millisecond, 0, 150},
		{50 * time.Millisecond, 20 * time.Millisecond, 70},
		{3 * time.Millisecond, -1, 10},
	} {
		t.Run(fmt.Sprint(c.takes, c.stretch), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db := newFakeDB()
				db.hook = func(context.Context, int) error { time.Sleep(c.takes); return nil }
				s := newSender(t, db, notify.SenderConfig{MaxStretch: c.stretch})
				for range 2000 {
					notifyAll(t, s, "a", "1")
					time.Sleep(time.Millisecond)
				}
				got := db.times()
				if d := got[12] - got[11]; d != c.want {
					t.Errorf("statements %dms apart, want %dms", d, c.want)
				}
				time.Sleep(time.Second)
				n := len(db.times())
				start := time.Now()
				notifyAll(t, s, "a", "lone") // a lone one goes out at once all the same
				synctest.Wait()
				if len(db.times()) != n+1 || time.Since(start) != 0 {
					t.Error("a lone notification waited")
				}
				if err := s.Close(t.Context()); err != nil {
					t.Fatal(err)
				}
			})
		})
	}
}

func TestNotifyNeverWaitsForTheServer(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newFakeDB()
		db.hook = func(ctx context.Context, _ int) error { <-ctx.Done(); return ctx.Err() }
		s := newSender(t, db, notify.SenderConfig{Timeout: time.Hour, MaxPending: 10})
		start := time.Now()
		for i := range 1000 {
			notifyAll(t, s, "a", fmt.Sprint(i))
			synctest.Wait()
		}
		if took := time.Since(start); took != 0 {
			t.Errorf("1000 notifications took %v with the server hanging", took)
		}
		if p := s.Stats().Pending; p > 11 {
			t.Errorf("%d notifications are kept, the bound is 10", p)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := s.Close(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Close = %v, want the deadline", err)
		}
		time.Sleep(5 * time.Second) // the bubble ends only when the statement has
	})
}

func TestFullChannelBecomesOneEmptyPayloadAndOthersKeepTheirs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newFakeDB()
		s := newSender(t, db, notify.SenderConfig{MaxPending: 3})
		notifyAll(t, s, "lead", "x")
		synctest.Wait()
		notifyAll(t, s, "calm", "1", "2")
		notifyAll(t, s, "busy", "1", "2", "3", "4", "5")
		if err := s.Flush(t.Context()); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff([]string{"calm 1", "calm 2", "busy "}, db.statements()[1].notes); diff != "" {
			t.Error(diff)
		}
		if n := s.Stats().Collapsed; n != 1 {
			t.Errorf("Collapsed = %d, want 1", n)
		}
		notifyAll(t, s, "busy", "6") // the detail is back with the next statement
		if err := s.Flush(t.Context()); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff([]string{"busy 6"}, db.statements()[2].notes); diff != "" {
			t.Error(diff)
		}
	})
}

func TestQueueIsBoundedInBytes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newFakeDB()
		s := newSender(t, db, notify.SenderConfig{})
		notifyAll(t, s, "lead", "x")
		synctest.Wait()
		big := strings.Repeat("x", 7900)
		for i := range 900 { // 7 MB of distinct payloads
			notifyAll(t, s, fmt.Sprint("c", i%3), fmt.Sprint(big, i))
		}
		if err := s.Flush(t.Context()); err != nil {
			t.Fatal(err)
		}
		size := 0
		for _, n := range db.statements()[1].notes {
			size += len(n)
		}
		if size > 1<<20 {
			t.Errorf("a statement of %d bytes", size)
		}
		if s.Stats().Collapsed == 0 {
			t.Error("nothing was merged: the test shows nothing")
		}
	})
}

func TestFailureIsRetriedMergedCountedAndLoggedOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newFakeDB()
		full := &pgconn.PgError{Code: "54000", Message: "too many notifications in the NOTIFY queue"}
		db.hook = func(_ context.Context, n int) error {
			if n <= 4 {
				return full
			}
			return nil
		}
		var log bytes.Buffer
		s := newSender(t, db, notify.SenderConfig{Logger: slog.New(slog.NewTextHandler(&log, nil))})
		notifyAll(t, s, "a", "secret-1")
		synctest.Wait()
		notifyAll(t, s, "a", "secret-2", "secret-1")
		if !errors.As(s.Stats().LastError, new(*pgconn.PgError)) {
			t.Errorf("LastError = %v", s.Stats().LastError)
		}
		time.Sleep(30 * time.Second)
		got := db.statements()
		if len(got) != 5 {
			t.Fatalf("%d statements, want four failures and a success", len(got))
		}
		if diff := cmp.Diff([]string{"a secret-1", "a secret-2"}, got[4].notes); diff != "" {
			t.Error(diff)
		}
		st := s.Stats()
		if st.Failures != 4 || st.Statements != 1 || st.Sent != 2 || st.Dropped != 0 || st.LastError != nil {
			t.Errorf("stats %+v", st)
		}
		if n := strings.Count(log.String(), "level=WARN"); n != 1 {
			t.Errorf("%d warnings:\n%s", n, log.String())
		}
		if n := strings.Count(log.String(), "level=INFO"); n != 1 {
			t.Errorf("%d informations:\n%s", n, log.String())
		}
		if strings.Contains(log.String(), "secret") {
			t.Errorf("a payload was logged:\n%s", log.String())
		}
	})
}

func TestSubscribersAreWokenDirectly(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newFakeDB()
		db.hook = func(context.Context, int) error { return errors.New("down") }
		s := newSender(t, db, notify.SenderConfig{})
		var got []string
		cancel := s.Subscribe("a", func(p string) { got = append(got, "first "+p) })
		s.Subscribe("a", func(p string) { got = append(got, "second "+p) })
		notifyAll(t, s, "a", "1")
		notifyAll(t, s, "b", "1")
		cancel()
		cancel()
		notifyAll(t, s, "a", "2")
		if diff := cmp.Diff([]string{"first 1", "second 1", "second 2"}, got); diff != "" {
			t.Error(diff)
		}
		_ = s.Close(t.Context())
	})
}
