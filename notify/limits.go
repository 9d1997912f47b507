package notify

import (
	"fmt"
	"strings"
	"unicode/utf8"
)

const (
	// MaxChannel is the longest channel name in bytes: a name must be shorter than NAMEDATALEN, 64 bytes
	// (PostgreSQL, src/backend/commands/async.c, Async_Notify).
	MaxChannel = 63
	// MaxPayload is the longest payload in bytes: it must be shorter than NOTIFY_PAYLOAD_MAX_LENGTH, which is
	// BLCKSZ - NAMEDATALEN - 128 = 8000 in a server built with the usual block size (same file).
	MaxPayload = 7999
)

// LimitError reports a channel or a payload that PostgreSQL would refuse, found before anything was sent. Get it with
// errors.As.
type LimitError struct {
	Subject string // "channel" or "payload"
	Channel string // the channel concerned, shortened to MaxChannel bytes when it is the one at fault
	Size    int    // size in bytes of what is at fault
	Max     int    // the limit in bytes
	Reason  string // "is empty", "is too long", "is not valid UTF-8" or "contains a zero byte"
}

// Error names the channel and the sizes, never the payload.
func (e *LimitError) Error() string {
	return fmt.Sprintf("notify: %s %s (channel %q, %d bytes, at most %d)", e.Subject, e.Reason, e.Channel, e.Size, e.Max)
}

// CheckChannel returns a *[LimitError] for a channel name that is empty, longer than [MaxChannel] bytes, or not text.
// Any other name is good, upper case and spaces included: this package always quotes.
func CheckChannel(channel string) error {
	reason := notText(channel)
	switch {
	case channel == "":
		reason = "is empty"
	case len(channel) > MaxChannel:
		reason = "is too long"
	case reason == "":
		return nil
	}
	return &LimitError{
		Subject: "channel", Channel: channel[:min(len(channel), MaxChannel)],
		Size: len(channel), Max: MaxChannel, Reason: reason,
	}
}

// CheckPayload returns a *[LimitError] for a payload that is longer than [MaxPayload] bytes or not text. An empty payload
// is good.
func CheckPayload(channel, payload string) error { return checkPayload(channel, payload, MaxPayload) }

func checkPayload(channel, payload string, limit int) error {
	reason := notText(payload)
	if len(payload) > limit {
		reason = "is too long"
	}
	if reason == "" {
		return nil
	}
	return &LimitError{
		Subject: "payload", Channel: channel[:min(len(channel), MaxChannel)],
		Size: len(payload), Max: limit, Reason: reason,
	}
}

// notText finds what would make the server refuse the whole statement (22021) and with it the notifications of every other
// channel in it. Checked here, the fault stays with its caller.
func notText(s string) string {
	switch {
	case strings.IndexByte(s, 0) >= 0:
		return "contains a zero byte"
	case !utf8.ValidString(s):
		return "is not valid UTF-8"
	}
	return ""
}
