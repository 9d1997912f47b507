package outbox

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/prepare"
)

// Status is what an outbox looks like at one moment.
type Status struct {
	Schema        string
	Lanes         int
	Tip           int64 // the last sequence number that was drawn
	NewestTick    int64
	Ticks         int64 // how many are kept
	Scheduled     int64 // events that are not due yet
	Subscriptions []SubscriptionStatus
}

// SubscriptionStatus is a subscription's part of a [Status].
type SubscriptionStatus struct {
	Name        string
	SkipOnDead  bool
	Dispatchers int       // alive, with or without lanes
	Pending     int64     // committed events that the log has not delivered yet, without those below
	Oldest      time.Time // when the oldest pending one was published; zero: none is pending
	Retrying    int64     // failed events that will be tried again
	Parked      int64     // events behind a failed one of their key
	Dead        int64     // events that failed for the last time
	Lanes       []LaneStatus
}

// LaneStatus is a lane's part of a [SubscriptionStatus].
type LaneStatus struct {
	Lane    int
	Owner   string // empty: nobody
	Alive   bool   // the owner's lease has not run out
	Crashes int    // owners in a row that did not come to the end of a page
	Token   int64
	From    int64 // tick up to which all is delivered
	To      int64 // end of the open batch; 0: none
	Pos     int64 // up to where in the open batch
	Pending int64
}

// Status looks at everything. It counts pending events one by one, so its cost grows with the backlog. Like [Store.Migrate] it
// refuses a sequence that loses events, with a [*SequenceError].
func (s *Store) Status(ctx context.Context) (*Status, error) {
	lanes, err := s.verify(ctx, s.ex, prepare.Stable)
	if err != nil {
		return nil, err
	}
	st := &Status{Schema: s.schema, Lanes: lanes}
	opts := pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly} // one moment for all
	err = s.ex.InTx(ctx, opts, func(ctx context.Context, tx executor.Tx) error {
		*st = Status{Schema: s.schema, Lanes: lanes}
		if _, err := tx.Exec(ctx, s.sql.plans); err != nil {
			return err
		}
		if err := s.checkSequence(ctx, tx); err != nil {
			return err
		}
		if err := tx.QueryRow(ctx, text(s.schema, "status")).Scan(&st.Tip, &st.NewestTick, &st.Ticks, &st.Scheduled); err != nil {
			return err
		}
		if err := st.readLanes(ctx, tx); err != nil {
			return err
		}
		return st.readFailed(ctx, tx)
	})
	if err != nil {
		return nil, fmt.Errorf("outbox: status: %w", err)
	}
	return st, nil
}

func (st *Status) readLanes(ctx context.Context, tx pgx.Tx) error {
	rows, err := tx.Query(ctx, text(st.Schema, "status_lanes"))
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		var name string
		var skip bool
		var l LaneStatus
		var to *int64
		var oldest *time.Time
		var members int
		err := rows.Scan(&name, &skip, &l.Lane, &l.Owner, &l.Alive, &l.Crashes, &l.Token, &l.From, &to, &l.Pos, &l.Pending, &oldest, &members)
		if err != nil {
			return err
		}
		if to != nil {
			l.To = *to
		}
		if n := len(st.Subscriptions); n == 0 || st.Subscriptions[n-1].Name != name {
			st.Subscriptions = append(st.Subscriptions, SubscriptionStatus{Name: name, SkipOnDead: skip, Dispatchers: members})
		}
		sub := &st.Subscriptions[len(st.Subscriptions)-1]
		sub.Pending += l.Pending
		if oldest != nil && (sub.Oldest.IsZero() || oldest.Before(sub.Oldest)) {
			sub.Oldest = *oldest
		}
		sub.Lanes = append(sub.Lanes, l)
	}
	return rows.Err()
}

func (st *Status) readFailed(ctx context.Context, tx pgx.Tx) error {
	rows, err := tx.Query(ctx, text(st.Schema, "status_failed"))
	if err != nil {
		return err
	}
	var name string
	var retrying, parked, dead int64
	_, err = pgx.ForEachRow(rows, []any{&name, &retrying, &parked, &dead}, func() error {
		for i := range st.Subscriptions {
			if sub := &st.Subscriptions[i]; sub.Name == name {
				sub.Retrying, sub.Parked, sub.Dead = retrying, parked, dead
			}
		}
		return nil
	})
	return err
}

// State is where a failed event stands.
type State string

const (
	StateRetrying State = "retry"  // it will be tried again at DueAt
	StateParked   State = "parked" // it waits behind another one of its key
	StateDead     State = "dead"   // it has failed for the last time
)

