package notify_test

import (
	"context"
	"log/slog"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/internal/await"
	"github.com/bounceproof/bounceproof/notify"
	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
	"github.com/bounceproof/bounceproof/testenv/postgres"
	"github.com/bounceproof/bounceproof/testenv/proxy"
)

// heartbeats is a pool that counts what heartbeats send.
type heartbeats struct {
	*pgxpool.Pool
	notes, looks, confirmed atomic.Int64
	errors                  atomic.Int64
}

func (p *heartbeats) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	tag, err := p.Pool.Exec(ctx, sql, args...)
	if err != nil {
		p.errors.Add(1)
	}
	if strings.HasPrefix(sql, "select where") {
		p.looks.Add(1)
		p.confirmed.Add(tag.RowsAffected())
	} else {
		p.notes.Add(1)
	}
	return tag, err
}

// often beats often, and a busy machine does not cost the proof.
var often = notify.ListenerConfig{Heartbeat: 2 * time.Second, HeartbeatTimeout: 20 * time.Second, PollInterval: -1, ProvenPollInterval: -1}

// mustShare shows that five listeners are proven by each other's notes.
func mustShare(t *testing.T, newPool func() *pgxpool.Pool, direct string) {
	t.Helper()
	cfg := often
	cfg.Direct, cfg.Logger = direct, slog.New(slog.DiscardHandler)
	var all []*listening
	var pools []*heartbeats
	for range 5 {
		p := &heartbeats{Pool: newPool()}
		pools = append(pools, p)
		all = append(all, listen(t, p, cfg))
	}
	sum := func(of func(*heartbeats) int64) (n int64) {
		for _, p := range pools {
			n += of(p)
		}
		return n
	}
	notes := func(p *heartbeats) int64 { return p.notes.Load() }
	confirmed := func(p *heartbeats) int64 { return p.confirmed.Load() }
	await.True(t, "a look that finds the way for each", func() bool {
		for i, p := range pools {
			if p.confirmed.Load() < 2 {
				return false
			}
			if st := all[i].Status(); st.Losses != 0 {
				t.Fatalf("status %+v", st)
			}
		}
		return true
	})
	t.Logf("%d notes and %d looks, of which %d found the way; %d errors", sum(notes), sum(func(p *heartbeats) int64 { return p.looks.Load() }), sum(confirmed),
		sum(func(p *heartbeats) int64 { return p.errors.Load() }))
	for _, l := range all {
		// Whoever was proven by others' notes hears what is published.
		l.mustReceive(t, pools[0].Pool)
	}
	var proofs int64
	for _, l := range all {
		proofs += l.Status().Proofs
	}
	if proofs <= sum(notes) {
		t.Errorf("%d proofs by %d notes", proofs, sum(notes))
	}
}

func TestListenersOfADatabaseShareTheirNotes(t *testing.T) {
	t.Parallel()
	everyPostgres(t, func(t *testing.T, s *postgres.Server) {
		db := s.NewDatabase(t)
		mustShare(t, func() *pgxpool.Pool { return newPool(t, db.URL) }, "")
	})
	everyPgBouncer(t, []string{"transaction"}, func(t *testing.T, s *postgres.Server, b *pgbouncer.Bouncer) {
		db := s.NewDatabase(t)
		mustShare(t, func() *pgxpool.Pool { return newPool(t, b.URL(db.Name)) }, db.URL)
	})
	for _, v := range pgbouncer.Versions() {
		t.Run("pgbouncer "+v+" session", func(t *testing.T) {
			t.Parallel()
			s := postgres.Start(t, postgres.Options{})
			b := pgbouncer.Start(t, s, pgbouncer.Options{Version: v, PoolMode: "session", PoolSize: 20})
			db := s.NewDatabase(t)
			mustShare(t, func() *pgxpool.Pool { return newPool(t, b.URL(db.Name)) }, "")
			conn := mustConnect(t, db.URL)
			var common, own int
			// What a pooled connection has listened on for its first note is not listened on any more: nobody hears it.
			const sql = `select count(*) filter (where query like '%listen "bounceproof_proof"%'), count(*) filter (where query like '%unlisten "bounceproof_%')
				from pg_stat_activity where datname = current_database() and query like 'listen%'`
			if err := conn.QueryRow(t.Context(), sql).Scan(&common, &own); err != nil {
				t.Fatal(err)
			}
			if common != 5 || own != 5 {
				t.Errorf("%d of 5 listen on the common channel, %d not on their own", common, own)
			}
		})
	}
}

