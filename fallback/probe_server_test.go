package fallback_test

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

// pairs are the PgBouncer and PostgreSQL versions that one Debian suite ships together.
var pairs = []struct{ bouncer, server string }{{"1.15", "13"}, {"1.18", "15"}, {"1.24", "17"}, {"1.26", "18"}}

func TestProbeOfDirectConnectionIsOneRoundTripAndLeavesNothing(t *testing.T) {
	t.Parallel()
	for _, version := range postgres.Versions() {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			s := postgres.Start(t, postgres.Options{Version: version})
			db := s.NewDatabase(t)
			dial, count := counted(t, db.URL)
			begin := time.Now()
			top, err := fallback.Probe(t.Context(), dial)
			took := time.Since(begin)
			if err != nil {
				t.Fatal(err)
			}
			if top.Mode != fallback.ModeDirect || top.Pooler != fallback.PoolerNone || top.Tracks || top.Pooled() || top.Strategy() != fallback.Named {
				t.Fatalf("a direct connection was taken for %v: %v", top, top.Evidence)
			}
			n := count.get()
			if n.connections != 1 || n.syncs != 1 || n.simple != 0 || n.turnarounds != 1 || n.terminates != 1 || n.open != 0 {
				t.Fatalf("want 1 connection, 1 round trip, 1 Terminate, all closed; got %+v", n)
			}
			admin := connect(t, db.URL)
			eventually(t, "the probe's session is gone", func() bool {
				return one(t, admin, "select count(*) from pg_stat_activity where application_name = '"+probeApplication+"'") == "0"
			})
			t.Logf("cell: direct PostgreSQL %s: %v, %d round trip, %d connection, %v", version, top, n.turnarounds, n.connections, took)
		})
	}
}

func TestProbeMatrix(t *testing.T) {
	t.Parallel()
	type want struct {
		mode   fallback.Mode
		tracks bool
	}
	modes := []struct {
		name, poolMode string
		prepared       int
		tracked        bool
		want           want
	}{
		{"session", "session", 100, false, want{fallback.ModeSession, false}},
		{"transaction raw", "transaction", -1, false, want{fallback.ModeTransaction, false}},
		{"transaction tracked", "transaction", 100, true, want{fallback.ModeTransaction, true}},
		{"statement raw", "statement", -1, false, want{fallback.ModeStatement, false}},
		{"statement tracked", "statement", 100, true, want{fallback.ModeStatement, true}},
	}
	for _, pair := range pairs {
		t.Run(pair.bouncer, func(t *testing.T) {
			t.Parallel()
			s := postgres.Start(t, postgres.Options{Version: pair.server})
			db := s.NewDatabase(t)
			for _, m := range modes {
				if m.tracked && (pair.bouncer == "1.15" || pair.bouncer == "1.18") {
					continue // no such setting
				}
				loads := []string{"idle", "16 busy clients", "pool of one", "round robin"}
				if testing.Short() {
					loads = loads[:1]
				}
				for _, load := range loads {
					t.Run(m.name+"/"+load, func(t *testing.T) {
						o := pgbouncer.Options{Version: pair.bouncer, PoolMode: m.poolMode, MaxPreparedStatements: m.prepared, PoolSize: 4}
						busy := 0
						switch load {
						case "16 busy clients":
							busy = 16
							if m.poolMode == "session" {
								o.PoolSize = 20 // each busy client keeps one; some must be left
							}
						case "pool of one":
							o.PoolSize = 1
						case "round robin":
							o.Settings = map[string]string{"server_round_robin": "1"}
						}
						b := pgbouncer.Start(t, s, o)
						url := b.URL(db.Name)
						stop := keepBusy(t, url, busy)
						defer stop()
						if load == "round robin" {
							occupied(t, db.URL, url, o.PoolSize) // so that there is more than one server to go round
						}
						times := 1
						if busy > 0 {
							times = 10 // which server a client gets is chance now
						}
						var top fallback.Topology
						for range times {
							dial, count := counted(t, url)
							begin := time.Now()
							var err error
							top, err = fallback.Probe(t.Context(), dial)
							took := time.Since(begin)
							if err != nil {
								t.Fatal(err)
							}
							n := count.get()
							t.Logf("cell: PgBouncer %s, %s, %s: %v; %d round trips, %d connections, %v", pair.bouncer, m.name, load, top,
								n.turnarounds, n.connections, took.Round(100*time.Microsecond))
							if top.Mode != m.want.mode || top.Tracks != m.want.tracks || !top.Pooled() {
								t.Errorf("want %v, tracks %v; got %v: %s", m.want.mode, m.want.tracks, top, strings.Join(top.Evidence, "; "))
							}
							if top.Tracks != (top.Pooler == fallback.PoolerPgBouncer) {
								t.Errorf("only the names of a tracking pooler show its make, got %v", top)
							}
							if n.turnarounds > 14 || n.syncs > 14 || n.simple != 0 || n.connections > 2 || took > 2*time.Second || n.open != 0 {
								t.Errorf("over budget: %+v in %v", n, took)
							}
						}
						stop()
						leftBehind(t, db.URL, url, b, min(o.PoolSize, 4), top)
					})
				}
			}
		})
	}
}

