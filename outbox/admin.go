package outbox

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/executor"
)

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

// fence makes what the owners of lanes (nil: of all) know of them void, in a transaction, and moves them to the end of a tick if one is given.
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
	var n int64
	var b pgx.Batch
	b.Queue(begin)
	b.Queue(text(s.schema, "unsubscribe"), name).Exec(affected(&n))
	b.Queue("commit")
	if err := s.ex.SendBatch(ctx, &b).Close(); err != nil {
		return false, fmt.Errorf("outbox: unsubscribe: %w", err)
	}
	return n > 0, nil
}

// Rebase makes a log work in the cluster it stands in now, after it was restored there: dispatchers had stopped with [ErrRebaseNeeded].
// Every subscription goes back to its first event that was not delivered for certain, so some may come again and none is lost. It
// locks out publishers and rewrites the log, so it takes long on a large one. Calling it without need, for instance after
// pg_upgrade, does no harm but deliveries that come again.
func (s *Store) Rebase(ctx context.Context) error {
	lock := pgx.Identifier{s.schema}.Sanitize()
	texts := []string{
		"select set_config('jit', 'off', true)",
		"lock table " + lock + ".event, " + lock + ".tick, " + lock + ".lease, " + lock + ".cursor in exclusive mode",
		text(s.schema, "rebase_sequence"),
		"update " + lock + ".lease set token = token + 1 + floor(random() * 2147483647)::bigint",
		text(s.schema, "rebase_cursors"),
		text(s.schema, "rebase_log"),
	}
	err := s.ex.InTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(ctx context.Context, tx executor.Tx) error {
		for _, sql := range texts {
			if _, err := tx.Exec(ctx, sql); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("outbox: rebase: %w", err)
	}
	return nil
}