// Two servers and two databases are told apart by every statement of a look, and one is recognised.
func TestALookTellsServersAndDatabasesApart(t *testing.T) {
	t.Parallel()
	everyPostgres(t, func(t *testing.T, s *postgres.Server) {
		here, database := s.NewDatabase(t), s.NewDatabase(t)
		server := postgres.Start(t, postgres.Options{Version: s.Version(), Dedicated: true}).NewDatabase(t)
		conn := mustConnect(t, here.URL)
		mustExec(t, conn, `listen bounceproof_proof`)
		mustExec(t, newPool(t, here.URL), notify.NoteSQL, "bounceproof_proof", "token")
		n, err := conn.WaitForNotification(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		stamp := strings.SplitN(n.Payload, " ", 3)
		if len(stamp) != 3 || stamp[0] != "token" {
			t.Fatalf("payload %q", n.Payload)
		}
		for name, c := range map[string]struct {
			url, oldest string
			want        int64
		}{
			"here":             {here.URL, "60000000", 1},
			"another database": {database.URL, "60000000", 0},
			"another server":   {server.URL, "60000000", 0},
			"too late":         {here.URL, "0", 0},
		} {
			tag, err := newPool(t, c.url).Exec(t.Context(), notify.LookSQL, stamp[2], stamp[1], c.oldest)
			if err != nil || tag.RowsAffected() != c.want {
				t.Errorf("%s: %v, %v, want %d rows", name, tag, err, c.want)
			}
		}
	})
}

// A role that may not ask who the server is proves delivery all the same.
func TestARoleThatMayNotAskWhoTheServerIs(t *testing.T) {
	t.Parallel()
	s := postgres.Start(t, postgres.Options{Dedicated: true})
	db := s.NewDatabase(t)
	admin := mustConnect(t, db.URL)
	for _, sql := range []string{`create role limited login password '` + postgres.Password() + `'`, `revoke execute on function pg_postmaster_start_time() from public`} {
		mustExec(t, admin, sql)
	}
	u, err := url.Parse(db.URL)
	if err != nil {
		t.Fatal(err)
	}
	u.User = url.User("limited")
	p := &heartbeats{Pool: newPool(t, u.String())}
	l := listen(t, p, often)
	l.await(t, notify.Proven)
	await.True(t, "four proofs", func() bool { return l.Status().Proofs >= 4 })
	l.mustReceive(t, p.Pool)
	if n := p.errors.Load(); n != 1 || p.looks.Load() != 0 {
		t.Errorf("%d errors, want the first statement's alone; %d looks", n, p.looks.Load())
	}
}

// The address of a pool leads elsewhere, while notes of other listeners go on being heard by way of Direct.
func TestAPoolThatLeavesTheListenersServer(t *testing.T) {
	t.Parallel()
	primary := postgres.Start(t, postgres.Options{Dedicated: true})
	db := primary.NewDatabase(t)
	standby := primary.NewStandby(t, "", nil)
	primary.AwaitStreaming(t, standby)
	another := postgres.Start(t, postgres.Options{Version: "17"})
	mustExec(t, mustConnect(t, another.URL("postgres")), `create database "`+db.Name+`"`)

	cfg := often
	cfg.HeartbeatTimeout, cfg.Reprove = 5*time.Second, time.Hour
	others := listen(t, newPool(t, db.URL), cfg)
	others.await(t, notify.Proven)
	for name, c := range map[string]struct {
		to    *postgres.Server
		state notify.State
		want  string // in the reason or the log
	}{
		"to the same server": {primary, notify.Proven, ""},
		"to its standby":     {standby, notify.Unknown, "lead to the primary"},
		"to another server":  {another, notify.Isolated, "another server or database"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			way := proxy.Start(t, db.URL)
			pool := &heartbeats{Pool: newPool(t, way.URL(db.URL))}
			moved := cfg
			moved.Direct = db.URL
			l := listen(t, pool, moved)
			l.await(t, notify.Proven)
			await.True(t, "proofs by notes of others", func() bool { return pool.confirmed.Load() >= 2 })
			way.Redirect(c.to.URL(db.Name))
			way.CutAll()
			before := pool.confirmed.Load()
			if c.state == notify.Proven {
				await.True(t, "proofs by notes of others", func() bool { return pool.confirmed.Load() >= before+2 })
				if st := l.Status(); st.Losses != 0 || st.State != notify.Proven {
					t.Errorf("status %+v", st)
				}
				return
			}
			l.await(t, c.state)
			if said := l.Status().Reason + l.log.All(); !strings.Contains(said, c.want) {
				t.Errorf("want %q: %s", c.want, said)
			}
			if n := pool.confirmed.Load() - before; n > 0 {
				t.Errorf("%d looks found the way", n)
			}
			if !others.Healthy() {
				t.Errorf("the others: %+v", others.Status())
			}
		})
	}
}
