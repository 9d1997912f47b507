package notify_test

import (
	"context"
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/notify"
)

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
