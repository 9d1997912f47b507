package notify_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/internal/await"
	"github.com/bounceproof/bounceproof/internal/logrec"
	"github.com/bounceproof/bounceproof/notify"
	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
	"github.com/bounceproof/bounceproof/testenv/postgres"
	"github.com/bounceproof/bounceproof/testenv/proxy"
)

// follower is a subscriber as one should be: each event makes it look at the table.
type follower struct {
	name string
	*notify.Listener
	db *pgxpool.Pool

	seen   atomic.Int64 // the newest row it has seen
	kinds  [4]atomic.Int64
	proven atomic.Int64 // rows first seen through a notification
}

func (f *follower) HandleEvent(ctx context.Context, e notify.Event) {
	f.kinds[e.Kind].Add(1)
	var newest int64
	if err := f.db.QueryRow(ctx, `select coalesce(max(id), 0) from news`).Scan(&newest); err != nil {
		return // the next event finds it
	}
	if newest > f.seen.Load() {
		f.seen.Store(newest)
		if e.Kind == notify.Notified {
			f.proven.Add(1)
		}
	}
}

// Nothing is lost: 50 publishers, listeners whose connections are killed, dropped, cut off and silenced. After the last
// publish every subscriber gets a wake-up that came after it.
//
// NOTIFY_ENDURANCE sets how long the disorder lasts; the default is short enough for every run.
func TestNothingIsLostWhileConnectionsDie(t *testing.T) {
	t.Parallel()
	lasts := 12 * time.Second
	if s := os.Getenv("NOTIFY_ENDURANCE"); s != "" {
		var err error
		if lasts, err = time.ParseDuration(s); err != nil {
			t.Fatal(err)
		}
	}
	server := postgres.Start(t, postgres.Options{})
	session := pgbouncer.Start(t, server, pgbouncer.Options{PoolMode: "session", PoolSize: 40})
	transaction := pgbouncer.Start(t, server, pgbouncer.Options{PoolMode: "transaction", PoolSize: 10})
	db := server.NewDatabase(t)
	direct := newPool(t, db.URL)
	if _, err := direct.Exec(t.Context(), `create table news (id bigint generated always as identity, at timestamptz default clock_timestamp())`); err != nil {
		t.Fatal(err)
	}
	pooled := newPool(t, transaction.URL(db.Name))
	blackHole := proxy.Start(t, db.URL)

	sender := newSender(t, pooled, notify.SenderConfig{})
	log := &logrec.Recorder{}
	cfg := notify.ListenerConfig{
		Heartbeat: time.Second, HeartbeatTimeout: 2 * time.Second, Reprove: time.Second,
		ReconnectMin: 200 * time.Millisecond, ReconnectMax: 2 * time.Second,
		ProvenPollInterval: -1, // so that what is seen while proven was notified
		Logger:             log.Logger(),
	}
	var followers []*follower
	follow := func(name string, pool notify.Pool, change func(*notify.ListenerConfig)) {
		cfg := cfg
		change(&cfg)
		l, err := notify.NewListener(pool, cfg)
		if err != nil {
			t.Fatal(err)
		}
		f := &follower{name: name, Listener: l, db: direct}
		l.Handle("news", f)
		run(t, l)
		followers = append(followers, f)
	}
	for i := range 2 {
		follow(fmt.Sprint("direct ", i), direct, func(*notify.ListenerConfig) {})
		follow(fmt.Sprint("proxy ", i), pooled, func(c *notify.ListenerConfig) { c.Direct = blackHole.URL(db.URL) })
		follow(fmt.Sprint("session ", i), pooled, func(c *notify.ListenerConfig) { c.Direct = session.URL(db.Name) })
		follow(fmt.Sprint("transaction ", i), pooled, func(*notify.ListenerConfig) {})
	}
	for _, f := range followers {
		want := notify.Proven
		if f.name[0] == 't' {
			want = notify.Isolated
		}
		await.True(t, f.name+" to be "+want.String(), func() bool { return f.State() == want })
	}

	// The disorder.
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	began := time.Now()
	var wg sync.WaitGroup
	var killed atomic.Int64
	var kills [4]atomic.Int64
	disorder := func(i int, every time.Duration, act func()) {
		wg.Go(func() {
			for {
				select {
				case <-ctx.Done():
					return
				case <-time.After(every/2 + rand.N(every)):
				}
				act()
				kills[i].Add(1)
			}
		})
	}
	disorder(0, time.Second, func() {
		tag, err := direct.Exec(ctx, `select pg_terminate_backend(pid) from (select pid from pg_stat_activity
			where datname = current_database() and query like 'listen%' order by random() limit 2) x`)
		if err == nil {
			killed.Add(tag.RowsAffected())
		}
	})
	disorder(1, time.Second, func() {
		blackHole.BlackHole()
		select {
		case <-ctx.Done():
		case <-time.After(4 * time.Second): // longer than Heartbeat and HeartbeatTimeout
		}
		blackHole.CutAll()
		blackHole.Heal()
	})
	// One goroutine for both, for a PgBouncer that is down takes no KILL.
	disorder(2, 3*time.Second, func() {
		if kills[2].Load()%2 == 0 {
			session.Kill(t)
			session.Start(t)
			return
		}
		for _, sql := range []string{"kill " + db.Name, "resume " + db.Name} {
			if _, err := session.Admin(sql); err != nil {
				t.Errorf("%s: %v", sql, err)
			}
		}
		kills[3].Add(1)
	})

	// The publishers: each commits, then notifies.
	var published atomic.Int64
	for range 50 {
		wg.Go(func() {
			for ctx.Err() == nil {
				if _, err := pooled.Exec(context.WithoutCancel(ctx), `insert into news default values`); err != nil {
					continue // not committed, nothing to announce
				}
				published.Add(1)
				if err := sender.Notify("news", ""); err != nil {
					t.Error(err)
				}
				select {
				case <-ctx.Done():
				case <-time.After(rand.N(20 * time.Millisecond)):
				}
			}
		})
	}
	// It lasts its time, and on a slow machine until something has been shown.
	for ; time.Since(began) < lasts; time.Sleep(50 * time.Millisecond) {
	}
	await.True(t, "every kind of loss, twice, everybody's, and 200 events", func() bool {
		for _, f := range followers {
			if f.name[0] != 't' && f.Status().Losses == 0 {
				return false
			}
		}
		return kills[0].Load() > 1 && kills[1].Load() > 1 && kills[2].Load() > 1 && published.Load() > 200
	})
	cancel()
	wg.Wait()
	end := time.Now()
	var newest int64
	if err := direct.QueryRow(t.Context(), `select max(id) from news`).Scan(&newest); err != nil {
		t.Fatal(err)
	}
	for _, f := range followers {
		await.True(t, fmt.Sprintf("%s (%v) to see the last event", f.name, f.Status()), func() bool { return f.seen.Load() == newest })
	}
	t.Logf("%d events, %d statements of the sender; all seen %v after the last; %d backends terminated, %d times silenced, %d SIGKILL, %d KILL",
		published.Load(), sender.Stats().Statements, time.Since(end), killed.Load(), kills[1].Load(), kills[2].Load()-kills[3].Load(), kills[3].Load())
	for _, f := range followers {
		st := f.Status()
		t.Logf("%-14s notified %4d polled %3d resynced %3d; connections %3d lost %3d; news first seen by notification %d times", f.name,
			f.kinds[notify.Notified].Load(), f.kinds[notify.Polled].Load(), f.kinds[notify.Resynced].Load(), st.Connects, st.Losses, f.proven.Load())
	}
	if err := sender.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if took := time.Since(began); sender.Stats().Statements > int64(took/(10*time.Millisecond))+1 {
		t.Errorf("%d statements in %v", sender.Stats().Statements, took)
	}
}
