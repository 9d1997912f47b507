package fallback_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/internal/await"
	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
	"github.com/bounceproof/bounceproof/testenv/place"
	"github.com/bounceproof/bounceproof/testenv/postgres"
	"github.com/bounceproof/bounceproof/testenv/proxy"
)

const probeApplication = "bounceproof probe under test"

func TestProbeOfDirectConnectionIsOneRoundTripAndLeavesNothing(t *testing.T) {
	t.Parallel()
	for _, version := range postgres.Versions() {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			r := place.New(place.Direct, "", version).Start(t)
			dial, count := counted(t, r.URL)
			top, err := fallback.Probe(t.Context(), dial)
			if err != nil {
				t.Fatal(err)
			}
			if top.Mode != fallback.ModeDirect || top.Pooler != fallback.PoolerNone || top.Tracks || top.Pooled() || top.Strategy() != fallback.Named {
				t.Fatalf("a direct connection was taken for %v: %v", top, top.Evidence)
			}
			await.True(t, "the connection has ended", func() bool { return count.Open() == 0 })
			n, connections := count.Counts(), len(count.Connections())
			if connections != 1 || n.Syncs != 1 || n.Frontend['Q'] != 0 || n.RoundTrips != 1 || n.Frontend['X'] != 1 {
				t.Fatalf("want 1 connection, 1 round trip, 1 Terminate; got %d connections, %+v", connections, n)
			}
			admin := connect(t, r.DB.URL)
			await.True(t, "the probe's session is gone", func() bool {
				return one(t, admin, "select count(*) from pg_stat_activity where application_name = '"+probeApplication+"'") == "0"
			})
			t.Logf("cell: direct PostgreSQL %s: %v, %d round trip, %d connection", version, top, n.RoundTrips, connections)
		})
	}
}

func TestProbeMatrix(t *testing.T) {
	t.Parallel()
	type want struct {
		mode   fallback.Mode
		tracks bool
	}
	// What each mode is taken for.
	wants := map[place.Mode]want{
		place.Session:            {fallback.ModeSession, false},
		place.TransactionRaw:     {fallback.ModeTransaction, false},
		place.TransactionTracked: {fallback.ModeTransaction, true},
		place.Statement:          {fallback.ModeStatement, false},
		place.StatementTracked:   {fallback.ModeStatement, true},
	}
	for _, suite := range place.Suites(place.TransactionRaw) {
		t.Run(suite.Bouncer, func(t *testing.T) {
			t.Parallel()
			s := postgres.Start(t, postgres.Options{Version: suite.Server})
			db := s.NewDatabase(t)
			for _, p := range place.Matrix() {
				if p.Mode == place.Direct || p.Bouncer != suite.Bouncer || p.Server != suite.Server {
					continue
				}
				w := wants[p.Mode]
				loads := []string{"idle", "16 busy clients", "pool of one", "round robin"}
				if testing.Short() {
					loads = loads[:1]
				}
				for _, load := range loads {
					t.Run(string(p.Mode)+"/"+load, func(t *testing.T) {
						size, busy := 4, 0
						switch load {
						case "16 busy clients":
							busy = 16
							if p.Mode == place.Session {
								size = 20 // each busy client keeps one; some must be left
							}
						case "pool of one":
							size = 1
						}
						r := p.StartFor(t, s, db, func(o *pgbouncer.Options) {
							o.PoolSize = size
							if p.Mode == place.Session {
								o.MaxPreparedStatements = 100 // it keeps track only where it shares servers
							}
							if load != "round robin" {
								o.Settings = nil
							}
						})
						stop := keepBusy(t, r.URL, busy)
						defer stop()
						if load == "round robin" {
							statementsOf(t, r, size) // so that there is more than one server to go round
						}
						times := 1
						if busy > 0 {
							times = 10 // which server a client gets is chance now
						}
						var top fallback.Topology
						for range times {
							dial, count := counted(t, r.URL)
							var err error
							top, err = fallback.Probe(t.Context(), dial)
							if err != nil {
								t.Fatal(err)
							}
							n, connections := count.Counts(), len(count.Connections())
							t.Logf("cell: %v, %s: %v; %d round trips, %d connections", p, load, top, n.RoundTrips, connections)
							if top.Mode != w.mode || top.Tracks != w.tracks || !top.Pooled() {
								t.Errorf("want %v, tracks %v; got %v: %s", w.mode, w.tracks, top, strings.Join(top.Evidence, "; "))
							}
							if top.Tracks != (top.Pooler == fallback.PoolerPgBouncer) {
								t.Errorf("only the names of a tracking pooler show its make, got %v", top)
							}
							if n.RoundTrips > 14 || n.Syncs > 14 || n.Frontend['Q'] != 0 || connections > 2 {
								t.Errorf("over budget: %d connections, %+v", connections, n)
							}
							await.True(t, "the connections have ended", func() bool { return count.Open() == 0 })
						}
						stop()
						leftBehind(t, r, min(size, 4), top)
					})
				}
			}
		})
	}
}

