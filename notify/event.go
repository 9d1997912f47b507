package notify

import (
	"context"
	"strconv"
)

// Kind says why a [Handler] is called.
type Kind int8

const (
	// Notified: a notification arrived, from the server or straight from a [Sender] of this process.
	Notified Kind = iota + 1
	// Polled: nothing was heard; it is simply time to look. Polling is the contract, a notification only a hint.
	Polled
	// Resynced: the channel is being listened on from now on, after a first connection or a lost one, or delivery is proven again after
	// a time in which it was not. The LISTEN was committed before this event, so whoever looks now and handles what comes
	// later misses nothing.
	Resynced
)

// String returns the kind in lower case.
func (k Kind) String() string {
	switch k {
	case Notified:
		return "notified"
	case Polled:
		return "polled"
	case Resynced:
		return "resynced"
	}
	return "Kind(" + strconv.Itoa(int(k)) + ")"
}

// Event is one call to look at what a channel stands for.
type Event struct {
	// Channel is the channel the handler was registered for.
	Channel string
	// Payload is what the notifier passed. It is empty for Polled and Resynced, and for a Notified that stands for more
	// payloads than were kept: an empty payload always means "anything on this channel may have changed".
	Payload string
	// Kind says why.
	Kind Kind
}

// Handler handles the events of one channel. Calls by one registration are serial; those of different channels, and of several
// handlers of one channel, run side by side. A slow handler delays nobody else: while it runs, what arrives for it waits, each
// payload once and not more than MaxPending. A payload that arrives during the call for the same payload is delivered once
// more. A poll that is due goes before the payloads, so it is late by one call at most.
//
// A handler that panics, or calls runtime.Goexit, ends the program.
//
// ctx is done when the listener's Run is told to stop; Run waits for the handler to return.
type Handler interface {
	HandleEvent(ctx context.Context, e Event)
}

// HandlerFunc is a function as a [Handler].
type HandlerFunc func(ctx context.Context, e Event)

// HandleEvent calls f.
func (f HandlerFunc) HandleEvent(ctx context.Context, e Event) { f(ctx, e) }
