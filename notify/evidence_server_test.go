package notify_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/internal/await"
	"github.com/bounceproof/bounceproof/notify"
	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

// busyPool is a pool whose only connection is taken.
func busyPool(t *testing.T, url string) *pgxpool.Pool {
	t.Helper()
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	cfg.MaxConns = 1
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	conn, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(conn.Release)
	return pool
}

// A note that the pool cannot send goes by a connection of its own, on the way of the pool all the same.
func TestABusyPoolDoesNotProveADirectThatLeadsElsewhere(t *testing.T) {
	t.Parallel()
	s := postgres.Start(t, postgres.Options{})
	here, elsewhere := s.NewDatabase(t), s.NewDatabase(t)
	for name, direct := range map[string]string{"here": here.URL, "elsewhere": elsewhere.URL} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := listen(t, busyPool(t, here.URL), notify.ListenerConfig{Direct: direct, HeartbeatTimeout: 3 * time.Second, Reprove: time.Second})
			if name == "here" {
				l.await(t, notify.Proven) // the control
				return
			}
			await.True(t, "three attempts", func() bool { return l.Status().Connects >= 3 })
			await.True(t, "the reason", func() bool { return strings.Contains(l.Status().Reason, "another server or database") })
			if st := l.Status(); st.Proofs != 0 || l.kinds(notify.Resynced) != 0 {
				t.Errorf("it claims health: %+v", st)
			}
		})
	}
}

// A commit that waits for a standby that is gone holds the lock that every notifying commit of the cluster needs
// (async.c, PreCommit_Notify).
func TestACommitThatHoldsTheNotifyingLockMakesItUnproven(t *testing.T) {
	t.Parallel()
	server := postgres.Start(t, postgres.Options{Dedicated: true, Durable: true})
	db := server.NewDatabase(t)
	pool := newPool(t, db.URL)
	mustExec(t, pool, `create table news (id bigint generated always as identity)`)
	cfg := fast
	cfg.HeartbeatTimeout = 2 * time.Second
	l := listen(t, pool, cfg)
	l.await(t, notify.Proven)
	admin := mustConnect(t, db.URL)
	mustExec(t, admin, `alter system set synchronous_standby_names = 'nobody'`)
	mustExec(t, admin, `select pg_reload_conf()`)
	stuck := make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	conn := mustConnect(t, db.URL)
	mustExec(t, conn, `set synchronous_commit = on`)
	go func() {
		_, err := conn.Exec(ctx, `with x as (insert into news default values returning id) select pg_notify('elsewhere', id::text) from x`,
			pgx.QueryExecModeExec)
		stuck <- err
	}()
	await.True(t, "a commit that waits", func() bool {
		var n int
		err := admin.QueryRow(t.Context(), `select count(*) from pg_stat_activity where wait_event = 'SyncRep'`).Scan(&n)
		return err == nil && n == 1
	})
	start := time.Now()
	await.True(t, "the state to change", func() bool { return !l.Healthy() })
	t.Logf("unproven after %v: %s", time.Since(start), l.Status().Reason)
	for range 100 {
		if l.Healthy() {
			t.Fatal("healthy while nothing can be notified")
		}
		polled := l.kinds(notify.Polled)
		if l.kinds(notify.Polled) > polled+10 {
			break
		}
		if _, err := admin.Exec(t.Context(), `select pg_sleep(0.05)`); err != nil {
			t.Fatal(err)
		}
	}
	mustExec(t, admin, `alter system reset synchronous_standby_names`)
	mustExec(t, admin, `select pg_reload_conf()`)
	if err := <-stuck; err != nil {
		t.Error(err)
	}
	l.await(t, notify.Proven)
	if st := l.Status(); st.Connects != 1 || st.Losses != 0 {
		t.Errorf("status %+v: the connection was good all the time", st)
	}
}

