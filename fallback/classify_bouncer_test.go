package fallback_test

import (
	"context"
	"fmt"
	"net"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/internal/await"
	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
	"github.com/bounceproof/bounceproof/testenv/place"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

// startBouncer starts a PgBouncer of a version in front of the PostgreSQL of its Debian suite.
func startBouncer(t *testing.T, m place.Mode, version string, change ...func(*pgbouncer.Options)) *place.Running {
	t.Helper()
	for _, p := range place.Suites(m) {
		if p.Bouncer == version {
			return p.Start(t, append([]func(*pgbouncer.Options){func(o *pgbouncer.Options) { o.Settings = nil }}, change...)...)
		}
	}
	t.Fatalf("no such version: %s", version)
	return nil
}

// setting changes one setting of PgBouncer's.
func setting(key, value string) func(*pgbouncer.Options) {
	return func(o *pgbouncer.Options) { o.Settings = map[string]string{key: value} }
}

func pin(t *testing.T, b *pgbouncer.Bouncer, url string) (release func()) {
	t.Helper()
	release, err := b.Pin(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(release)
	return release
}

// paths are the ways in which pgconn sends something; they lose different things when a connection ends.
var paths = []struct {
	name string
	send func(c *client, sql string) error
}{
	{"ExecParams", func(c *client, sql string) error { return c.run(sql) }},
	{"Exec", (*client).simple},
	{"Prepare", func(c *client, sql string) error {
		_, err := c.Prepare(context.Background(), "bp_path", sql, nil)
		return err
	}},
	{"Pipeline", func(c *client, sql string) error {
		p := c.StartPipeline(context.Background())
		p.SendQueryParams(sql, nil, nil, nil, nil)
		if err := p.Sync(); err != nil {
			return err
		}
		var first error
		for {
			r, err := p.GetResults()
			if rr, ok := r.(*pgconn.ResultReader); ok && err == nil {
				_, err = rr.Close()
			}
			if err != nil && first == nil {
				first = err
			}
			if r == nil {
				break
			}
		}
		_ = p.Close()
		return first
	}},
}

func TestClassifyRealPgBouncerRaw(t *testing.T) {
	t.Parallel()
	for _, suite := range place.Suites(place.TransactionRaw) {
		t.Run(suite.Bouncer, func(t *testing.T) {
			t.Parallel()
			r := startBouncer(t, place.TransactionRaw, suite.Bouncer)
			c := newClient(t, r.URL)
			c.prepare(t, ours, "select $1::int8")
			release := pin(t, r.Bouncer, r.URL) // the server that has the name
			c.expect(t, "26000 on another server", c.bind(ours, "1"), learnt(raw, 1, int8OID), lost)
			c.prepare(t, ours, "select $1::int8")
			release()
			_, err := c.Prepare(t.Context(), ours, "select $1::int8", nil)
			c.expect(t, "42P05 on a server that has it", err, learnt(raw, 1, int8OID), lost)
			raise := `do $$ begin raise exception using errcode = '26000', message = 'prepared statement "` + ours + `" does not exist'; end $$`
			c.expect(t, "RAISE 26000", c.run(raise), learnt(raw, 1, int8OID), own)
		})
	}
}

func TestClassifyRealPgBouncerTracking(t *testing.T) {
	t.Parallel()
	for _, version := range []string{"1.24", "1.26"} {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			r := startBouncer(t, place.TransactionTracked, version)
			exec(t, connect(t, r.DB.URL), "create table t (id int8, a int8)")

			c := newClient(t, r.URL)
			c.expect(t, "Bind of an unknown name", c.bind(ours, "1"), learnt(tracking, 1, int8OID), poolerLost)
			c = newClient(t, r.URL)
			c.prepare(t, ours, "select $1::int8")
			_, err := c.Prepare(t.Context(), ours, "select $1::int8", nil)
			c.expect(t, "Parse of a known name", err, learnt(tracking, 1, int8OID), poolerLost)

			// Another client's DEALLOCATE on the server under PgBouncer's own name.
			c = newClient(t, r.URL)
			c.prepare(t, ours, "select $1::int8 + 1")
			name := one(t, connect(t, r.URL), "select name from pg_prepared_statements where statement = 'select $1::int8 + 1'")
			exec(t, connect(t, r.URL), fmt.Sprintf(`deallocate "%s"`, name))
			c.expect(t, "26000 of "+name, c.bind(ours, "1"), learnt(tracking, 1, int8OID), lost)

			c = newClient(t, r.URL)
			c.prepare(t, "bp_plan", "select * from t where id = $1")
			exec(t, connect(t, r.DB.URL), "alter table t alter a type float8")
			c.expect(t, "0A000", c.bind("bp_plan", "1"), learnt(tracking, 2, int8OID),
				verdict{fallback.ReasonStalePlan, fallback.No, fallback.Alive, fallback.RunUnprepared, no})
			raise := `do $$ begin raise exception using errcode = '08P01', message = 'prepared statement did not exist'; end $$`
			c.expect(t, "RAISE 08P01 with PgBouncer's words", c.run(raise), learnt(tracking, 1), own)

			// After DDL a server that has never seen the name parses it anew, with other columns.
			c = newClient(t, r.URL)
			c.prepare(t, "bp_cols", "select * from t")
			exec(t, connect(t, r.DB.URL), "alter table t drop a")
			pin(t, r.Bouncer, r.URL)
			_, err = c.ExecPrepared(t.Context(), "bp_cols", nil, nil, []int16{1, 1}).Close()
			c.expect(t, "result formats on another server", err, learnt(tracking, 2), stale)
		})
	}
}