// leftBehind fails the test if a probe left a client, a transaction or a statement of its own anywhere.
func leftBehind(t *testing.T, r *place.Running, servers int, top fallback.Topology) {
	t.Helper()
	await.True(t, "the pooler has no client but the console, and no server in use", func() bool {
		clients, err := r.Bouncer.Admin("show clients")
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range clients {
			if c["database"] != "pgbouncer" {
				return false
			}
		}
		return one(t, connect(t, r.DB.URL), "select count(*) from pg_stat_activity where datname = current_database() and state <> 'idle'"+
			" and pid <> pg_backend_pid()") == "0"
	})
	for _, names := range statementsOf(t, r, servers) {
		for name := range strings.FieldsSeq(names) {
			if !top.Tracks || strings.HasPrefix(name, "bp_") {
				t.Errorf("the statement %q is left on a server", name)
			}
		}
	}
}

// statementsOf returns which names each of n servers has for the probe's text.
func statementsOf(t *testing.T, r *place.Running, n int) []string {
	t.Helper()
	return r.OnServers(t, n, "coalesce((select string_agg(name, ' ') from pg_prepared_statements"+
		" where statement like '%bounceproof probe%' and statement not like '%string_agg%'), '')")
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
func TestAStatementThatIsLeftBehindIsSeen(t *testing.T) {
	t.Parallel()
	r := place.New(place.TransactionRaw, "", "").Start(t)
	if got := strings.Join(statementsOf(t, r, 4), ""); got != "" {
		t.Fatalf("a new server has %q", got)
	}
	c := connect(t, r.URL)
	if _, err := c.Prepare(t.Context(), "bp_left", "select 1 /* bounceproof probe */", nil); err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(statementsOf(t, r, 4), ""); got != "bp_left" {
		t.Fatalf("want the statement bp_left on one of the servers, got %q", got)
	}
}

// A pooler in statement mode that tracks: a name parsed on one server works on the next, one Sync group at a time, so Topology.Strategy
// may say Named. The untracked one is the control.
func TestNamedStatementsWorkInStatementModeWhereTracked(t *testing.T) {
	t.Parallel()
	for _, p := range slices.Concat(place.Suites(place.Statement), place.Suites(place.StatementTracked)) {
		t.Run(p.String(), func(t *testing.T) {
			t.Parallel()
			r := p.Start(t)
			r.OnServers(t, 4, "1") // four servers, which now take turns
			c := connect(t, r.URL)
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
			if p.Mode == place.Statement {
				if pgError(t, failed).Code != "26000" {
					t.Fatalf("want 26000 on the next server, got %v", failed)
				}
				return
			}
			if failed != nil || len(servers) < 2 {
				t.Fatalf("error %v, %d servers", failed, len(servers))
			}
			t.Logf("%v: one name served by %d servers", p, len(servers))
		})
	}
}

// counted returns a dial function for url, and the proxy on its way, which counts.
func counted(t *testing.T, url string) (func(context.Context) (*pgconn.PgConn, error), *proxy.Proxy) {
	t.Helper()
	px := proxy.Start(t, url)
	return fallback.Dialer(func(context.Context) (*pgconn.Config, error) {
		config, err := pgconn.ParseConfig(px.URL(url))
		if err == nil {
			config.RuntimeParams["application_name"] = probeApplication
		}
		return config, err
	}), px
}
