package fallback_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"

	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/internal/await"
	"github.com/bounceproof/bounceproof/testenv/place"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

// client is a connection that records what OnPgError sees, as a caller of Classify does.
type client struct {
	*pgconn.PgConn
	last *pgconn.PgError
}

func dialClient(t *testing.T, url string, change func(*pgconn.Config)) (*client, error) {
	t.Helper()
	config, err := pgconn.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	c := &client{}
	onPgError := config.OnPgError
	config.OnPgError = func(conn *pgconn.PgConn, e *pgconn.PgError) bool {
		c.last = e
		return onPgError(conn, e)
	}
	config.BuildContextWatcherHandler = func(conn *pgconn.PgConn) ctxwatch.Handler {
		return &pgconn.CancelRequestContextWatcherHandler{Conn: conn, DeadlineDelay: await.Deadline}
	}
	if change != nil {
		change(config)
	}
	c.PgConn, err = pgconn.ConnectConfig(t.Context(), config)
	if err == nil {
		t.Cleanup(func() { _ = c.Close(context.Background()) })
	}
	return c, err
}

func newClient(t *testing.T, url string) *client {
	t.Helper()
	c, err := dialClient(t, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// seen joins an error of a closed socket with what OnPgError has seen, as a caller does that has kept it. PgBouncer 1.15 sends an ERROR and
// closes the socket, whereupon some of pgconn's paths report only the closed socket. Before the end of the login there is no connection yet.
func (c *client) seen(err error) error {
	var pgErr *pgconn.PgError
	if c.last == nil || c.PgConn == nil || !c.IsClosed() || errors.As(err, &pgErr) || pgconn.SafeToRetry(err) {
		return err
	}
	return errors.Join(err, c.last)
}

// classify completes a context with what the connection says and judges err.
func (c *client) classify(t *testing.T, what string, err error, ctx fallback.Context) fallback.Verdict {
	t.Helper()
	if err == nil {
		t.Fatalf("%s: want an error", what)
	}
	ctx.Alive = !c.IsClosed()
	v := fallback.Classify(c.seen(err), ctx)
	shape := "no answer"
	if e := v.PgError; e != nil {
		shape = fmt.Sprintf("%s %s %q where %q at %d by %q", e.Severity, e.Code, e.Message, e.Where, e.Position, e.Routine)
	}
	t.Logf("%s: %v; evidence %v (%s)", what, v, v.Evidence, shape)
	return v
}

func (c *client) expect(t *testing.T, what string, err error, ctx fallback.Context, want verdict) {
	t.Helper()
	v := c.classify(t, what, err, ctx)
	if got := (verdict{v.Reason, v.Executed, v.Connection, v.Action, v.Evidence}); got != want {
		t.Errorf("%s: %v\n got %v, evidence %v\nwant %v", what, err, v, v.Evidence, want)
	}
}

func (c *client) prepare(t *testing.T, name, sql string, oids ...uint32) {
	t.Helper()
	if _, err := c.Prepare(t.Context(), name, sql, oids); err != nil {
		t.Fatalf("prepare %s: %v", sql, err)
	}
}

func (c *client) bind(name string, args ...string) error {
	_, err := c.ExecPrepared(context.Background(), name, texts(args), nil, nil).Close()
	return err
}

func (c *client) run(sql string, args ...string) error {
	_, err := c.ExecParams(context.Background(), sql, texts(args), nil, nil, nil).Close()
	return err
}

// runAs runs sql with one binary parameter of the given type.
func (c *client) runAs(sql string, oid uint32, value ...byte) error {
	_, err := c.ExecParams(context.Background(), sql, [][]byte{value}, []uint32{oid}, []int16{1}, nil).Close()
	return err
}

func (c *client) simple(sql string) error {
	_, err := c.Exec(context.Background(), sql).ReadAll()
	return err
}

func texts(args []string) [][]byte {
	out := make([][]byte, len(args))
	for i, a := range args {
		out[i] = []byte(a)
	}
	return out
}

const (
	int8OID = 20
	textOID = 25
)

func learnt(t fallback.Topology, columns int, oids ...uint32) fallback.Context {
	return fallback.Context{Strategy: fallback.Named, Name: ours, Topology: t, Learnt: true, ParamOIDs: oids, Columns: columns}
}

// What PostgreSQL says about prepared statements, and what it looks like when the user says the same.
func TestClassifyRealPostgreSQL(t *testing.T) {
	t.Parallel()
	for _, version := range postgres.Versions() {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			r := place.New(place.Direct, "", version).Start(t)
			s, db := r.Server, r.DB
			c := newClient(t, db.URL)
			exec(t, c.PgConn, "create table t (id int8, a int8, d text); create type mood as enum ('a', 'b')")
			mood := one(t, c.PgConn, "select 'mood'::regtype::oid::text")
			var moodOID uint32
			if _, err := fmt.Sscan(mood, &moodOID); err != nil {
				t.Fatal(err)
			}

			// The name.
			c.expect(t, "26000", c.bind(ours, "1"), learnt(direct, 1, int8OID), lost)
			c.prepare(t, ours, "select $1::int8, $2::int8")
			_, err := c.Prepare(t.Context(), ours, "select 1", nil)
			c.expect(t, "42P05", err, learnt(direct, 1), lost)
			c.expect(t, "another statement by our name", c.bind(ours, "1"), learnt(direct, 1, int8OID),
				change(change(stale, action(fallback.RunUnprepared)), evidence(yes)))
			c.expect(t, "the caller's own count", c.bind(ours, "1"), learnt(direct, 1, int8OID, int8OID), own)
			c.expect(t, "26000 of EXECUTE", c.run("execute bp_theirs"), learnt(direct, 1), own)
			c.expect(t, "26000 of DEALLOCATE", c.run("deallocate bp_theirs"), learnt(direct, 1), own)

			// The shape.
			_, err = c.ExecPrepared(t.Context(), ours, texts([]string{"1", "1"}), nil, []int16{0, 0, 0}).Close()
			c.expect(t, "result formats", err, learnt(direct, 3, int8OID, int8OID), stale)
			c.expect(t, "short int8", c.runAs("select $1", int8OID, 1, 2, 3), learnt(direct, 1, int8OID), stale)
			c.expect(t, "long int8", c.runAs("select $1", int8OID, 1, 2, 3, 4, 5, 6, 7, 8, 9), learnt(direct, 1, int8OID), stale)
			c.expect(t, "short uuid", c.runAs("select $1", 2950, 1), learnt(direct, 1, 2950), stale)
			c.expect(t, "int8 against text", c.runAs("select * from t where d = $1", int8OID, 0, 0, 0, 0, 0, 0, 0, 1), learnt(direct, 3, int8OID), stale)
			c.expect(t, "int8 coalesced with text", c.runAs("select coalesce(d, $1) from t", int8OID, 0, 0, 0, 0, 0, 0, 0, 1), learnt(direct, 1, int8OID), stale)
			if err := c.runAs("select $1::mood", moodOID, 'a'); err != nil {
				t.Fatal(err)
			}
			c.prepare(t, "bp_mood", "select $1::mood")
			exec(t, c.PgConn, "drop type mood; create type mood as enum ('a', 'b')")
			c.expect(t, "a remade type, parsed", c.runAs("select $1::mood", moodOID, 'a'), learnt(direct, 1, moodOID), stale)
			c.expect(t, "a remade type, bound", c.bind("bp_mood", "a"), learnt(direct, 1, moodOID), stale)

			// The plan.
			c.prepare(t, "bp_plan", "select * from t where id = $1")
			exec(t, c.PgConn, "alter table t add z int")
			c.expect(t, "0A000", c.bind("bp_plan", "1"), learnt(direct, 3, int8OID), verdict{fallback.ReasonStalePlan, fallback.No, fallback.Alive, fallback.RunUnprepared, no})
			c.prepare(t, "bp_where", "select d from t where id = $1")
			exec(t, c.PgConn, "alter table t alter id type text")
			c.expect(t, "a column's type changed under a name", c.bind("bp_where", "1"), learnt(direct, 1, int8OID), stale)
			exec(t, c.PgConn, "alter table t drop d")
			c.expect(t, "a column is gone", c.bind("bp_where", "1"), learnt(direct, 1, int8OID), own)

			// The user says the same.
			for code, message := range map[string]string{
				"26000": `prepared statement "` + ours + `" does not exist`,
				"42P05": `prepared statement "` + ours + `" already exists`,
				"0A000": "cached plan must not change result type",
				"08P01": `bind message supplies 1 parameters, but prepared statement "` + ours + `" requires 2`,
				"22P03": "incorrect binary data format in bind parameter 1",
				"42883": "operator does not exist: text = bigint",
				"XX000": "cache lookup failed for type 20",
				"34000": `portal "" does not exist`,
				"57P01": "terminating connection due to administrator command",
			} {
				raise := fmt.Sprintf("do $$ begin raise exception using errcode = '%s', message = '%s'; end $$", code, message)
				c.expect(t, "RAISE "+code, c.run(raise), learnt(direct, 1, int8OID), own)
			}
			exec(t, c.PgConn, "create function f() returns int language plpgsql as $$ begin execute 'execute "+ours+"x'; return 1; end $$")
			exec(t, c.PgConn, "create function g() returns bool language plpgsql as $$ begin return 'x'::text = 1::int8; end $$")
			exec(t, c.PgConn, "create function h(x text) returns int8 language plpgsql as $$ begin return x; end $$; create table k (id int8)")
			c.expect(t, "26000 in a function", c.run("select f()"), with(learnt(direct, 1), func(c *fallback.Context) { c.Name = ours + "x" }), own)
			c.expect(t, "42883 in a function", c.run("select g()"), learnt(direct, 1), own)
			c.expect(t, "42883 at run time", c.run("select $1::text::regprocedure", "nope()"), learnt(direct, 1, textOID), own)
			want := stale
			if version == "13" {
				want = own // it does not say that the value is a parameter's
			}
			c.expect(t, "22P02 of a parameter", c.run("select $1::int8", "x"), learnt(direct, 1, int8OID), want)
			c.expect(t, "22P02 of a row", c.run("select d::int8 from (values ($1::text)) t(d)", "$1"), learnt(direct, 1, textOID), own)
			c.expect(t, "22P02 in a function", c.run("select h($1)", "$1"), learnt(direct, 1, textOID), own)
			if _, err := c.CopyFrom(t.Context(), strings.NewReader("x $1\n"), "copy k from stdin"); err != nil {
				c.expect(t, "22P02 of COPY", err, learnt(direct, 1, int8OID), own)
			} else {
				t.Error("x is a number")
			}

			// Transactions.
			exec(t, c.PgConn, "begin")
			c.expect(t, "division in a transaction", c.run("select 1/0"), with(learnt(direct, 1), phase(fallback.PhaseInside)), change(own, executed(fallback.No)))
			c.expect(t, "25P02", c.bind("bp_plan", "1"), with(learnt(direct, 1), phase(fallback.PhaseInside)),
				verdict{fallback.ReasonTxAborted, fallback.No, fallback.Alive, fallback.Return, no})
			exec(t, c.PgConn, "rollback; drop table k; create table p (id int primary key); create table k (id int references p deferrable initially deferred); begin; insert into k values (1)")
			c.expect(t, "a deferred constraint", c.simple("commit"), with(learnt(direct, 1), phase(fallback.PhaseCommit)), change(own, executed(fallback.No)))

			// Time.
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			_, err = c.ExecParams(ctx, "select pg_sleep(60)", nil, nil, nil, nil).Close()
			c.expect(t, "own cancel", err, with(learnt(direct, 1), func(c *fallback.Context) { c.CtxErr = ctx.Err() }),
				verdict{fallback.ReasonCancelled, fallback.Maybe, fallback.Alive, fallback.Return, no})
			cancel()
			limited := newClient(t, db.URL) // on which nothing else has to be quick
			exec(t, limited.PgConn, "set statement_timeout = '20ms'")
			limited.expect(t, "statement timeout", limited.run("select pg_sleep(60)"), learnt(direct, 1), own)
			if version != "13" { // idle_session_timeout came with 14
				exec(t, c.PgConn, "set idle_session_timeout = '20ms'")
				gone(t, db.URL, c.PID())
				c.expect(t, "idle session timeout", c.run("select 1"), learnt(direct, 1), verdict{fallback.ReasonNotSent, fallback.No, fallback.Dead, fallback.RunElsewhere, no})
				c = newClient(t, db.URL)
			}
			exec(t, c.PgConn, "set idle_in_transaction_session_timeout = '20ms'; begin")
			gone(t, db.URL, c.PID())
			c.expect(t, "idle in transaction timeout", c.run("select 1"), with(learnt(direct, 1), phase(fallback.PhaseInside)),
				verdict{fallback.ReasonTxLost, fallback.No, fallback.Dead, fallback.Return, no})
			c = newClient(t, db.URL)
			exec(t, connect(t, db.URL), fmt.Sprintf("select pg_terminate_backend(%d)", c.PID()))
			gone(t, db.URL, c.PID())
			c.expect(t, "terminated", c.run("select 1"), learnt(direct, 1), change(unknown, reason(fallback.ReasonServer)))
			c.expect(t, "on a closed connection", c.run("select 1"), learnt(direct, 1), verdict{fallback.ReasonNotSent, fallback.No, fallback.Dead, fallback.RunElsewhere, no})

			// Login.
			c, err = dialClient(t, s.URL("nope"), nil)
			c.PgConn = nil
			c.expectLogin(t, "no such database", err, config)
			c, err = dialClient(t, db.URL, func(c *pgconn.Config) { c.RuntimeParams["nope"] = "1" })
			c.expectLogin(t, "no such parameter", err, config)
			c, err = dialClient(t, db.URL, func(c *pgconn.Config) { c.Port = 1 })
			c.expectLogin(t, "nobody listens", err, change(busy, reason(fallback.ReasonNotSent)))
		})
	}
}

// expectLogin is expect for a connection that never stood.
func (c *client) expectLogin(t *testing.T, what string, err error, want verdict) {
	t.Helper()
	if err == nil {
		t.Fatalf("%s: want an error", what)
	}
	v := fallback.Classify(err, learnt(raw, 1))
	t.Logf("%s: %v (%v)", what, v, strings.ReplaceAll(err.Error(), "\n", " "))
	if got := (verdict{v.Reason, v.Executed, v.Connection, v.Action, v.Evidence}); got != want {
		t.Errorf("%s: %v\n got %v\nwant %v", what, err, got, want)
	}
}

// gone waits until a backend has ended.
func gone(t *testing.T, url string, pid uint32) {
	t.Helper()
	admin := connect(t, url)
	await.True(t, "the backend has ended", func() bool {
		return one(t, admin, fmt.Sprintf("select count(*) from pg_stat_activity where pid = %d", pid)) == "0"
	})
	_ = admin.Close(context.Background())
}
