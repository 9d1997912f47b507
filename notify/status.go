package notify

import (
	"strconv"
	"time"
)

// State is what a [Listener] knows about the delivery of notifications.
type State int8

const (
	// Unknown: nothing is proven now. Run is not under way, the server has not answered yet, or no note could be sent for the
	// latest heartbeat, in which case the connection is kept and may well be good. Handlers are polled at PollInterval.
	Unknown State = iota
	// Proven: a note that another session sent, not longer ago than Heartbeat and HeartbeatTimeout together, came through LISTEN; it was
	// sent on the way of the pool, or that way has since been seen to lead where it came from; and the server has answered LISTEN for
	// every channel of this listener.
	Proven
	// Isolated: the server can be reached but notifications do not arrive, or LISTEN is refused. Handlers are polled.
	Isolated
	// Disconnected: there is no connection. Handlers are polled.
	Disconnected
)

// String returns the state in lower case.
func (s State) String() string {
	switch s {
	case Unknown:
		return "unknown"
	case Proven:
		return "proven"
	case Isolated:
		return "isolated"
	case Disconnected:
		return "disconnected"
	}
	return "State(" + strconv.Itoa(int(s)) + ")"
}

// Status is a snapshot of a [Listener] and of the connection it may share with others. The state is the listener's, with its reason; all
// else is the connection's. The counters only grow, and count for all that share the connection.
type Status struct {
	State     State
	Reason    string        // why, in words, on one line; empty while all is well
	Since     time.Time     // of the state
	LastProof time.Time     // when delivery was last proven
	ProofTime time.Duration // how long the latest note of its own took
	Pooled    bool          // the connection goes through a pooler: the pid it was given is not the server's

	Connects int64 // connections opened to listen on
	Losses   int64 // of those, lost
	Proofs   int64 // notes that proved delivery, its own and those of other listeners of the database
	Received int64 // notifications that a handler is registered for
	Ignored  int64 // notifications that no handler is registered for
	Merged   int64 // times a channel's waiting payloads became one empty payload
}
