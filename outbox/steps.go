package outbox

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// suspicious is how many crashes of a lane's owners in a row make its events be tried one at a time, each attempt written down
// before it begins: then an event that kills the process reaches its last attempt.
const suspicious = 2

var (
	errInterrupted = errors.New("outbox: the process ended during this attempt") // stands with an attempt until it ends
	errNotMoved    = errors.New("outbox: the lane's row is not what it was")
	errHalted      = errors.New("outbox: halted")
	errUnsure      = errors.New("outbox: what the database holds is not known")
)

// steps are a job done event by event, in order, each step recorded by itself: the kinds with a transaction, and lanes under
// suspicion. Afterwards everything is recorded, or the job is unsure and its lane is read again.
type steps struct {
	*job
	pending changes  // noted, not recorded yet
	at      position // up to where events are done or pending
}

// step handles one event; next is where the lane stands after it. An error ends the steps.
type step func(s *steps, it *item, next position) error

func (j *job) stepByStep(do step) {
	s := &steps{job: j, at: j.lane.now}
	err := s.all(do)
	if (err == nil || errors.Is(err, errHalted)) && (!s.pending.empty() || s.at != j.lane.stored) {
		err = s.save()
	}
	j.unsure = err != nil && !errors.Is(err, errHalted)
	j.recorded = true
}

func (s *steps) all(do step) error {
	for _, run := range s.runs {
		for _, it := range run {
			if !it.stored {
				break // those of the page come below
			}
			if err := do(s, it, s.at); err != nil {
				return err
			}
			if it.outcome != succeeded {
				break
			}
		}
	}
	if s.page == nil {
		return nil
	}
	start := s.lane.now
	for i := range s.page.events {
		it := &item{Delivery: s.page.events[i]}
		next := start.after(s.page, it.Seq)
		if it.Key != "" && s.lane.failed.has(it.failKey()) {
			s.lane.park(it, &s.pending)
			s.at = next
			continue
		}
		if err := do(s, it, next); err != nil {
			return err
		}
	}
	return nil
}

// querier is what recording needs; a transaction as well as an executor.
type querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// record writes a position and changes, fenced.
func (s *steps) record(ctx context.Context, q querier, next position, c *changes) error {
	var m completions
	m.add(s.lane, next)
	rows, err := q.Query(ctx, s.r.s.sql.completeFailed, m.argsWith(s.r.sub.name, c)...)
	if err != nil {
		return err
	}
	var lane int16
	n := 0
	if _, err := pgx.ForEachRow(rows, []any{&lane}, func() error { n++; return nil }); err != nil {
		return err
	}
	if n == 0 {
		return errNotMoved
	}
	return nil
}

// recorded takes note that the database stands at next and nothing is pending.
func (s *steps) recordedAt(next position) {
	s.r.d.counts.completions.Add(1)
	s.lane.stored, s.lane.now, s.at = next, next, next
	s.pending = changes{}
}

// save records what is pending by itself. It does so even when the handlers' time is over: the work is done.
func (s *steps) save() error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(s.ctx), s.r.timeout())
	defer cancel()
	if err := s.record(ctx, s.r.s.ex, s.at, &s.pending); err != nil {
		return errors.Join(errUnsure, err)
	}
	s.recordedAt(s.at)
	return nil
}

// trial writes an attempt down before it begins. It returns false for an event that has had all of them.
func (s *steps) trial(it *item, next position) (bool, error) {
	s.at = next
	if limit := s.r.policy.maxAttempts; limit > 0 && it.Attempt > limit {
		it.Attempt--
		it.outcome, it.err = failed, errInterrupted
		s.failed(it, &s.pending)
		return false, nil
	}
	what := "set"
	if !it.stored {
		what = "add"
		s.lane.failed.set(it.failKey()).rows++
		it.stored = true
	}
	var now time.Duration
	s.pending.add(what, &it.Delivery, it.Attempt, "retry", &now, errInterrupted)
	return true, s.save()
}

