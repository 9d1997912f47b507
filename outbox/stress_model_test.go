package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/outbox"
)

// model is what happened, as the publishers and the handlers saw it.
type model struct {
	mu        sync.Mutex
	committed map[string]string // name of the event → key
	aborted   map[string]bool
	delivered map[string]int
	lane      map[string]int
	order     map[string][]int64 // by key: sequence numbers at their first delivery
	serial    atomic.Int64
	crashes   atomic.Int64
}

func newModel() *model {
	return &model{
		committed: make(map[string]string), aborted: make(map[string]bool),
		delivered: make(map[string]int), lane: make(map[string]int), order: make(map[string][]int64),
	}
}

func (m *model) handle(_ context.Context, d outbox.Delivery) error {
	if d.Seq%3 == 0 {
		<-time.After(time.Duration(d.Seq%7) * time.Millisecond) // so that a kill finds pages under way
	}
	if (d.Seq+int64(d.Attempt))%17 == 0 {
		return errors.New("fails now and then")
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	name := string(d.Payload)
	m.delivered[name]++
	m.lane[name] = d.Lane
	if d.Key != "" && m.delivered[name] == 1 {
		m.order[d.Key] = append(m.order[d.Key], d.Seq)
	}
	return nil
}

// batch returns one to four new events, most of them with one of a few keys.
func (m *model) batch(rng *rand.Rand) []outbox.Event {
	out := make([]outbox.Event, 1+rng.IntN(4)*rng.IntN(2))
	for i := range out {
		out[i] = outbox.Event{Type: "stress", Payload: fmt.Appendf(nil, "e%d", m.serial.Add(1))}
		if rng.IntN(5) > 0 {
			out[i].Key = fmt.Sprintf("k%d", rng.IntN(200))
		}
	}
	return out
}

func (m *model) record(committed bool, events ...outbox.Event) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, e := range events {
		if committed {
			m.committed[string(e.Payload)] = e.Key
		} else {
			m.aborted[string(e.Payload)] = true
		}
	}
}

func (m *model) missing() (names []string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for name := range m.committed {
		if m.delivered[name] == 0 {
			names = append(names, name)
		}
	}
	return names
}

// lost returns events that their lane's recorded position has passed and that nobody has got, nor will: what was handed over was handed over
// before that was recorded, and what failed stands in the table of failed events with the same statement.
func (m *model) lost(t *testing.T, db *database) (names []string) {
	rows, err := db.conn.Query(t.Context(), `
		select convert_from(e.payload, 'UTF8') from outbox.event e
		cross join lateral (select c.from_tick from outbox.cursor c where c.lane = e.lane order by c.n desc limit 1) c
		join outbox.tick t on t.id = c.from_tick
		where pg_visible_in_snapshot(e.xid, t.snapshot)
		  and not exists (select 1 from outbox.failed f where f.lane = e.lane and f.seq = e.seq)`)
	if err != nil {
		t.Fatal(err)
	}
	passed, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, name := range passed {
		if m.delivered[name] == 0 {
			names = append(names, name)
		}
	}
	return names
}

// check fails the test for everything that must not be.
func (m *model) check(t *testing.T, db *database, pageSize int) {
	t.Helper()
	if missing := m.missing(); len(missing) > 0 {
		t.Errorf("%d of %d committed events were lost: %.20q", len(missing), len(m.committed), missing)
	}
	twice := make(map[int]int)
	for name, n := range m.delivered {
		if m.aborted[name] {
			t.Errorf("%s was aborted and delivered", name)
		} else if _, ok := m.committed[name]; !ok {
			t.Errorf("%s was delivered and is unknown", name)
		}
		if n > 1 {
			twice[m.lane[name]] += n - 1
		}
	}
	for lane, n := range twice {
		// Whether its owner crashed or was only late, as on a busy machine, makes no difference. With a page there may be as many retries.
		takeovers := db.count(t, "select count(*) from takeover where lane = $1", lane)
		if n > int(takeovers)*2*pageSize {
			t.Errorf("lane %d: %d deliveries too many, at most a page of %d and its retries after each of %d takeovers", lane, n, pageSize, takeovers)
		}
	}
	for key, seqs := range m.order {
		if !slices.IsSorted(seqs) {
			t.Errorf("key %s was delivered out of order", key)
		}
	}
	t.Logf("%d committed, %d aborted, %d crashes, deliveries too many by lane: %v", len(m.committed), len(m.aborted), m.crashes.Load(), twice)
}