// Of all that share a connection, only the one whose channel the server refuses is affected.
func TestAChannelTheServerRefusesIsItsListenersFaultAlone(t *testing.T) {
	t.Parallel()
	server := postgres.Start(t, postgres.Options{Dedicated: true})
	db := server.NewDatabase(t)
	mustExec(t, mustConnect(t, db.URL), `create database refusing encoding 'LATIN1' template template0 lc_collate 'C' lc_ctype 'C'`)
	pool := newPool(t, server.URL("refusing")+"&client_encoding=UTF8")
	first := listen(t, pool, steady)
	first.await(t, notify.Proven)

	rec := &recorder{}
	both := first.Share()
	both.Handle("☃", rec)
	both.Handle("é", rec)
	run(t, both)
	good, _ := first.share(t, "other", rec)
	await.True(t, "two resyncs", func() bool { return rec.kinds(notify.Resynced) == 2 })
	await.True(t, "two states", func() bool { return good.Healthy() && both.State() == notify.Isolated })
	if st := both.Status(); !strings.Contains(st.Reason, "☃") || !strings.Contains(st.Reason, "22P05") {
		t.Errorf("reason %q", st.Reason)
	}
	first.mustReceive(t, pool)
	for _, channel := range []string{"é", "other"} {
		mustExec(t, pool, `select pg_notify($1, 'heard')`, channel)
	}
	await.True(t, "notifications on all other channels", func() bool { return rec.kinds(notify.Notified) == 2 })
	if st := first.Status(); st.State != notify.Proven || st.Connects != 1 || st.Losses != 0 || first.warnings() != 1 ||
		!strings.Contains(first.log.All(), "encoding") {
		t.Errorf("status %+v, want one warning with a remedy:\n%s", st, first.log.All())
	}
}

func TestANotificationQueueOfAStandbyHasATrueRemedy(t *testing.T) {
	virtual(t, notify.ListenerConfig{}, func(t *testing.T, pg *scripted, l *listening) {
		l.must(t, notify.Proven)
		pg.with(func() { pg.listenErr = "25006" })
		pg.CutAll()
		time.Sleep(20 * time.Second)
		l.must(t, notify.Isolated)
		if log := l.log.All(); !strings.Contains(log, "primary") || strings.Contains(log, "session connection") {
			t.Errorf("remedy:\n%s", log)
		}
	})
}

// In session mode the listener has a server for itself. Where that is the last one, nobody else gets one, and no note can be sent.
func TestAListenerThatCannotBeProvenGivesItsServerBack(t *testing.T) {
	t.Parallel()
	server := postgres.Start(t, postgres.Options{})
	b := pgbouncer.Start(t, server, pgbouncer.Options{PoolMode: "session", PoolSize: 1})
	url := b.URL(server.NewDatabase(t).Name)
	l := listen(t, newPool(t, url), notify.ListenerConfig{HeartbeatTimeout: 2 * time.Second})
	l.await(t, notify.Isolated)
	if st := l.Status(); !strings.Contains(st.Reason, "no server") || !strings.Contains(l.log.All(), "more servers") {
		t.Errorf("reason %q, log:\n%s", st.Reason, l.log.All())
	}
	connects := l.Status().Connects
	if connects != 1 {
		t.Errorf("%d attempts before it was isolated", connects)
	}
	// Another program, for longer than the backoff between two attempts would be.
	var worst time.Duration
	for range 12 {
		start := time.Now()
		conn, err := pgx.Connect(t.Context(), url)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Exec(t.Context(), `select pg_sleep(0.5)`, pgx.QueryExecModeSimpleProtocol); err != nil {
			t.Fatal(err)
		}
		_ = conn.Close(t.Context())
		worst = max(worst, time.Since(start)-500*time.Millisecond)
	}
	if n := l.Status().Connects; n != connects {
		t.Errorf("%d attempts meanwhile, want none before Reprove", n-connects)
	}
	t.Logf("another program waits for at most %v of 6s", worst)
}

func TestAListenerGivesItsServerBackWhenHeartbeatsCannotBeSentAnyMore(t *testing.T) {
	t.Parallel()
	server := postgres.Start(t, postgres.Options{})
	b := pgbouncer.Start(t, server, pgbouncer.Options{PoolMode: "session", PoolSize: 2})
	url := b.URL(server.NewDatabase(t).Name)
	pool := newPool(t, url)
	cfg := fast
	cfg.HeartbeatTimeout, cfg.Reprove = 2*time.Second, time.Hour
	l := listen(t, pool, cfg)
	l.await(t, notify.Proven)
	pool.Reset() // its connection has the second server, and gives it to the next
	other := mustConnect(t, url)
	mustExec(t, other, `select 1`)
	third := make(chan error, 1)
	conn := mustConnect(t, url)
	go func() {
		_, err := conn.Exec(t.Context(), `select 1`, pgx.QueryExecModeSimpleProtocol)
		third <- err
	}()
	l.await(t, notify.Isolated)
	if err := <-third; err != nil {
		t.Error(err)
	}
	if reason := l.Status().Reason; !strings.Contains(reason, "no server") {
		t.Errorf("reason %q", reason)
	}
}
