package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/outbox"
	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

// stressTime is how long each leg publishes. OUTBOX_STRESS overrides it, for instance "60s".
func stressTime(t *testing.T) time.Duration {
	t.Helper()
	if v := os.Getenv("OUTBOX_STRESS"); v != "" {
		d, err := time.ParseDuration(v)
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	if testing.Short() {
		return time.Second
	}
	return 3 * time.Second
}

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

// check fails the test for everything that must not be.
func (m *model) check(t *testing.T, pageSize int) {
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
		if limit := int(m.crashes.Load()) * pageSize; n > limit {
			t.Errorf("lane %d: %d deliveries too many, at most a page of %d after each of %d crashes", lane, n, pageSize, m.crashes.Load())
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

// chaos keeps three dispatchers, each a process of its own, and kills, pauses and restarts them.
func (m *model) chaos(t *testing.T, db *database, rng *rand.Rand, pageSize int, stop <-chan struct{}, rewrite func(string) string) {
	cfg := outbox.DispatcherConfig{
		LeaseDuration: 300 * time.Millisecond, PollInterval: 20 * time.Millisecond, PageSize: pageSize,
		MinBackoff: time.Millisecond, MaxBackoff: 50 * time.Millisecond,
	}
	type one struct {
		*process
		*running
	}
	launch := func() one {
		p := newProcess(t, db.url, outbox.Config{})
		if rewrite != nil {
			p.store.RewriteTick(rewrite)
		}
		return one{p, start(t, p.subscribe(t, "stress", outbox.SubscriptionConfig{}), outbox.HandlerFunc(m.handle), cfg)}
	}
	all := []one{launch(), launch(), launch()}
	for rewrite == nil {
		select {
		case <-stop:
			return
		case <-time.After(100*time.Millisecond + upTo(rng, 200*time.Millisecond)):
		}
		i := rng.IntN(len(all))
		switch rng.IntN(3) {
		case 0: // killed
			m.crashes.Add(1)
			all[i].Cut()
			all[i].cancel()
			all[i] = launch()
		case 1: // paused beyond its lease
			m.crashes.Add(1)
			all[i].Cut()
			select {
			case <-stop:
			case <-time.After(upTo(rng, 600*time.Millisecond)):
			}
			all[i].Restore()
		case 2: // stopped in order
			all[i].stop(t)
			all[i] = launch()
		}
	}
	<-stop
}

func stress(t *testing.T, db *database, rewrite func(string) string, enough func(m *model) bool) *model {
	m := newModel()
	const pageSize = 20
	db.proc.subscribe(t, "stress", outbox.SubscriptionConfig{})
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	stop, publishers := make(chan struct{}), sync.WaitGroup{}
	for i := range 16 {
		publishers.Go(func() { m.publisher(t, db, rand.New(rand.NewPCG(seed, uint64(i))), stop) })
	}
	var keeper sync.WaitGroup
	keeper.Go(func() { m.chaos(t, db, rand.New(rand.NewPCG(seed, 1000)), pageSize, stop, rewrite) })
	enough(m)
	close(stop)
	publishers.Wait()
	keeper.Wait()
	return m
}

func testStress(t *testing.T, db *database) {
	d := stressTime(t)
	m := stress(t, db, nil, func(*model) bool { <-time.After(d); return true })
	eventually(t, "all committed events are delivered", func() bool { return len(m.missing()) == 0 })
	m.check(t, 20)
	if len(m.committed) < 100 || len(m.aborted) < 10 {
		t.Errorf("only %d committed and %d aborted events: this proves nothing", len(m.committed), len(m.aborted))
	}
}

func TestNothingIsLostDoubledOrReorderedDirect(t *testing.T) {
	for _, version := range postgres.Versions() {
		t.Run(version, func(t *testing.T) {
			testStress(t, setupOn(t, postgres.Start(t, postgres.Options{Version: version}), nil, outbox.Config{Lanes: 4}))
		})
	}
}

func TestNothingIsLostDoubledOrReorderedPooled(t *testing.T) {
	for _, version := range pgbouncer.Versions() {
		t.Run(version, func(t *testing.T) {
			s := postgres.Start(t, postgres.Options{})
			b := pgbouncer.Start(t, s, pgbouncer.Options{Version: version, PoolSize: 8})
			testStress(t, setupOn(t, s, b, outbox.Config{Lanes: 4}))
		})
	}
}

// The control of the two above: with a floor that does not lag, events are lost, and the model notices.
func TestAFloorThatDoesNotLagLosesEvents(t *testing.T) {
	db := setup(t, outbox.Config{Lanes: 4})
	const lagging = "coalesce((select t.tip from \"outbox\".tick t order by t.id desc offset 1 limit 1), 0)"
	rewrite := func(sql string) string {
		if !strings.Contains(sql, lagging) {
			t.Fatalf("the tick statement has no %s", lagging)
		}
		return strings.Replace(sql, lagging, "state.tip", 1)
	}
	m := stress(t, db, rewrite, func(m *model) bool {
		eventually(t, "an event is lost for a second", func() bool {
			before := m.missing()
			if len(before) == 0 {
				return false
			}
			<-time.After(time.Second)
			after := m.missing()
			return slices.ContainsFunc(before, func(name string) bool { return slices.Contains(after, name) })
		})
		return true
	})
	t.Logf("lost %d of %d, as it must", len(m.missing()), len(slices.Collect(maps.Keys(m.committed))))
}

func upTo(rng *rand.Rand, d time.Duration) time.Duration { return time.Duration(rng.Int64N(int64(d))) }