// leftBehind fails the test if a probe left a client, a transaction or a statement of its own anywhere.
func leftBehind(t *testing.T, direct, url string, b *pgbouncer.Bouncer, servers int, top fallback.Topology) {
	t.Helper()
	eventually(t, "the pooler has no client but the console, and no server in use", func() bool {
		clients, err := b.Admin("show clients")
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range clients {
			if c["database"] != "pgbouncer" {
				return false
			}
		}
		return one(t, connect(t, direct), "select count(*) from pg_stat_activity where datname = current_database() and state <> 'idle'"+
			" and pid <> pg_backend_pid()") == "0"
	})
	for _, names := range occupied(t, direct, url, servers) {
		for name := range strings.FieldsSeq(names) {
			if !top.Tracks || strings.HasPrefix(name, "bp_") {
				t.Errorf("the statement %q is left on a server", name)
			}
		}
	}
}

// occupied runs n queries through url that end up on n servers at once, because each waits for a lock that is held until all of them
// have arrived, and returns which names each of these servers has for the probe's text.
func occupied(t *testing.T, direct, url string, n int) []string {
	t.Helper()
	keeper := connect(t, direct)
	exec(t, keeper, "select pg_advisory_lock(4711)")
	found := make([]string, n)
	var wg sync.WaitGroup
	for i := range n {
		c := connect(t, url)
		wg.Go(func() {
			r := c.ExecParams(context.Background(), "select coalesce((select string_agg(name, ' ') from pg_prepared_statements"+
				" where statement like '%bounceproof probe%' and statement not like '%string_agg%'), '') from (select pg_advisory_xact_lock_shared(4711)) l",
				nil, nil, nil, nil).Read()
			if r.Err != nil {
				t.Errorf("server %d: %v", i, r.Err)
				return
			}
			found[i] = string(r.Rows[0][0])
			_ = c.Close(context.Background())
		})
	}
	eventually(t, fmt.Sprintf("%d servers wait for the lock", n), func() bool {
		return one(t, keeper, "select count(*) from pg_locks where locktype = 'advisory' and not granted and objid = 4711"+
			" and database = (select oid from pg_database where datname = current_database())") == strconv.Itoa(n)
	})
	exec(t, keeper, "select pg_advisory_unlock(4711)")
	wg.Wait()
	_ = keeper.Close(context.Background())
	return found
}

// keepBusy runs short queries on n connections until stop is called.
func keepBusy(t *testing.T, url string, n int) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	var started sync.WaitGroup
	for range n {
		c := connect(t, url)
		started.Add(1)
		wg.Go(func() {
			for i := 0; ; i++ {
				r := c.ExecParams(context.Background(), "select pg_backend_pid()", nil, nil, nil, nil).Read()
				if i == 0 {
					started.Done()
				}
				if r.Err != nil {
					t.Errorf("busy client: %v", r.Err)
					return
				}
				if ctx.Err() != nil {
					_ = c.Close(context.Background())
					return
				}
			}
		})
	}
	started.Wait()
	return func() { cancel(); wg.Wait() }
}

