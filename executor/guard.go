package executor

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/internal/selector"
)

// Guard makes a bare pool safe behind a pooler, for what runs past the executor: the pool's own hooks (LoadType and RegisterTypes in AfterConnect),
// River, database/sql through stdlib.OpenDBFromPool. [NewPool] calls it; else call it last, on the configuration, before pgxpool.NewWithConfig; it chains the hooks that are there (BeforeConnect, AfterConnect, PrepareConn or
// BeforeAcquire, and the connection's OnPgError and OnNotification) and leaves the others alone. A panic of one of the first four does not end the
// process or lose a connection, as it does in pgxpool: it is a panic of the executor's method that wanted the connection, and an error of the
// pool's own Acquire.
//
// The first connection looks at what it leads to. On a direct connection pgx keeps its own default, QueryExecModeCacheStatement. Behind any
// pooler, or where that cannot be told, it uses QueryExecModeCacheDescribe: one round trip, without names, with the same bytes. Not
// CacheStatement even behind a pooler that tracks statements, for after a migration pgx misreads rows there. When a pooler appears where
// there was none, the connections made before are replaced at their next acquire. Under [Off] pgx always uses CacheDescribe and nothing is looked at; under
// [On] it keeps CacheStatement, come what may.
//
// Notifications that a pooler delivers to a connection which did not ask for them are dropped, where pgx would keep them without bound.
//
// Guard retries nothing. The Hint of a busy pooler's *pgconn.PgError says what the pooler lacked, and that nothing was executed. It does not cover Conn.Prepare, sql.DB.Prepare, explicit QueryExecMode arguments, or LISTEN through a pooler. Of cfg
// it uses PreparedStatements, ReprobeAfter, ProbeTimeout, Logger and Trace. It panics on a nil pool configuration; the error names a field
// of cfg.
func Guard(pool *pgxpool.Config, cfg Config) error {
	if pool == nil {
		panic("executor: Guard: nil pool configuration")
	}
	cfg, err := cfg.resolve()
	if err != nil {
		return err
	}
	newGuard(cfg).install(pool)
	return nil
}

// probeKey marks the context of a probe of the executor's.
type probeKey struct{}

// newGuard returns a guard that has not looked at anything. cfg is resolved.
func newGuard(cfg Config) *guard {
	g := &guard{cfg: cfg, reprobe: cmp.Or(cfg.ReprobeAfter, selector.DefaultReprobeAfter)}
	g.state.Store(&guardState{})
	return g
}

// install chains the hooks of a pool's configuration.
func (g *guard) install(pool *pgxpool.Config) {
	before := pool.BeforeConnect
	pool.BeforeConnect = func(ctx context.Context, cc *pgx.ConnConfig) (err error) {
		defer g.catch(ctx, "BeforeConnect", &err)
		if before != nil {
			if err := before(ctx, cc); err != nil {
				return err
			}
		}
		if ctx.Value(probeKey{}) == nil { // else it is a probe already, and its connection sends what a probe sends
			g.configure(ctx, cc)
		}
		return nil
	}
	if after := pool.AfterConnect; after != nil {
		pool.AfterConnect = func(ctx context.Context, conn *pgx.Conn) (err error) {
			defer g.catch(ctx, "AfterConnect", &err)
			return after(ctx, conn)
		}
	}
	prepareConn, beforeAcquire := pool.PrepareConn, pool.BeforeAcquire //nolint:staticcheck // deprecated, and still there to be chained
	pool.PrepareConn = func(ctx context.Context, conn *pgx.Conn) (ok bool, err error) {
		defer g.catch(ctx, "PrepareConn", &err) // ok is false then, and the pool closes the connection
		switch {
		case !g.current(conn):
			return false, nil // destroyed, and the acquire goes on with another
		case prepareConn != nil:
			return prepareConn(ctx, conn)
		case beforeAcquire != nil:
			return beforeAcquire(ctx, conn), nil
		default:
			return true, nil
		}
	}
}

// hookPanic is a panic of a hook of the caller's on its way through the pool, which calls AfterConnect and BeforeConnect on a goroutine of its own,
// where a panic ends the process, and loses the connection when PrepareConn panics.
type hookPanic struct {
	hook  string
	cause any
}

// Error says what panicked.
func (p *hookPanic) Error() string {
	return fmt.Sprintf("executor: %s of the guarded pool panicked: %v", p.hook, p.cause)
}

// catch makes a panic of a hook the hook's error. [Executor.acquire] makes it a panic again.
func (g *guard) catch(ctx context.Context, hook string, err *error) {
	cause := recover()
	if cause == nil {
		return
	}
	*err = &hookPanic{hook: hook, cause: cause}
	// The pool drops the errors of the connections that it makes by itself.
	g.cfg.Logger.LogAttrs(ctx, slog.LevelError, "bounceproof: a hook of the guarded pool panicked", slog.String("hook", hook))
}

// guard is what the connections of one guarded pool share.
type guard struct {
	cfg     Config
	reprobe time.Duration                                    // how long a verdict holds before a new connection looks again; negative is for ever
	found   func(ctx context.Context, top fallback.Topology) // hears what a probe found; nil is nobody
	probing sync.Mutex                                       // held while a probe runs
	state   atomic.Pointer[guardState]
}

// guardState is one verdict. It is immutable.
type guardState struct {
	top  fallback.Topology // the zero value: not known
	mode pgx.QueryExecMode // 0: nobody has looked yet
	at   time.Time
}

