package notify_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/notify"
)

// statement is one Exec that a fakeDB saw.
type statement struct {
	at    time.Duration // since the fakeDB was made
	sql   string
	notes []string // "channel payload" in the order sent
	args  []any
}

// fakeDB records statements. It takes no time unless told to.
type fakeDB struct {
	born time.Time
	hook func(ctx context.Context, n int) error // called for the n-th statement, counted from 1

	mu   sync.Mutex
	seen []statement
}

func newFakeDB() *fakeDB { return &fakeDB{born: time.Now()} }

func (db *fakeDB) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	st := statement{at: time.Since(db.born), sql: sql, args: args}
	switch last := args[len(args)-1].(type) {
	case []string:
		for i, channel := range args[len(args)-2].([]string) {
			st.notes = append(st.notes, channel+" "+last[i])
		}
	case string:
		st.notes = []string{args[len(args)-2].(string) + " " + last}
	}
	db.mu.Lock()
	db.seen = append(db.seen, st)
	n := len(db.seen)
	db.mu.Unlock()
	if db.hook != nil {
		if err := db.hook(ctx, n); err != nil {
			return pgconn.CommandTag{}, err
		}
	}
	return pgconn.NewCommandTag("SELECT 1"), nil
}

func (db *fakeDB) statements() []statement {
	db.mu.Lock()
	defer db.mu.Unlock()
	return slices.Clone(db.seen)
}

// times returns when the statements ran, in milliseconds.
func (db *fakeDB) times() []int64 {
	var ms []int64
	for _, st := range db.statements() {
		ms = append(ms, st.at.Milliseconds())
	}
	return ms
}