func connect(t *testing.T, url string) *pgconn.PgConn {
	t.Helper()
	c, err := pgconn.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close(context.Background()) })
	return c
}

func exec(t *testing.T, c *pgconn.PgConn, sql string) {
	t.Helper()
	if _, err := c.Exec(t.Context(), sql).ReadAll(); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

// one returns the first column of the first row as text.
func one(t *testing.T, c *pgconn.PgConn, sql string) string {
	t.Helper()
	r := c.ExecParams(t.Context(), sql, nil, nil, nil, nil).Read()
	if r.Err != nil {
		t.Fatalf("%s: %v", sql, r.Err)
	}
	return string(r.Rows[0][0])
}

func pgError(t *testing.T, err error) *pgconn.PgError {
	t.Helper()
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) {
		t.Fatalf("want an error of the server, got %v", err)
	}
	return pgErr
}

// The check of the matrix for statements left behind must be able to find one.
func TestOccupiedSeesAStatementThatIsLeftBehind(t *testing.T) {
	t.Parallel()
	s := postgres.Start(t, postgres.Options{})
	db := s.NewDatabase(t)
	b := pgbouncer.Start(t, s, pgbouncer.Options{MaxPreparedStatements: -1})
	if got := strings.Join(occupied(t, db.URL, b.URL(db.Name), 4), ""); got != "" {
		t.Fatalf("a new server has %q", got)
	}
	c := connect(t, b.URL(db.Name))
	if _, err := c.Prepare(t.Context(), "bp_left", "select 1 /* bounceproof probe */", nil); err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(occupied(t, db.URL, b.URL(db.Name), 4), ""); got != "bp_left" {
		t.Fatalf("want the statement bp_left on one of the servers, got %q", got)
	}
}

// A pooler in statement mode that tracks: a name parsed on one server works on the next, one Sync group at a time, so Topology.Strategy
// may say Named. The untracked one is the control.
func TestNamedStatementsWorkInStatementModeWhereTracked(t *testing.T) {
	t.Parallel()
	for _, pair := range pairs {
		for _, prepared := range []int{-1, 100} {
			tracked := prepared > 0 && pair.bouncer != "1.15" && pair.bouncer != "1.18"
			if prepared > 0 && !tracked {
				continue // this version cannot
			}
			t.Run(fmt.Sprintf("%s tracked %v", pair.bouncer, tracked), func(t *testing.T) {
				t.Parallel()
				s := postgres.Start(t, postgres.Options{Version: pair.server})
				db := s.NewDatabase(t)
				b := pgbouncer.Start(t, s, pgbouncer.Options{
					Version: pair.bouncer, PoolMode: "statement", MaxPreparedStatements: prepared,
					Settings: map[string]string{"server_round_robin": "1"},
				})
				url := b.URL(db.Name)
				occupied(t, db.URL, url, 4) // four servers, which now take turns
				c := connect(t, url)
				if _, err := c.Prepare(t.Context(), "bp_named", "select pg_backend_pid() + $1::int4 * 0", nil); err != nil {
					t.Fatal(err)
				}
				servers := map[string]bool{}
				var failed error
				for range 12 {
					r := c.ExecPrepared(t.Context(), "bp_named", [][]byte{[]byte("1")}, nil, nil).Read()
					if r.Err != nil {
						failed = r.Err
						break
					}
					servers[string(r.Rows[0][0])] = true
				}
				if !tracked {
					if pgError(t, failed).Code != "26000" {
						t.Fatalf("want 26000 on the next server, got %v", failed)
					}
					return
				}
				if failed != nil || len(servers) < 2 {
					t.Fatalf("error %v, %d servers", failed, len(servers))
				}
				t.Logf("PgBouncer %s, statement mode: one name served by %d servers", pair.bouncer, len(servers))
			})
		}
	}
}
