package notify_test

import (
	"log/slog"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/internal/await"
	"github.com/bounceproof/bounceproof/notify"
	"github.com/bounceproof/bounceproof/testenv/postgres"
	"github.com/bounceproof/bounceproof/testenv/proxy"
)

// Fifty listeners whose server restarts. That they spread over time is TestReconnectsAreSpread's; here it is logged, from the
// server's clock.
func TestAllListenersComeBackAfterARestart(t *testing.T) {
	t.Parallel()
	server := postgres.Start(t, postgres.Options{Dedicated: true})
	db := server.NewDatabase(t)
	pool := newPool(t, db.URL)
	const many = 50
	var all []*notify.Listener
	for range many {
		l, err := notify.NewListener(pool, notify.ListenerConfig{Logger: slog.New(slog.DiscardHandler), ProvenPollInterval: -1})
		if err != nil {
			t.Fatal(err)
		}
		l.Handle("news", &recorder{})
		run(t, l)
		all = append(all, l)
	}
	healthy := func() bool { return !slices.ContainsFunc(all, func(l *notify.Listener) bool { return !l.Healthy() }) }
	await.True(t, "50 proofs", healthy)
	arrivals := func() (ms []int64) {
		t.Helper()
		rows, err := pool.Query(t.Context(), `select (extract(epoch from backend_start) * 1000)::bigint from pg_stat_activity
			where datname = current_database() and query like 'listen%' order by 1`)
		if err != nil {
			t.Fatal(err)
		}
		if ms, err = pgx.CollectRows(rows, pgx.RowTo[int64]); err != nil {
			t.Fatal(err)
		}
		return ms
	}
	busiest := func(ms []int64) (n int) {
		for i := range ms {
			j := i
			for j < len(ms) && ms[j] < ms[i]+100 {
				j++
			}
			n = max(n, j-i)
		}
		return n
	}
	first := arrivals()
	server.Restart(t)
	await.True(t, "the losses to be noticed", func() bool {
		return !slices.ContainsFunc(all, func(l *notify.Listener) bool { return l.Status().Losses == 0 })
	})
	await.True(t, "50 proofs again", healthy)
	pool.Reset()
	again := arrivals()
	if len(again) != many {
		t.Fatalf("%d listening connections, want %d", len(again), many)
	}
	spread := time.Duration(again[many-1]-again[0]) * time.Millisecond
	t.Logf("started together: at most %d in 100ms; after the restart: over %v, at most %d in 100ms", busiest(first), spread, busiest(again))
}

func TestSilentConnectionIsReplaced(t *testing.T) {
	t.Parallel()
	server := postgres.Start(t, postgres.Options{})
	db := server.NewDatabase(t)
	pool := newPool(t, db.URL)
	blackHole := proxy.Start(t, db.URL)
	cfg := fast
	cfg.Direct, cfg.PollInterval, cfg.ProvenPollInterval = blackHole.URL(db.URL), -1, -1
	l := listen(t, pool, cfg)
	l.await(t, notify.Proven)
	for range 3 {
		losses := l.Status().Losses
		blackHole.BlackHole()
		start := time.Now()
		publish(t, pool, "unheard")
		await.True(t, "the loss to be noticed", func() bool { return l.Status().Losses > losses })
		took := time.Since(start) // its bound is shown in virtual time
		blackHole.CutAll()
		blackHole.Heal()
		l.await(t, notify.Proven)
		l.mustReceive(t, pool)
		t.Logf("noticed after %v, healthy again after %v", took, time.Since(start))
	}
	if n, want := l.kinds(notify.Resynced), int(l.Status().Losses)+1; n != want || want < 4 {
		t.Errorf("%d resyncs, want one after each connection, %d", n, want)
	}
}
