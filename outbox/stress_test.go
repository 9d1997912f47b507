package outbox_test

import (
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

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

// disturb keeps three dispatchers, each a process of its own, and kills, pauses and restarts them.
func (m *model) disturb(t *testing.T, db *database, rng *rand.Rand, pageSize int, stop <-chan struct{}, rewrite func(string) string) {
	cfg := outbox.DispatcherConfig{
		LeaseDuration: 300 * time.Millisecond, PollInterval: 20 * time.Millisecond, PageSize: pageSize,
		MinBackoff: time.Millisecond, MaxBackoff: 50 * time.Millisecond,
	}
	type instance struct {
		*process
		*running
	}
	launch := func() instance {
		p := newProcess(t, db.url, outbox.Config{})
		if rewrite != nil {
			p.store.RewriteTick(rewrite)
		}
		return instance{p, start(t, p.subscribe(t, "stress", outbox.SubscriptionConfig{}), outbox.HandlerFunc(m.handle), cfg)}
	}
	all := []instance{launch(), launch(), launch()}
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

// takeovers writes down each time that a lease which ran out is claimed.
const takeovers = `
	create table takeover (lane int);
	create function takeover() returns trigger language plpgsql as
		$$ begin insert into takeover values (new.lane); return null; end $$;
	create trigger takeover after update on outbox.lease for each row
		when (old.owner is not null and new.token > old.token) execute function takeover()`

func stress(t *testing.T, db *database, rewrite func(string) string, enough func(m *model)) *model {
	m := newModel()
	const pageSize = 20
	db.proc.subscribe(t, "stress", outbox.SubscriptionConfig{})
	if _, err := db.conn.Exec(t.Context(), takeovers); err != nil {
		t.Fatal(err)
	}
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	stop, publishers := make(chan struct{}), sync.WaitGroup{}
	for i := range 16 {
		publishers.Go(func() { m.publisher(t, db, rand.New(rand.NewPCG(seed, uint64(i))), stop) })
	}
	var dispatchers sync.WaitGroup
	dispatchers.Go(func() { m.disturb(t, db, rand.New(rand.NewPCG(seed, 1000)), pageSize, stop, rewrite) })
	enough(m)
	close(stop)
	publishers.Wait()
	dispatchers.Wait()
	return m
}

func testStress(t *testing.T, db *database) {
	d := stressTime(t)
	m := stress(t, db, nil, func(*model) { <-time.After(d) })
	eventually(t, "all committed events are delivered", func() bool { return len(m.missing()) == 0 })
	m.check(t, db, 20)
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
	var lost []string
	m := stress(t, db, rewrite, func(m *model) {
		eventually(t, "an event is lost", func() bool { lost = m.lost(t, db); return len(lost) > 0 })
	})
	t.Logf("lost %d of %d, as it must", len(lost), len(m.committed))
}