func newSender(t *testing.T, db notify.Execer, cfg notify.SenderConfig) *notify.Sender {
	t.Helper()
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	s, err := notify.NewSender(db, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func notifyAll(t *testing.T, s *notify.Sender, channel string, payloads ...string) {
	t.Helper()
	for _, p := range payloads {
		if err := s.Notify(channel, p); err != nil {
			t.Fatalf("Notify(%q) = %v", channel, err)
		}
	}
}

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

func TestLimitsAreTypedErrorsAndNothingIsSent(t *testing.T) {
	t.Parallel()
	db := newFakeDB()
	s := newSender(t, db, notify.SenderConfig{MaxPayload: 100})
	for _, c := range []struct{ channel, payload, subject, reason string }{
		{"", "", "channel", "is empty"},
		{strings.Repeat("c", 64), "", "channel", "is too long"},
		{"a\x00b", "", "channel", "contains a zero byte"},
		{"a\xffb", "", "channel", "is not valid UTF-8"},
		{"a", strings.Repeat("p", 101), "payload", "is too long"},
		{"a", "\x00", "payload", "contains a zero byte"},
		{"a", "\xff", "payload", "is not valid UTF-8"},
	} {
		err := s.Notify(c.channel, c.payload)
		var limit *notify.LimitError
		if !errors.As(err, &limit) || limit.Subject != c.subject || limit.Reason != c.reason {
			t.Errorf("Notify(%.10q, %.10q) = %v, want %s %s", c.channel, c.payload, err, c.subject, c.reason)
		}
		if errTx := s.NotifyTx(t.Context(), db, c.channel, c.payload); errTx == nil || errTx.Error() != err.Error() {
			t.Errorf("NotifyTx = %v, want %v", errTx, err)
		}
	}
	if len(db.statements()) != 0 {
		t.Error("something was sent")
	}
	if err := notify.CheckPayload("a", strings.Repeat("p", notify.MaxPayload)); err != nil {
		t.Error(err)
	}
	if err := notify.CheckPayload("a", strings.Repeat("p", notify.MaxPayload+1)); err == nil {
		t.Error("a payload of 8000 bytes passed")
	}
	if err := notify.CheckChannel(strings.Repeat("c", notify.MaxChannel)); err != nil {
		t.Error(err)
	}
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

func TestCloseDrainsThenRefuses(t *testing.T) {
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

func TestOptionsLeadTheArguments(t *testing.T) {
	t.Parallel()
	marker := pgx.QueryResultFormats{1}
	for name, c := range map[string]struct {
		options []any
		want    []any
	}{
		"default": {nil, []any{pgx.QueryExecModeExec}},
		"own":     {[]any{marker}, []any{marker}},
		"none":    {[]any{}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newFakeDB()
			s := newSender(t, db, notify.SenderConfig{Options: c.options})
			notifyAll(t, s, "a", "1")
			if err := s.Close(t.Context()); err != nil {
				t.Fatal(err)
			}
			want := append(slices.Clone(c.want), []string{"a"}, []string{"1"})
			if got := db.statements()[0].args; !reflect.DeepEqual(got, want) {
				t.Errorf("args %v, want %v", got, want)
			}
		})
	}
}

func TestSenderConfigIsChecked(t *testing.T) {
	t.Parallel()
	for field, cfg := range map[string]notify.SenderConfig{
		"Window":     {Window: time.Microsecond},
		"MaxPayload": {MaxPayload: 8000},
		"MaxPending": {MaxPending: -1},
	} {
		if _, err := notify.NewSender(newFakeDB(), cfg); err == nil || !strings.Contains(err.Error(), field) {
			t.Errorf("%s: %v", field, err)
		}
	}
}

func TestNegativeDurationsMeanOff(t *testing.T) {
	t.Parallel()
	t.Run("Window", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			db, tx := newFakeDB(), newFakeDB()
			db.hook = func(context.Context, int) error { time.Sleep(2 * time.Millisecond); return nil }
			s := newSender(t, db, notify.SenderConfig{Window: -1, MaxStretch: -1})
			notifyAll(t, s, "a", "1")
			synctest.Wait() // under way
			notifyAll(t, s, "a", "2", "3", "2")
			time.Sleep(time.Second)
			if diff := cmp.Diff([]int64{0, 2}, db.times()); diff != "" {
				t.Errorf("what came in during a statement did not go out by the next, at once: %s", diff)
			}
			for range 3 {
				if err := s.NotifyTx(t.Context(), tx, "a", "4"); err != nil {
					t.Fatal(err)
				}
			}
			if n := len(tx.statements()); n != 3 || s.Stats().InTx != 3 {
				t.Errorf("%d of 3 transactions carry their notification", n)
			}
			// A transaction still has time to commit before subscribers look.
			woken := make(chan time.Duration, 1)
			start := time.Now()
			s.Subscribe("b", func(string) { woken <- time.Since(start) })
			if err := s.NotifyTx(t.Context(), tx, "b", ""); err != nil {
				t.Fatal(err)
			}
			if after := <-woken; after != 10*time.Millisecond {
				t.Errorf("woken after %v", after)
			}
		})
	})
	t.Run("RetryMax", func(t *testing.T) {
		t.Parallel()
		for window, want := range map[time.Duration][]int64{0: {0, 10, 20, 30}, -1: {0, 1, 2, 3}} {
			synctest.Test(t, func(t *testing.T) {
				db := newFakeDB()
				db.hook = func(_ context.Context, n int) error {
					if n < 4 {
						return errors.New("down")
					}
					return nil
				}
				s := newSender(t, db, notify.SenderConfig{Window: window, RetryMax: -1})
				notifyAll(t, s, "a", "1")
				time.Sleep(time.Second)
				if diff := cmp.Diff(want, db.times()); diff != "" {
					t.Errorf("window %v: %s", window, diff)
				}
			})
		}
	})
	t.Run("Timeout", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			db := newFakeDB()
			db.hook = func(ctx context.Context, _ int) error {
				if _, ok := ctx.Deadline(); ok {
					t.Error("there is a deadline")
				}
				return nil
			}
			s := newSender(t, db, notify.SenderConfig{Timeout: -1})
			notifyAll(t, s, "a", "1")
			time.Sleep(time.Second)
		})
	})
}

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
