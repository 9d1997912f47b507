package outbox

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"regexp"
	"sync"
	"sync/atomic"
	"time"

	"github.com/bounceproof/bounceproof/executor"
)

// WakeUp says how dispatchers in other processes learn that there is something to deliver. Polling goes on either way.
type WakeUp int8

const (
	// WakeUpNotify sends a coalesced NOTIFY after the commit, outside the publishing transaction. It is the default.
	WakeUpNotify WakeUp = iota
	// WakeUpPoll sends nothing: other processes find the events at their next poll.
	WakeUpPoll
)

// Config of a [Store]. The zero value works.
type Config struct {
	// Schema holds the outbox's tables: letters, digits and underscores, not beginning with a digit, at most 63 bytes.
	// Defaults to "outbox". Case counts. It is also the channel of the wake-ups, see [Store.Channel].
	Schema string

	// Lanes is how many lanes the log has, and so how many dispatchers of one subscription can share the work: 1 to 1,024. It is
	// fixed by the first Migrate. 0 takes what the database has, 16 where there is nothing yet; another number than the
	// database's is a [*ConfigMismatchError].
	Lanes int

	// WakeUp defaults to [WakeUpNotify].
	WakeUp WakeUp

	// Retention is how long events stay after they were published, at least until every subscription has them: for new subscriptions
	// and replays. Defaults to 7 days; negative: for ever.
	Retention time.Duration

	// DedupWindow is how long an Event.DedupKey is remembered. Defaults to 7 days; negative: for ever.
	DedupWindow time.Duration

	// Logger defaults to slog.Default(). Payloads and keys are never logged.
	Logger *slog.Logger
}

// Store is an outbox in one schema. Safe for concurrent use.
type Store struct {
	ex                     *executor.Executor
	schema                 string
	configured             int // Config.Lanes
	wakeUp                 WakeUp
	retention, dedupWindow time.Duration // negative: for ever
	log                    *slog.Logger
	sql                    *statements

	lanes    atomic.Int64  // as verified against the database; 0 before
	rotation atomic.Uint64 // of the lanes of unkeyed events
	groups   groups        // of PublishNow

	mu      sync.Mutex // guards running; nothing is called under it
	running map[chan struct{}]struct{}
}

var identifier = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]{0,62}$`)

// New returns a store on an executor. It sends nothing: the tables are checked at the first use. The executor stays the
// caller's. The error names the field of cfg that is wrong. A nil executor panics.
func New(ex *executor.Executor, cfg Config) (*Store, error) {
	if ex == nil {
		panic("outbox: New: nil executor")
	}
	if cfg.Schema == "" {
		cfg.Schema = "outbox"
	}
	if !identifier.MatchString(cfg.Schema) {
		return nil, fmt.Errorf("outbox: Config.Schema %q: want letters, digits and underscores, at most 63", cfg.Schema)
	}
	if cfg.Lanes < 0 || cfg.Lanes > 1024 {
		return nil, fmt.Errorf("outbox: Config.Lanes %d: want 1 to 1,024, or 0 for the default", cfg.Lanes)
	}
	if cfg.WakeUp != WakeUpNotify && cfg.WakeUp != WakeUpPoll {
		return nil, fmt.Errorf("outbox: Config.WakeUp %d: unknown", cfg.WakeUp)
	}
	if cfg.Retention == 0 {
		cfg.Retention = 7 * 24 * time.Hour
	}
	if cfg.DedupWindow == 0 {
		cfg.DedupWindow = 7 * 24 * time.Hour
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	s := &Store{
		ex: ex, schema: cfg.Schema, configured: cfg.Lanes, wakeUp: cfg.WakeUp,
		retention: cfg.Retention, dedupWindow: cfg.DedupWindow, log: cfg.Logger,
		sql: statementsFor(cfg.Schema), running: make(map[chan struct{}]struct{}),
	}
	s.groups.send, s.groups.locks = s.publishGroup, make(map[int64]struct{})
	s.rotation.Store(rand.Uint64()) // processes that start together do not fill the same lane
	return s, nil
}

// Channel is the NOTIFY channel of the store's wake-ups: the schema's name. Register dispatchers for it with a
// notify.Listener.
func (s *Store) Channel() string { return s.schema }

// Wake tells dispatchers to look for events now: those of this store in this process directly, others by NOTIFY unless
// Config.WakeUp is [WakeUpPoll]. It never blocks and is coalesced. Only a transaction that is no [executor.Tx] needs it, after its
// commit.
func (s *Store) Wake() {
	s.wakeLocal()
	if s.wakeUp == WakeUpNotify {
		_ = s.ex.Notify(s.Channel(), "") // it refuses only names that New refuses too
	}
}

func (s *Store) wakeLocal() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.running {
		select {
		case c <- struct{}{}:
		default: // it has a wake-up waiting
		}
	}
}

// listen registers a channel of capacity one for wake-ups, until the returned function is called.
func (s *Store) listen(c chan struct{}) (stop func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.running[c] = struct{}{}
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.running, c)
	}
}
