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
