package outbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/internal/txlocal"
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

// ErrTransactionEnded is the error of an attempt whose handler committed or rolled back the transaction that it was given, and returned nil. The
// delivery was not recorded, so the event comes again, and what the handler committed is there twice then. It stands with the failed event.
var ErrTransactionEnded = errors.New("outbox: handler: it ended the transaction that records the delivery")

// step handles one event and records it, of a job that is done event by event, in order: the kinds with a transaction, and lanes under
// suspicion. next is where the lane stands after it. An error ends the job.
type step func(j *job, it *item, next position) error

// stepByStep does the job in steps. Afterwards everything is recorded, or the job is unsure and its lane is read again.
func (j *job) stepByStep(do step) {
	err := j.allSteps(do)
	if (err == nil || errors.Is(err, errHalted)) && !j.lane.progress.recorded() {
		err = j.save()
	}
	j.unsure, j.err = err != nil && !errors.Is(err, errHalted), err
	j.recorded = true
}

func (j *job) allSteps(do step) error {
	for _, run := range j.runs {
		for _, it := range run {
			if !it.stored {
				break // those of the page come below
			}
			if err := do(j, it, j.lane.progress.now); err != nil {
				return err
			}
			if it.outcome != handled {
				break
			}
		}
	}
	if j.page == nil {
		return nil
	}
	start := j.lane.progress.now
	for i := range j.page.events {
		it := &item{Delivery: j.page.events[i]}
		next := start.after(j.page, it.Seq)
		if it.Key != "" && j.lane.blocked.has(it.blockKey()) {
			j.lane.park(it)
			j.lane.progress.now = next
			continue
		}
		if err := do(j, it, next); err != nil {
			return err
		}
	}
	return nil
}

// save records the lane's progress by itself. It does so even when the handlers' time is over: the work is done.
func (j *job) save() error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(j.ctx), j.r.timeout())
	defer cancel()
	var rec record
	rec.add(j.lane, j.lane.progress.now, nil)
	if err := rec.run(ctx, j.r.s.ex, j.r.sub); err != nil {
		return errors.Join(errUnsure, err)
	}
	rec.apply(&j.r.d.counts)
	return nil
}

// begin writes an attempt down before it begins. It returns false for an event that has had all of them.
func (j *job) begin(it *item, next position) (bool, error) {
	j.lane.progress.now = next
	if limit := j.r.policy.maxAttempts; limit > 0 && it.Attempt > limit {
		it.Attempt--
		it.outcome, it.err = notHandled, errInterrupted
		j.fail(it)
		return false, nil
	}
	what := "set"
	if !it.stored {
		what = "add"
		j.lane.blocked.set(it.blockKey()).rows++
		it.stored = true
	}
	var now time.Duration
	j.lane.progress.changes.add(what, &it.Delivery, it.Attempt, string(StateRetrying), &now, errInterrupted)
	return true, j.save()
}

// singly is the step of lanes under suspicion, without a transaction.
func singly(one func(*item) error) step {
	return func(j *job, it *item, next position) error {
		if !j.slot() {
			return errHalted
		}
		defer j.free()
		if ok, err := j.begin(it, next); !ok || err != nil {
			return err
		}
		j.note(it, one(it))
		switch it.outcome {
		case handled:
			j.lane.succeed(it)
		case notHandled:
			j.fail(it)
		case untried:
			return errHalted
		}
		return nil
	}
}

// inTx is the step of the kinds with a transaction.
func inTx(one func(pgx.Tx, *item) error) step {
	return func(j *job, it *item, next position) error {
		if !j.slot() {
			return errHalted
		}
		defer j.free()
		if j.suspect() {
			if ok, err := j.begin(it, next); !ok || err != nil {
				return err
			}
		}
		var also changes
		if it.stored {
			also.add("remove", &it.Delivery, 0, "", nil, nil)
		}
		err := j.transaction(next, &also, func(tx pgx.Tx) error { return one(tx, it) })
		if errors.Is(err, errUnsure) {
			return err
		}
		j.note(it, err)
		switch it.outcome {
		case handled:
			if err != nil { // discarded: nothing of it was recorded
				j.lane.succeed(it)
				j.lane.progress.now = next
			} else if it.stored {
				j.lane.blocked.remove(it.blockKey())
			}
			return nil
		case notHandled:
			j.fail(it)
			j.lane.progress.now = next
			return j.save()
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
	if !j.slot() {
		return true
	}
	defer j.free()
	var also changes
	for _, it := range j.behind {
		also.parked(it)
	}
	err := j.transaction(j.next(), &also, func(tx pgx.Tx) error { return all(tx, deliveries(items)) })
	switch {
	case errors.Is(err, errUnsure):
		j.unsure, j.recorded = true, true
		return true
	case err != nil:
		return j.ctx.Err() != nil
	}
	for _, it := range j.behind {
		j.lane.blocked.set(it.blockKey()).rows++
	}
	for _, it := range items {
		j.note(it, nil)
	}
	j.recorded = true
	return true
}

// transaction runs handle in a transaction and records in it the position next, what the lane has not recorded yet, and also. It returns
// the handler's error, or that of a commit that the server refused, which is as good as the handler's; or errUnsure, wrapped, when it
// cannot be told what the database holds or it holds something else than expected.
func (j *job) transaction(next position, also *changes, handle func(pgx.Tx) error) error {
	tx, err := j.r.s.ex.BeginTx(j.ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
	if err != nil {
		return errors.Join(errUnsure, err)
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(j.ctx)) }()
	txlocal.Open(tx, j.r.limitIdle)
	if err := handle(tx); err != nil {
		return err
	}
	var rec record
	rec.add(j.lane, next, also)
	err = rec.run(j.ctx, tx, j.r.sub)
	if errors.Is(err, pgx.ErrTxClosed) {
		return ErrTransactionEnded
	}
	if err == nil {
		err = tx.Commit(j.ctx)
	}
	switch {
	case err == nil:
		rec.apply(&j.r.d.counts)
		return nil
	case isRefusal(err):
		return err
	default:
		return errors.Join(errUnsure, err)
	}
}

// idleLimit returns the text that makes the server end a handler's transaction whose client is silent for a lease and two seconds, unless another
// setting ends it earlier. Without it a host that vanished holds its locks, and so its lanes, until the kernel gives its connection up.
func idleLimit(lease time.Duration) string {
	const name = "idle_in_transaction_session_timeout"
	ms := (lease + 2*time.Second).Milliseconds()
	return fmt.Sprintf("select case when current_setting('%[1]s')::interval not between '1 us' and '%[2]d ms' then set_config('%[1]s', '%[2]d', true) end", name, ms)
}

// isRefusal reports whether an error is the server's answer to what the transaction did, so that it certainly did not commit:
// not a lost connection, and not a server that has other troubles.
func isRefusal(err error) bool {
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