// FailedEvent is an event that stands outside the log. Attempt is that of its last delivery, 0 if there was none.
type FailedEvent struct {
	Delivery
	State     State
	DueAt     time.Time // zero: not by itself
	FailedAt  time.Time // when it came to this state
	LastError string
}

// Failed lists up to limit failed events in order of their numbers, those behind the number after: 0 for the first. An empty state
// means all.
func (sub *Subscription) Failed(ctx context.Context, state State, after int64, limit int) ([]FailedEvent, error) {
	rows, err := sub.store.ex.Query(ctx, text(sub.store.schema, "failed_list"), sub.name, after, string(state), limit)
	if err != nil {
		return nil, fmt.Errorf("outbox: failed events: %w", err)
	}
	list, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (FailedEvent, error) {
		f := FailedEvent{Delivery: Delivery{Subscription: sub.name}}
		var key *string
		var due *time.Time
		err := row.Scan(&f.Lane, &f.Seq, &f.Type, &key, &f.Payload, &f.Headers, &f.PublishedAt, &f.Attempt, &f.State, &due,
			&f.LastError, &f.FailedAt)
		if key != nil {
			f.Key = *key
		}
		if due != nil {
			f.DueAt = *due
		}
		return f, err
	})
	if err != nil {
		return nil, fmt.Errorf("outbox: failed events: %w", err)
	}
	return list, nil
}

// Retry gives dead events all their attempts again: those with the given numbers, or all dead ones of the subscription. It returns
// how many. Their keys go on behind them, in order. Dispatchers notice within two seconds.
func (sub *Subscription) Retry(ctx context.Context, seqs ...int64) (int64, error) {
	return sub.decide(ctx, "retry", "failed_retry", seqs)
}

// Discard removes dead events, those with the given numbers or all of the subscription, and returns how many. Their keys go on.
// Dispatchers notice within two seconds.
func (sub *Subscription) Discard(ctx context.Context, seqs ...int64) (int64, error) {
	return sub.decide(ctx, "discard", "failed_discard", seqs)
}

func (sub *Subscription) decide(ctx context.Context, what, statement string, seqs []int64) (n int64, err error) {
	s := sub.store
	err = s.ex.InTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(ctx context.Context, tx executor.Tx) error {
		var lanes []int16
		if err := tx.QueryRow(ctx, text(s.schema, "failed_lanes"), sub.name, seqs).Scan(&lanes); err != nil {
			return err
		}
		if len(lanes) == 0 {
			return nil
		}
		if err := sub.fence(ctx, tx, lanes, nil); err != nil {
			return err
		}
		tag, err := tx.Exec(ctx, text(s.schema, statement), sub.name, seqs)
		n = tag.RowsAffected()
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("outbox: %s: %w", what, err)
	}
	return n, nil
}

// fence takes lanes (nil: all) out of their owners' hands in a transaction, and moves them to the end of a tick if one is given.
func (sub *Subscription) fence(ctx context.Context, tx pgx.Tx, lanes []int16, to *int64) error {
	s := sub.store
	if _, err := tx.Exec(ctx, text(s.schema, "lane_bump"), sub.name, lanes); err != nil {
		return err
	}
	for { // an owner may add a row for each of its lanes once more; then its token is old
		var left int
		if err := tx.QueryRow(ctx, text(s.schema, "cursor_fence"), sub.name, to).Scan(&left); err != nil || left == 0 {
			return err
		}
	}
}

// Replay moves the subscription to another place, back or ahead: see [StartEarliest], [StartNow] and [StartAt]. What retention has removed does
// not come back. Failed events stay what they are; for dead ones there are Retry and Discard. Pages that are with the handlers are
// not recorded any more. Dispatchers notice within two seconds.
func (sub *Subscription) Replay(ctx context.Context, start Start) error {
	s := sub.store
	if start.now {
		if _, err := s.tick(ctx); err != nil {
			return err
		}
	}
	err := s.ex.InTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(ctx context.Context, tx executor.Tx) error {
		tick, err := s.startTick(ctx, tx, start)
		if err != nil {
			return err
		}
		return sub.fence(ctx, tx, nil, &tick)
	})
	if err != nil {
		return fmt.Errorf("outbox: replay: %w", err)
	}
	return nil
}

// Unsubscribe removes a subscription with all that is known of it; its dispatchers stop with [ErrUnsubscribed]. It reports whether there was
// one.
func (s *Store) Unsubscribe(ctx context.Context, name string) (bool, error) {
	tag, err := s.ex.Exec(ctx, text(s.schema, "unsubscribe"), name)
	if err != nil {
		return false, fmt.Errorf("outbox: unsubscribe: %w", err)
	}
	return tag.RowsAffected() > 0, nil
}
