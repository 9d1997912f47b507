package outbox

import (
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"iter"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

// MaxKeys is how many distinct keys one transaction may publish under, all that is open or committed within it included; where the
// transaction is no executor.Tx, one call. Each takes an advisory lock until the transaction ends, and those live in shared memory that
// the whole cluster shares: some 15,000 of them exhaust it for everybody.
const MaxKeys = 256

// MaxKeyBytes is how long Event.Key and Event.DedupKey may be.
const MaxKeyBytes = 1000

// MaxCallBytes is how much the payloads and headers of one call of Publish may have: it is one message, and PostgreSQL takes none of a GiB.
const MaxCallBytes = 512 << 20

// maxDueAt is a little before the last moment that PostgreSQL stores, in the year 294276.
var maxDueAt = time.Date(294_000, 1, 1, 0, 0, 0, 0, time.UTC)

// Event is what a transaction publishes.
type Event struct {
	// Type says what happened, for instance "order.paid". Required.
	Type string

	// Key, if not empty, orders: events of one key are delivered one after another, in the order in which their
	// transactions committed, and within a transaction in the order of publishing. Publishers of one key wait for each
	// other, until the transaction ends; nobody else waits. Events without a key have no order. At most [MaxKeyBytes].
	Key string

	// Payload is opaque. Nil and empty are the same. It must not be changed before the transaction has ended: it may be sent with COMMIT.
	Payload []byte

	// Headers travel beside the payload, for instance a trace context. Nil and empty are the same.
	Headers map[string]string

	// DueAt, if in the future by the server's clock, keeps the event back until then. It takes its place in the order of its key when it
	// is due, not when it is published.
	DueAt time.Time

	// DedupKey, if not empty, lets only the first event with it through, for as long as Config.DedupWindow says: others are left
	// out without an error. One in a transaction that aborts does not count. At most [MaxKeyBytes]. A publisher waits for another one
	// with the same DedupKey until that transaction ends. Only those of one call are taken in sorted order: transactions that publish
	// under the same ones, or the same and a Key, in several calls in different orders can deadlock (40P01).
	DedupKey string
}

// Delivery is an event on its way to a handler.
type Delivery struct {
	Event

	// Subscription is the name of the subscription that it is delivered for.
	Subscription string

	// Seq identifies the event. It grows within a key; between keys it says little, for numbers are drawn before commits.
	Seq int64

	// Lane is the lane that holds the event.
	Lane int

	// Attempt counts the deliveries of this event that were begun and came to an end, this one included: 1 at first. A
	// delivery that a crash cut short does not count.
	Attempt int

	// PublishedAt is the server's clock when the event was written, not when its transaction committed.
	PublishedAt time.Time
}

// TooManyKeysError reports a Publish that would bring its transaction to more than [MaxKeys] distinct keys. The call published
// nothing, and the transaction is unharmed. Publish in several transactions, or without keys where order does not matter.
type TooManyKeysError struct {
	Keys int // distinct keys so far, those of the refused call included
}

func (e *TooManyKeysError) Error() string {
	return fmt.Sprintf("outbox: publish: %d distinct keys in one transaction, at most %d", e.Keys, MaxKeys)
}

// ErrInvalidEvent is wrapped by the error of a Publish whose event PostgreSQL could not store. It is found before anything is
// sent, so the transaction is unharmed.
var ErrInvalidEvent = errors.New("invalid event")

func (e *Event) validate() error {
	if e.Type == "" {
		return fmt.Errorf("%w: no type", ErrInvalidEvent)
	}
	if !storable(e.Type) {
		return fmt.Errorf("%w: type is not text", ErrInvalidEvent)
	}
	if !storable(e.Key) || len(e.Key) > MaxKeyBytes {
		return fmt.Errorf("%w: key is not text of at most %d bytes", ErrInvalidEvent, MaxKeyBytes)
	}
	if !storable(e.DedupKey) || len(e.DedupKey) > MaxKeyBytes {
		return fmt.Errorf("%w: dedup key is not text of at most %d bytes", ErrInvalidEvent, MaxKeyBytes)
	}
	if e.DueAt.After(maxDueAt) {
		return fmt.Errorf("%w: it is due after the year 294000", ErrInvalidEvent)
	}
	for k, v := range e.Headers {
		if !storable(k) || !storable(v) {
			return fmt.Errorf("%w: header is not text", ErrInvalidEvent)
		}
	}
	return nil
}

// storable reports whether PostgreSQL takes s as text: valid UTF-8 without NUL.
func storable(s string) bool {
	return utf8.ValidString(s) && !strings.Contains(s, "\x00")
}

// laneHash is recorded in the database: a process with another one would put events of one key into two lanes.
const laneHash = "fnv1a64"

// laneOf returns the lane of a key. Never change it without a new name for laneHash.
func laneOf(key string, lanes int) int16 {
	h := fnv.New64a()
	h.Write([]byte(key))
	return int16(h.Sum64() % uint64(lanes)) //nolint:gosec // lanes is at most 1,024
}

// lockOf returns the advisory lock of a key. Advisory locks are shared with everything else in the database, so the schema
// goes in; two keys with the same lock only wait for each other needlessly.
func lockOf(schema, key string) int64 {
	h := fnv.New64a()
	h.Write([]byte("bounceproof/outbox/key\x00" + schema + "\x00" + key))
	return int64(h.Sum64()) //nolint:gosec // all 64 bits are wanted
}

// lockNamed returns the advisory lock of something that exists once in a schema.
func lockNamed(schema, what string) int64 {
	h := fnv.New64a()
	h.Write([]byte("bounceproof/outbox/" + what + "\x00" + schema))
	return int64(h.Sum64()) //nolint:gosec // all 64 bits are wanted
}

// columns are events as the parameters of the publishing statements: one array a column.
type columns struct {
	lanes    []int16 // nil: the number of lanes is not known yet
	locks    []*int64
	types    []string
	keys     []*string
	payloads [][]byte
	headers  [][]byte

	keyed   bool // some event has a key
	special bool // the following two hold something
	dues    []*time.Time
	dedups  []*string
}

// columns turns events into parameters, all but the lanes.
func (s *Store) columns(events []Event) (*columns, error) {
	c := &columns{
		locks: make([]*int64, len(events)), types: make([]string, len(events)),
		keys: make([]*string, len(events)), payloads: make([][]byte, len(events)), headers: make([][]byte, len(events)),
		dues: make([]*time.Time, len(events)), dedups: make([]*string, len(events)),
	}
	bytes := 0
	for i := range events {
		e := &events[i]
		if bytes += len(e.Payload); bytes > MaxCallBytes {
			return nil, fmt.Errorf("outbox: publish: event %d: %w: more than %d bytes in one call", i, ErrInvalidEvent, MaxCallBytes)
		}
		if err := e.validate(); err != nil {
			return nil, fmt.Errorf("outbox: publish: event %d: %w", i, err)
		}
		c.types[i] = e.Type
		c.payloads[i] = e.Payload
		if e.Payload == nil {
			c.payloads[i] = []byte{}
		}
		if len(e.Headers) > 0 {
			h, err := json.Marshal(e.Headers)
			if err != nil {
				return nil, fmt.Errorf("outbox: publish: event %d: headers: %w", i, err)
			}
			c.headers[i] = h
			bytes += len(h)
		}
		if !e.DueAt.IsZero() {
			due := e.DueAt // not the caller's, who may use the slice again before the commit
			c.dues[i], c.special = &due, true
		}
		if e.DedupKey != "" {
			dedup := e.DedupKey
			c.dedups[i], c.special = &dedup, true
		}
		if e.Key != "" {
			key, lock := e.Key, lockOf(s.schema, e.Key)
			c.keyed = true
			c.keys[i], c.locks[i] = &key, &lock
		}
	}
	if n := c.distinctKeys(); n > MaxKeys {
		return nil, &TooManyKeysError{Keys: n}
	}
	return c, nil
}

// assignLanes fills in the lanes, of which there are n.
func (s *Store) assignLanes(c *columns, n int) {
	c.lanes = make([]int16, len(c.keys))
	for i, key := range c.keys {
		if key != nil {
			c.lanes[i] = laneOf(*key, n)
		} else {
			c.lanes[i] = int16(s.rotation.Add(1) % uint64(n)) //nolint:gosec // n is at most 1,024
		}
	}
}

// keyLocks are the locks of the events that have a key, in their order; one that several events have comes several times.
func (c *columns) keyLocks() iter.Seq[int64] {
	return func(yield func(int64) bool) {
		for _, lock := range c.locks {
			if lock != nil && !yield(*lock) {
				return
			}
		}
	}
}

func (c *columns) distinctKeys() int {
	if len(c.keys) <= MaxKeys {
		return 0 // cannot be too many
	}
	keys := make([]string, 0, len(c.keys))
	for _, k := range c.keys {
		if k != nil {
			keys = append(keys, *k)
		}
	}
	slices.Sort(keys)
	return len(slices.Compact(keys))
}
