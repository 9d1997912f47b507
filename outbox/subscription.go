package outbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/prepare"
)

// Start says where a new subscription begins. The zero value is [StartEarliest].
type Start struct {
	now bool
	at  time.Time
}

// StartEarliest begins with the oldest event that retention has left.
func StartEarliest() Start { return Start{} }

// StartNow begins with what commits after Subscribe, or Replay, was called.
func StartNow() Start { return Start{now: true} }

// StartAt begins with what committed after the last tick before t: nothing from t on is left out, a little before it may come too.
// Times before the oldest tick that retention has left are [StartEarliest].
func StartAt(t time.Time) Start { return Start{at: t} }

// SubscriptionConfig says how a subscription behaves. The zero value works.
type SubscriptionConfig struct {
	// Start counts only when the subscription is created. Defaults to [StartEarliest].
	Start Start

	// SkipOnDead lets events follow a dead one of the same key. By default a key whose event has failed for the last time stays
	// blocked until somebody decides, because what follows may build on it. The last Subscribe decides for the dispatchers made with what
	// it returns.
	SkipOnDead bool
}

// Subscription is a named reader of the whole log with a place of its own in it. Safe for concurrent use.
type Subscription struct {
	store    *Store
	name     string
	lanes    int
	skipDead bool
}

// Name returns the name.
func (sub *Subscription) Name() string { return sub.name }

// Subscription returns a subscription that exists, or [ErrUnsubscribed], wrapped.
func (s *Store) Subscription(ctx context.Context, name string) (*Subscription, error) {
	lanes, err := s.verify(ctx, s.ex, prepare.Stable)
	if err != nil {
		return nil, err
	}
	sub := &Subscription{store: s, name: name, lanes: lanes}
	switch err := s.ex.QueryRow(ctx, text(s.schema, "subscription_read"), name).Scan(&sub.skipDead); {
	case errors.Is(err, pgx.ErrNoRows):
		return nil, fmt.Errorf("outbox: subscription %s: %w", name, ErrUnsubscribed)
	case err != nil:
		return nil, fmt.Errorf("outbox: subscription %s: %w", name, err)
	}
	return sub, nil
}

// Subscribe returns the subscription of that name, and creates it if there is none. It is idempotent: call it at every
// start. The name is any text up to 200 bytes.
func (s *Store) Subscribe(ctx context.Context, name string, cfg SubscriptionConfig) (*Subscription, error) {
	if name == "" || len(name) > 200 || !storable(name) {
		return nil, fmt.Errorf("outbox: subscribe: name %q: want text of 1 to 200 bytes", name)
	}
	lanes, err := s.verify(ctx, s.ex, prepare.Stable)
	if err != nil {
		return nil, err
	}
	if cfg.Start.now { // a transaction of its own: a tick must be the first in it to take an id
		if _, err := s.tick(ctx); err != nil {
			return nil, err
		}
	}
	err = s.ex.InTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(ctx context.Context, tx executor.Tx) error {
		return s.subscribe(ctx, tx, name, cfg)
	})
	if err != nil {
		return nil, fmt.Errorf("outbox: subscribe %s: %w", name, err)
	}
	return &Subscription{store: s, name: name, lanes: lanes, skipDead: cfg.SkipOnDead}, nil
}

func (s *Store) subscribe(ctx context.Context, tx pgx.Tx, name string, cfg SubscriptionConfig) error {
	tick, err := s.startTick(ctx, tx, cfg.Start)
	if err != nil {
		return err
	}
	var exists bool
	if err := tx.QueryRow(ctx, text(s.schema, "subscription_exists"), name).Scan(&exists); err != nil {
		return err
	}
	if exists {
		_, err := tx.Exec(ctx, text(s.schema, "subscription_update"), name, cfg.SkipOnDead)
		return err
	}
	_, err = tx.Exec(ctx, text(s.schema, "subscription_create"), name, tick, cfg.SkipOnDead)
	return err
}

// startTick finds the tick that a start means, and keeps it from being pruned until the transaction ends.
func (s *Store) startTick(ctx context.Context, tx pgx.Tx, start Start) (tick int64, err error) {
	if _, err := tx.Exec(ctx, "select pg_advisory_xact_lock($1)", lockNamed(s.schema, "subscribe")); err != nil {
		return 0, err
	}
	switch {
	case start.now:
		err = tx.QueryRow(ctx, text(s.schema, "tick_newest")).Scan(&tick)
	case !start.at.IsZero():
		err = tx.QueryRow(ctx, text(s.schema, "tick_before"), start.at).Scan(&tick)
	}
	return tick, err
}
