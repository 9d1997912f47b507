package fallback_test

import (
	"context"
	"errors"
	"io"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/fallback"
)

const ours = "bp_0123456789abcdef0123456789abcdef"

var (
	direct    = fallback.Topology{Pooler: fallback.PoolerNone, Mode: fallback.ModeDirect}
	session   = fallback.Topology{Pooler: fallback.PoolerOther, Mode: fallback.ModeSession}
	raw       = fallback.Topology{Pooler: fallback.PoolerOther, Mode: fallback.ModeTransaction}
	tracking  = fallback.Topology{Pooler: fallback.PoolerPgBouncer, Mode: fallback.ModeTransaction, Tracks: true}
	statement = fallback.Topology{Pooler: fallback.PoolerOther, Mode: fallback.ModeStatement}
	forwards  = fallback.Topology{Pooler: fallback.PoolerOther, Mode: fallback.ModeTransaction, Forwards: true}
)

// server is an error as PostgreSQL sends it.
func server(code, message, routine string) *pgconn.PgError {
	return &pgconn.PgError{Severity: "ERROR", SeverityUnlocalized: "ERROR", Code: code, Message: message, File: "x.c", Line: 1, Routine: routine}
}

// dying makes an error one that ends the connection.
func dying(e *pgconn.PgError) *pgconn.PgError {
	e.Severity, e.SeverityUnlocalized = "FATAL", "FATAL"
	return e
}

func where(e *pgconn.PgError, context string) *pgconn.PgError {
	e.Where = context
	return e
}

func at(e *pgconn.PgError, position int32) *pgconn.PgError {
	e.Position = position
	return e
}

// pooler is an error as PgBouncer sends it: three fields.
func pooler(severity, code, message string) *pgconn.PgError {
	return &pgconn.PgError{Severity: severity, Code: code, Message: message}
}

func bouncer(message string) *pgconn.PgError { return pooler("FATAL", "08P01", message) }

// named is the context of a stable statement outside a transaction on a connection that has survived.
func named(t fallback.Topology) fallback.Context {
	return fallback.Context{
		Strategy: fallback.Named, Name: ours, Topology: t, Alive: true, Learnt: true, ParamOIDs: []uint32{20, 25}, Columns: 3,
	}
}

func with(c fallback.Context, change func(*fallback.Context)) fallback.Context {
	change(&c)
	return c
}

func phase(p fallback.Phase) func(*fallback.Context) {
	return func(c *fallback.Context) { c.Phase = p }
}

func strategy(s fallback.Strategy) func(*fallback.Context) {
	return func(c *fallback.Context) { c.Strategy = s }
}

type verdict struct {
	reason     fallback.Reason
	executed   fallback.Executed
	connection fallback.Connection
	action     fallback.Action
	evidence   bool
}

var (
	yes, no     = true, false
	own         = verdict{fallback.ReasonNone, fallback.Maybe, fallback.Alive, fallback.Return, no}
	lost        = verdict{fallback.ReasonPreparedLost, fallback.No, fallback.Alive, fallback.RunUnprepared, yes}
	stale       = verdict{fallback.ReasonStaleShape, fallback.No, fallback.Alive, fallback.Relearn, no}
	poolerLost  = verdict{fallback.ReasonPoolerPrepared, fallback.No, fallback.Dead, fallback.RunUnprepared, yes}
	busy        = verdict{fallback.ReasonPoolerBusy, fallback.No, fallback.Dead, fallback.RunLater, no}
	unknown     = verdict{fallback.ReasonUnknown, fallback.Maybe, fallback.Dead, fallback.Return, no}
	config      = verdict{fallback.ReasonConfig, fallback.No, fallback.Dead, fallback.Return, no}
	noStatement = verdict{fallback.ReasonStatementMode, fallback.No, fallback.Dead, fallback.Return, yes}
)

func change(v verdict, f func(*verdict)) verdict {
	f(&v)
	return v
}

func action(a fallback.Action) func(*verdict) { return func(v *verdict) { v.action = a } }

func executed(e fallback.Executed) func(*verdict) { return func(v *verdict) { v.executed = e } }

func reason(r fallback.Reason) func(*verdict) { return func(v *verdict) { v.reason = r } }

func evidence(e bool) func(*verdict) { return func(v *verdict) { v.evidence = e } }

func afterwards(c fallback.Connection) func(*verdict) { return func(v *verdict) { v.connection = c } }

func connectFailure(e *pgconn.PgError) error { return wrapConnect(e) }

func deadContext(c *fallback.Context) { c.CtxErr, c.Alive = context.Canceled, false }

func closed(c *fallback.Context) { c.Alive = false }

// recorded is the error of a socket that closed behind e, which only OnPgError got to see: its caller joins the two.
func recorded(e *pgconn.PgError) error { return errors.Join(io.ErrUnexpectedEOF, e) }

// wrapConnect has pgconn report a login that was answered with e.
func wrapConnect(e error) error { return errors.Join(connectError, e) }

var connectError = func() error {
	c, err := pgconn.ParseConfig("postgres://u@127.0.0.1:1/d?sslmode=disable&connect_timeout=1")
	if err != nil {
		panic(err)
	}
	_, err = pgconn.ConnectConfig(context.Background(), c)
	return err
}()

type safe struct{ error }

func (safe) SafeToRetry() bool { return true }

func (s safe) Unwrap() error { return s.error }

func TestAdviceIsForABusyPoolerOnly(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for _, text := range []string{
		"query_wait_timeout", "query_timeout", "server login has been failing, try again later (server_login_retry)",
		"pgbouncer cannot connect to server", "no more connections allowed (max_client_conn)", "client connections exceeded",
		"(EMAXCONN) max clients reached", "server shutting down", "client_login_timeout (server down)",
	} {
		v := fallback.Classify(bouncer(text), named(raw))
		if v.Reason != fallback.ReasonPoolerBusy || v.Executed != fallback.No || v.Advice() == "" {
			t.Errorf("%s: %v, advice %q", text, v, v.Advice())
		}
		seen[v.Advice()] = true
	}
	if len(seen) != 5 {
		t.Errorf("%d advices, want one for each cause: %v", len(seen), seen)
	}
	for _, text := range []string{"query timeout", "prepared statement did not exist", "no such user"} {
		if v := fallback.Classify(bouncer(text), named(raw)); v.Advice() != "" {
			t.Errorf("%s: advice %q", text, v.Advice())
		}
	}
}