// publisher publishes in every way there is until stop is closed.
func (m *model) publisher(t *testing.T, db *database, rng *rand.Rand, stop <-chan struct{}) {
	ctx := context.WithoutCancel(t.Context())
	hold := func(d time.Duration) { // a transaction that takes its time, but not beyond the end of the test
		select {
		case <-time.After(upTo(rng, d)):
		case <-stop:
		}
	}
	abort := errors.New("abort")
	for {
		select {
		case <-stop:
			return
		default:
		}
		events := m.batch(rng)
		var err error
		commit := rng.IntN(5) > 0
		switch rng.IntN(10) {
		default: // the usual: queued, rides with COMMIT
			err = db.proc.ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
				if err := db.proc.store.Publish(ctx, tx, events...); err != nil {
					return err
				}
				if !commit {
					return abort
				}
				return nil
			})
		case 0: // long: has its number, and commits much later
			err = m.foreign(ctx, db, func(tx pgx.Tx) error {
				if err := db.proc.store.Publish(ctx, tx, events...); err != nil {
					return err
				}
				hold(300 * time.Millisecond)
				if !commit {
					return abort
				}
				return nil
			})
		case 1: // has its transaction id long before it draws
			err = m.foreign(ctx, db, func(tx pgx.Tx) error {
				if _, err := tx.Exec(ctx, "select pg_current_xact_id()"); err != nil {
					return err
				}
				hold(100 * time.Millisecond)
				if err := db.proc.store.Publish(ctx, tx, events...); err != nil {
					return err
				}
				if !commit {
					return abort
				}
				return nil
			})
		case 2: // in a savepoint that is rolled back, then again
			lost := m.batch(rng)
			err = m.foreign(ctx, db, func(tx pgx.Tx) error {
				sp, err := tx.Begin(ctx)
				if err != nil {
					return err
				}
				if err := db.proc.store.Publish(ctx, sp, lost...); err != nil {
					return err
				}
				if err := sp.Rollback(ctx); err != nil {
					return err
				}
				return db.proc.store.Publish(ctx, tx, events...)
			})
			commit = true
			m.record(false, lost...)
		case 3: // two-phase
			err = m.twoPhase(ctx, db, rng, commit, hold, events)
		}
		switch {
		case err == nil:
			m.record(commit, events...)
		case errors.Is(err, abort), isDeadlock(err):
			m.record(false, events...)
		default:
			t.Errorf("publisher: %v", err)
			return
		}
	}
}

func isDeadlock(err error) bool {
	return err != nil && strings.Contains(err.Error(), "40P01")
}

// foreign runs f in a transaction of bare pgx on a direct connection.
func (m *model) foreign(ctx context.Context, db *database, f func(pgx.Tx) error) error {
	return pgx.BeginFunc(ctx, db.conn, f)
}

func (m *model) twoPhase(ctx context.Context, db *database, rng *rand.Rand, commit bool, hold func(time.Duration), events []outbox.Event) error {
	conn, err := db.conn.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()
	tx, err := conn.Begin(ctx)
	if err != nil {
		return err
	}
	if err := db.proc.store.Publish(ctx, tx, events...); err != nil {
		_ = tx.Rollback(ctx)
		return err
	}
	id := fmt.Sprintf("'%s_%d_%d'", strings.ToLower(db.conn.Config().ConnConfig.Database), m.serial.Add(1), rng.Uint32())
	if _, err := conn.Exec(ctx, "prepare transaction "+id); err != nil {
		return err
	}
	hold(200 * time.Millisecond)
	end := "commit prepared "
	if !commit {
		end = "rollback prepared "
	}
	_, err = conn.Exec(ctx, end+id)
	return err
}

func upTo(rng *rand.Rand, d time.Duration) time.Duration { return time.Duration(rng.Int64N(int64(d))) }