// singly is the step of lanes under suspicion, without a transaction.
func singly(one func(*item) error) step {
	return func(s *steps, it *item, next position) error {
		if !s.slot() {
			return errHalted
		}
		defer s.free()
		if ok, err := s.trial(it, next); !ok || err != nil {
			return err
		}
		s.note(it, one(it))
		switch it.outcome {
		case succeeded:
			s.lane.succeed(it, &s.pending)
		case failed:
			s.failed(it, &s.pending)
		case untried:
			return errHalted
		}
		return nil
	}
}

// inTx is the step of the kinds with a transaction.
func inTx(one func(pgx.Tx, *item) error) step {
	return func(s *steps, it *item, next position) error {
		if !s.slot() {
			return errHalted
		}
		defer s.free()
		if s.suspect() {
			if ok, err := s.trial(it, next); !ok || err != nil {
				return err
			}
		}
		var also changes
		if it.stored {
			also.add("remove", &it.Delivery, 0, "", nil, nil)
		}
		err := s.transaction(next, &also, func(tx pgx.Tx) error { return one(tx, it) })
		if errors.Is(err, errUnsure) {
			return err
		}
		s.note(it, err)
		switch it.outcome {
		case succeeded:
			if err != nil { // discarded: nothing of it was recorded
				s.lane.succeed(it, &s.pending)
				s.at = next
			} else if it.stored {
				s.lane.failed.take(it.failKey())
			}
			return nil
		case failed:
			s.failed(it, &s.pending)
			s.at = next
			return s.save()
		case untried:
		}
		return errHalted
	}
}

// pageInTx handles the page in one transaction. False when it has to be done event by event.
func (j *job) pageInTx(all func(pgx.Tx, []Delivery) error) bool {
	items := j.fresh()
	if len(items) == 0 || len(items) < j.size() { // retries go event by event
		return false
	}
	s := &steps{job: j, at: j.lane.now}
	if !s.slot() {
		return true
	}
	defer s.free()
	var also changes
	for _, it := range j.behind {
		also.add("add", &it.Delivery, it.Attempt-1, "parked", nil, nil)
	}
	err := s.transaction(j.next(), &also, func(tx pgx.Tx) error { return all(tx, deliveries(items)) })
	switch {
	case errors.Is(err, errUnsure):
		j.unsure, j.recorded = true, true
		return true
	case err != nil:
		return j.ctx.Err() != nil
	}
	for _, it := range j.behind {
		j.lane.failed.set(it.failKey()).rows++
	}
	for _, it := range items {
		j.note(it, nil)
	}
	j.recorded = true
	return true
}

// transaction runs handle in a transaction and records in it the position next, what is pending, and also. It returns the handler's
// error, or that of a commit that the server refused, which is as good as the handler's; or errUnsure, wrapped, when it cannot be told
// what the database holds or it holds something else than expected.
func (s *steps) transaction(next position, also *changes, handle func(pgx.Tx) error) error {
	tx, err := s.r.s.ex.BeginTx(s.ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
	if err != nil {
		return errors.Join(errUnsure, err)
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(s.ctx)) }()
	if err := handle(tx); err != nil {
		return err
	}
	var c changes
	c.join(&s.pending)
	c.join(also)
	err = s.record(s.ctx, tx, next, &c)
	if err == nil {
		err = tx.Commit(s.ctx)
	}
	switch {
	case err == nil:
		s.recordedAt(next)
		return nil
	case refused(err):
		return err
	default:
		return errors.Join(errUnsure, err)
	}
}

// refused reports whether an error is the server's answer to what the transaction did, so that it certainly did not commit:
// not a lost connection, and not a server that has other troubles.
func refused(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	if !ok {
		return errors.Is(err, pgx.ErrTxCommitRollback)
	}
	switch pgErr.Code[:min(2, len(pgErr.Code))] {
	case "", "08", "53", "57", "58", "XX":
		return false
	}
	return true
}