// The ends of a connection, by each of pgconn's ways to send: on 1.15 they come as ERROR with the socket closed behind them.
func TestClassifyRealPgBouncerEnds(t *testing.T) {
	t.Parallel()
	for _, suite := range place.Suites(place.TransactionRaw) {
		t.Run(suite.Bouncer, func(t *testing.T) {
			t.Parallel()
			if testing.Short() {
				t.Skip("each takes a second or two of the pooler's time")
			}
			t.Run("statement mode", func(t *testing.T) {
				t.Parallel()
				r := startBouncer(t, place.Statement, suite.Bouncer)
				for _, path := range paths {
					if path.name == "Prepare" {
						continue // does not run it
					}
					c := newClient(t, r.URL)
					err := path.send(c, "begin")
					c.expect(t, "BEGIN by "+path.name, err, with(learnt(session, 0), phase(fallback.PhaseBegin)), noStatement)
				}
			})
			t.Run("query_wait_timeout", func(t *testing.T) {
				t.Parallel()
				r := startBouncer(t, place.TransactionRaw, suite.Bouncer, func(o *pgbouncer.Options) { o.PoolSize = 1 }, setting("query_wait_timeout", "1"))
				pin(t, r.Bouncer, r.URL)
				byEveryPath(t, r.URL, "select 1", nil, learnt(raw, 1), busy)
			})
			t.Run("query_timeout", func(t *testing.T) {
				t.Parallel()
				r := startBouncer(t, place.TransactionRaw, suite.Bouncer, setting("query_timeout", "1"))
				byEveryPath(t, r.URL, "select pg_sleep(60)", nil, learnt(raw, 1), unknown)
			})
			t.Run("idle_transaction_timeout", func(t *testing.T) {
				t.Parallel()
				r := startBouncer(t, place.TransactionRaw, suite.Bouncer, setting("idle_transaction_timeout", "1"))
				byEveryPath(t, r.URL, "select 1", idling(t, r.Bouncer, "begin"), with(learnt(raw, 1), phase(fallback.PhaseInside)), verdict{fallback.ReasonTxLost, fallback.No, fallback.Dead, fallback.Return, no})
			})
			t.Run("client_idle_timeout", func(t *testing.T) {
				t.Parallel()
				r := startBouncer(t, place.TransactionRaw, suite.Bouncer, setting("client_idle_timeout", "1"))
				byEveryPath(t, r.URL, "select 1", idling(t, r.Bouncer, "select 1"), learnt(raw, 1), verdict{fallback.ReasonNotSent, fallback.No, fallback.Dead, fallback.RunElsewhere, no})
			})
			t.Run("the server's end", func(t *testing.T) {
				t.Parallel()
				r := startBouncer(t, place.TransactionRaw, suite.Bouncer)
				admin := connect(t, r.DB.URL)
				for _, path := range paths {
					if path.name == "Prepare" {
						continue
					}
					c := newClient(t, r.URL)
					ended := make(chan error, 1)
					go func() { ended <- path.send(c, "select pg_sleep(60) /* "+path.name+" */") }()
					await.True(t, "it sleeps", func() bool {
						return one(t, admin, "select count(*) from pg_stat_activity where state = 'active' and query like '%pg_sleep(60) /* "+path.name+" */' and pid <> pg_backend_pid()") == "1"
					})
					exec(t, admin, "select pg_terminate_backend(pid) from pg_stat_activity where state = 'active' and query like '%pg_sleep(60) /* "+path.name+" */' and pid <> pg_backend_pid()")
					v := c.classify(t, "terminated by "+path.name, <-ended, learnt(raw, 1))
					if v.Executed != fallback.Maybe || v.Action != fallback.Return || v.Connection != fallback.Dead || !v.OutcomeUnknown() || v.Evidence {
						t.Errorf("what may have run must not run again: %v", v)
					}
				}
			})
			t.Run("administration", func(t *testing.T) {
				t.Parallel()
				r := startBouncer(t, place.TransactionRaw, suite.Bouncer)
				c := newClient(t, r.URL)
				database := one(t, c.PgConn, "select current_database()")
				ended := make(chan error, 1)
				go func() { ended <- c.run("select pg_sleep(60)") }()
				await.True(t, "it sleeps", func() bool {
					rows, err := r.Bouncer.Admin("show servers")
					if err != nil {
						t.Fatal(err)
					}
					return len(rows) == 1 && rows[0]["state"] == "active"
				})
				if _, err := r.Bouncer.Admin("kill " + database); err != nil {
					t.Fatal(err)
				}
				c.expect(t, "KILL", <-ended, learnt(raw, 1), unknown)
			})
			t.Run("login", func(t *testing.T) {
				t.Parallel()
				r := startBouncer(t, place.TransactionRaw, suite.Bouncer, setting("max_client_conn", "12"))
				c, err := dialClient(t, r.URL, func(c *pgconn.Config) { c.RuntimeParams["statement_timeout"] = "1000" })
				c.expectLogin(t, "startup parameter", err, config)
				c, err = dialClient(t, r.URL, func(c *pgconn.Config) { c.RuntimeParams["options"] = "--no-such-thing" })
				c.expectLogin(t, "options", err, config)
				c, err = dialClient(t, r.URL, func(c *pgconn.Config) { c.User = "nobody_at_all" })
				c.expectLogin(t, "no such user", err, config)
				c, err = dialClient(t, r.Bouncer.URL("no_such_database"), nil)
				if err == nil {
					err = c.run("select 1") // the wildcard entry lets it log in; the server then refuses
				}
				v := fallback.Classify(c.seen(err), with(learnt(raw, 1), closed))
				t.Logf("no such database: %v (%v)", v, err)
				if v.Executed != fallback.No || v.Evidence {
					t.Errorf("no such database: %v (%v)", v, err)
				}
				err = nil
				for i := 0; err == nil && i < 14; i++ {
					_, err = dialClient(t, r.URL, nil)
				}
				c.expectLogin(t, "one too many", err, busy)
			})
			t.Run("server down", func(t *testing.T) {
				t.Parallel()
				s := postgres.Start(t, postgres.Options{Version: suite.Server, Dedicated: true})
				r := suite.StartOn(t, s, func(o *pgbouncer.Options) {
					o.Settings = map[string]string{
						"server_login_retry": "3", "query_wait_timeout": "2", "server_fast_close": "1",
					}
				})
				before := newClient(t, r.URL)
				exec(t, before.PgConn, "select 1")
				s.Stop(t)
				for i := range 3 {
					err := before.run("select 1")
					v := before.classify(t, fmt.Sprintf("request %d", i+1), err, learnt(raw, 1))
					if v.Action != fallback.Return && v.Action != fallback.RunLater || v.Evidence {
						t.Errorf("%v", v)
					}
					c, err := dialClient(t, r.URL, nil)
					if err != nil {
						c.expectLogin(t, "login while the server is down", err, busy)
						return
					}
					before = c
				}
			})
		})
	}
}

