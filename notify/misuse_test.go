package notify_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/internal/pgscript"
	"github.com/bounceproof/bounceproof/notify"
)

func TestSecondRunIsAnError(t *testing.T) {
	virtual(t, notify.ListenerConfig{}, func(t *testing.T, pg *scripted, l *listening) {
		l.must(t, notify.Proven)
		if err := l.Run(t.Context()); !errors.Is(err, notify.ErrRunning) {
			t.Errorf("Run = %v", err)
		}
		pg.Notify("news", "undisturbed")
		synctest.Wait()
		if !l.heard("undisturbed") {
			t.Error("the first Run was disturbed")
		}
	})
}

func TestMisusePanics(t *testing.T) {
	t.Parallel()
	pg := newScripted(t, pgscript.Options{})
	fresh := func() *notify.Listener {
		l, err := notify.NewListener(pg, notify.ListenerConfig{})
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	h := notify.HandlerFunc(func(context.Context, notify.Event) {})
	done, cancel := context.WithCancel(context.Background())
	cancel()
	for want, f := range map[string]func(){
		"notify: NewListener: nil pool":                   func() { _, _ = notify.NewListener(nil, notify.ListenerConfig{}) },
		"notify: NewSender: nil db":                       func() { _, _ = notify.NewSender(nil, notify.SenderConfig{}) },
		"notify: Handle: nil handler for channel a":       func() { fresh().Handle("a", nil) },
		"notify: channel is too long":                     func() { fresh().Handle(strings.Repeat("x", 64), h) },
		"notify: Handle: called after Run, for channel a": func() { l := fresh(); _ = l.Run(done); l.Handle("a", h) },
	} {
		func() {
			defer func() {
				if text, _ := recover().(string); !strings.HasPrefix(text, want) {
					t.Errorf("panic %q, want %q", text, want)
				}
			}()
			f()
		}()
	}
}

// No piece of a password is repeated, not even where it is not where passwords stand.
func TestAConnectionStringIsNotRepeated(t *testing.T) {
	t.Parallel()
	for _, direct := range []string{
		"host=h password=my secret dbname=x", "host=h password='secret", "postgres://user:x@secret@host/db", "postgres://user:x/secret@host/db",
		"host=h password = secret sslmode=nope", "user:secret host/db", "postgres://user:secret%zz@host/db", "postgres://user:secret@host/db?sslmode=secret",
	} {
		_, err := notify.NewListener(newScripted(t, pgscript.Options{}), notify.ListenerConfig{Direct: direct})
		if err == nil || !strings.Contains(err.Error(), "Direct") || strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: %v", direct, err)
		}
	}
	good := notify.ListenerConfig{Direct: "postgres://user:p%40ss@host/db"} // the control
	if _, err := notify.NewListener(newScripted(t, pgscript.Options{}), good); err != nil {
		t.Error(err)
	}
}

func TestListenerConfigIsChecked(t *testing.T) {
	t.Parallel()
	for field, cfg := range map[string]notify.ListenerConfig{
		"Direct":           {Direct: "postgres://user:secret@host:port/db"},
		"without Direct":   {DirectBeforeConnect: func(context.Context, *pgx.ConnConfig) error { return nil }},
		"HeartbeatTimeout": {HeartbeatTimeout: -1},
		"ReconnectMin is":  {ReconnectMin: -1},
		"ReconnectMax":     {ReconnectMin: time.Minute, ReconnectMax: time.Second},
		"MaxPending":       {MaxPending: -1},
	} {
		_, err := notify.NewListener(newScripted(t, pgscript.Options{}), cfg)
		if err == nil || !strings.Contains(err.Error(), field) || strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: %v", field, err)
		}
	}
}