// configure sets how a connection that is about to be made will send its statements.
func (g *guard) configure(ctx context.Context, cc *pgx.ConnConfig) {
	st := g.verdict(ctx, cc)
	cc.DefaultQueryExecMode = st.mode
	switch {
	case st.mode == pgx.QueryExecModeCacheDescribe && cc.DescriptionCacheCapacity == 0:
		cc.DescriptionCacheCapacity = defaultDescriptions
	case st.mode == pgx.QueryExecModeCacheStatement && cc.StatementCacheCapacity == 0:
		cc.DefaultQueryExecMode = pgx.QueryExecModeCacheDescribe // the cache was switched off by hand
		cc.DescriptionCacheCapacity = max(cc.DescriptionCacheCapacity, 1)
	}
	onError := cc.OnPgError
	cc.OnPgError = func(pg *pgconn.PgConn, err *pgconn.PgError) bool {
		keep := true
		if onError != nil {
			keep = onError(pg, err)
		}
		return g.keeps(err) && keep
	}
	if cc.OnNotification == nil && st.top.Mode != fallback.ModeDirect && st.top.Mode != fallback.ModeSession {
		cc.OnNotification = func(*pgconn.PgConn, *pgconn.Notification) {}
	}
}

// defaultDescriptions is pgx's own default for DescriptionCacheCapacity.
const defaultDescriptions = 512

// verdict returns the present verdict, after probing if there is none or it is old.
func (g *guard) verdict(ctx context.Context, cc *pgx.ConnConfig) *guardState {
	switch g.cfg.PreparedStatements {
	case Off:
		return &guardState{mode: pgx.QueryExecModeCacheDescribe}
	case On:
		return &guardState{mode: pgx.QueryExecModeCacheStatement}
	case Auto, Shared:
	}
	if st := g.state.Load(); g.fresh(st) {
		return st
	}
	g.probing.Lock()
	defer g.probing.Unlock()
	old := g.state.Load()
	if g.fresh(old) {
		return old
	}
	if g.cfg.ProbeTimeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, g.cfg.ProbeTimeout)
		defer cancel()
	}
	start := time.Now()
	top, err := fallback.Probe(ctx, fallback.Dialer(func(context.Context) (*pgconn.Config, error) { return &cc.Config, nil }))
	g.cfg.Trace.probed(top, time.Since(start), err)
	st := &guardState{top: top, mode: pgx.QueryExecModeCacheDescribe, at: time.Now()}
	switch {
	case err != nil:
		// Unnamed statements are right everywhere. Look again with the next connection, which will fail likewise if the server is down.
		st.at = time.Time{}
		if old.mode != 0 {
			st.top, st.mode = old.top, old.mode
		}
	case !top.Pooled():
		st.mode = pgx.QueryExecModeCacheStatement
	}
	g.state.Store(st)
	g.report(ctx, old, st, err)
	if err == nil && g.found != nil {
		g.found(ctx, top)
	}
	return st
}

// fresh reports whether a verdict needs no second look.
func (g *guard) fresh(st *guardState) bool {
	return st.mode != 0 && !st.at.IsZero() && (g.reprobe < 0 || time.Since(st.at) < g.reprobe)
}

// report logs a change of the verdict, once.
func (g *guard) report(ctx context.Context, old, st *guardState, err error) {
	if err != nil || old.mode == st.mode {
		return
	}
	level := slog.LevelInfo
	if old.mode == pgx.QueryExecModeCacheStatement {
		level = slog.LevelWarn
	}
	g.cfg.Logger.LogAttrs(ctx, level, "bounceproof: guarded pool: the way of sending statements changed",
		slog.String("mode", st.mode.String()), slog.Any("topology", st.top))
}

// current reports whether a connection may be used under the present verdict. One that sends its statements unnamed always may.
func (g *guard) current(conn *pgx.Conn) bool {
	return g.state.Load().mode != pgx.QueryExecModeCacheDescribe || connMode(conn) != pgx.QueryExecModeCacheStatement
}

// connMode returns the mode a connection was made with. pgx gives it away only as a copy of the whole configuration, so the answer is kept
// with the connection.
func connMode(conn *pgx.Conn) pgx.QueryExecMode {
	const key = "github.com/bounceproof/bounceproof/executor.guard"
	data := conn.PgConn().CustomData()
	if mode, ok := data[key].(pgx.QueryExecMode); ok {
		return mode
	}
	mode := conn.Config().DefaultQueryExecMode
	data[key] = mode
	return mode
}

// keeps takes an error from a connection and reports whether the connection may be kept. A pooler's error on what was a direct connection
// means that the address leads elsewhere now. On PgBouncer 1.15 a pooler's own error is an ERROR and the socket closes behind it; treated as
// an ordinary error its text would be lost on some of pgx's paths.
func (g *guard) keeps(err *pgconn.PgError) bool {
	if err.Routine != "" {
		return true // PostgreSQL's own
	}
	if v := fallback.Classify(err, fallback.Context{}); v.Advice() != "" && err.Hint == "" {
		err.Hint = v.Advice() + "; nothing was executed, it is safe to try again" // pgx makes the error that the caller gets
	}
	st := g.state.Load()
	if st.top.Mode == fallback.ModeDirect {
		next := &guardState{mode: pgx.QueryExecModeCacheDescribe}
		if g.state.CompareAndSwap(st, next) {
			g.report(context.Background(), st, next, nil)
		}
	}
	return err.Code != poolerCode
}

// poolerCode is the SQLSTATE of every error that PgBouncer makes itself, all of which end the connection (src/proto.c).
const poolerCode = "08P01"