// byEveryPath readies one client for each path, sends sql on all of them at once, and compares the verdicts. Parse alone does not run
// anything, so it is left out where the end has to come while something runs.
func byEveryPath(t *testing.T, url, sql string, ready func([]*client), ctx fallback.Context, want verdict) {
	t.Helper()
	clients, errs := make([]*client, len(paths)), make([]error, len(paths))
	for i := range paths {
		clients[i] = newClient(t, url)
	}
	if ready != nil {
		ready(clients)
	}
	var wg sync.WaitGroup
	for i, path := range paths {
		if path.name == "Prepare" && want == unknown {
			continue
		}
		wg.Go(func() { errs[i] = path.send(clients[i], sql) })
	}
	wg.Wait()
	for i, path := range paths {
		if path.name == "Prepare" && want == unknown {
			continue
		}
		clients[i].expect(t, path.name, errs[i], ctx, want)
	}
}

// idling runs sql on all clients and leaves them alone until PgBouncer has ended them.
func idling(t *testing.T, b *pgbouncer.Bouncer, sql string) func([]*client) {
	return func(clients []*client) {
		t.Helper()
		for _, c := range clients {
			exec(t, c.PgConn, sql)
		}
		for _, c := range clients {
			await.True(t, "PgBouncer has ended an idle client", func() bool { return dropped(t, b, c) })
		}
	}
}

// dropped reports whether PgBouncer no longer knows a client. It looks at PgBouncer, because reading from the client would swallow the
// message that is waiting there.
func dropped(t *testing.T, b *pgbouncer.Bouncer, c *client) bool {
	t.Helper()
	rows, err := b.Admin("show clients")
	if err != nil {
		t.Fatal(err)
	}
	_, port, err := net.SplitHostPort(c.Conn().LocalAddr().String())
	if err != nil {
		t.Fatal(err)
	}
	for _, row := range rows {
		if row["port"] == port {
			return false
		}
	}
	return true
}
