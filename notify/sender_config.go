package notify

import (
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
)

const (
	defaultWindow = 10 * time.Millisecond
	// minPause is the shortest window, and the wait before another attempt where everything else that paces is off.
	minPause = time.Millisecond
)

// SenderConfig configures a [Sender]. The zero value is good. A duration of 0 means the default, a negative one off.
type SenderConfig struct {
	// Window is the least time between the starts of two statements, so a process makes at most one notifying commit per
	// window however much it publishes. A lone notification does not wait for it. Defaults to 10ms; at least 1ms. Negative
	// means none: a statement starts as soon as the one before it has ended, with all that came in meanwhile, and
	// [Sender.NotifyTx] notifies inside every transaction.
	Window time.Duration

	// MaxStretch bounds how much longer than Window the wait between two statements becomes when the server, the network
	// or the pool is slow for some time: nineteen times what the quickest of the last eight statements took, so that
	// notifying is a twentieth of the time at most. It is what keeps a server with many listeners, all of which a
	// notifying commit wakes, from spending itself on them. Defaults to 100ms; negative means no stretching.
	MaxStretch time.Duration

	// MaxPayload is the longest payload accepted, in bytes. Defaults to [MaxPayload], which it cannot exceed.
	MaxPayload int

	// MaxPending is how many distinct payloads of one channel may wait. One more and they become a single empty payload,
	// which means "anything on this channel may have changed". Defaults to 1000.
	MaxPending int

	// Timeout bounds one statement, the wait for a connection included. Defaults to 5s; negative means none.
	Timeout time.Duration

	// RetryMax bounds the wait before a failed statement is tried again: exponential from 100ms, with full jitter.
	// Defaults to 5s. Close and Flush cut the wait short. Negative means no such wait: a failed statement is tried again
	// after the window, or after 1ms if that is off too.
	RetryMax time.Duration

	// Options are put in front of the arguments of the sender's own statements, in the manner of pgx. nil means pgx.QueryExecModeExec, which
	// needs no prepared statement and so works behind every pooler; an executor passes prepare.Stable. Use an empty,
	// non-nil slice for none.
	Options []any

	// Logger gets one warning when sending starts to fail and one information when it works again, and one warning for the
	// first notification that the server refuses. It never sees a payload. Defaults to slog.Default().
	Logger *slog.Logger
}

// resolve returns c with its defaults filled in and 0 for every duration that is off, or an error that names the field.
func (c SenderConfig) resolve() (SenderConfig, error) {
	for _, d := range []struct {
		field    *time.Duration
		byItself time.Duration
	}{
		{&c.Window, defaultWindow},
		{&c.MaxStretch, 100 * time.Millisecond},
		{&c.Timeout, 5 * time.Second},
		{&c.RetryMax, 5 * time.Second},
	} {
		if *d.field == 0 {
			*d.field = d.byItself
		}
		*d.field = max(*d.field, 0)
	}
	if c.MaxPayload == 0 {
		c.MaxPayload = MaxPayload
	}
	if c.MaxPending == 0 {
		c.MaxPending = 1000
	}
	if c.Options == nil {
		c.Options = []any{pgx.QueryExecModeExec}
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	switch {
	case c.Window > 0 && c.Window < minPause:
		return c, fmt.Errorf("notify: configure sender: Window is %v, must be at least %v, or negative", c.Window, minPause)
	case c.MaxPayload < 0 || c.MaxPayload > MaxPayload:
		return c, fmt.Errorf("notify: configure sender: MaxPayload is %d, must be at most %d", c.MaxPayload, MaxPayload)
	case c.MaxPending < 1:
		return c, fmt.Errorf("notify: configure sender: MaxPending is %d, must be at least 1", c.MaxPending)
	}
	return c, nil
}
