package executor_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

func newPool(t testing.TB, url string, change ...func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range change {
		f(cfg)
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

func maxConns(n int32) func(*pgxpool.Config) {
	return func(cfg *pgxpool.Config) { cfg.MaxConns = n }
}

// newExecutor returns an executor that logs nowhere unless cfg says where, and ends with the test.
func newExecutor(t testing.TB, pool *pgxpool.Pool, cfg executor.Config) *executor.Executor {
	t.Helper()
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	ex, err := executor.New(pool, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ex.Close(context.Background()) })
	return ex
}

// The modes of a place.
const (
	direct           = "direct"
	session          = "session"
	raw              = "transaction raw"     // PgBouncer shares servers and forwards names as they are
	tracked          = "transaction tracked" // PgBouncer shares servers and keeps track of names
	statement        = "statement"
	statementTracked = "statement tracked"
)

// place is a way from a program to a server.
type place struct{ mode, bouncer, server string }

// The suites: which PgBouncer and PostgreSQL one Debian release ships together.
var suites = []place{{raw, "1.15", "13"}, {raw, "1.18", "15"}, {raw, "1.24", "17"}, {raw, "1.26", "18"}}

// habitats are where pgx's habits are tested.
var habitats = []place{{direct, "", "15"}, {raw, "1.18", "15"}, {tracked, "1.24", "17"}}

func (p place) String() string {
	if p.mode == direct {
		return "direct, PostgreSQL " + p.server
	}
	return fmt.Sprintf("%s, PgBouncer %s, PostgreSQL %s", p.mode, p.bouncer, p.server)
}

// shares reports whether server connections change under a client between transactions.
func (p place) shares() bool { return p.mode != direct && p.mode != session }

// forwards reports whether names of statements are lost by that.
func (p place) forwards() bool { return p.mode == raw || p.mode == statement }

// refusesBegin reports whether it is in statement mode.
func (p place) refusesBegin() bool { return p.mode == statement || p.mode == statementTracked }

// stand is a place that has been built: a database of the test's own, and the way to it.
type stand struct {
	place
	db  *postgres.Database
	b   *pgbouncer.Bouncer // nil if direct
	url string
}

// build starts the place. Where servers are shared there are four of them, which take turns, so that a name is asked for on the wrong
// one at once.
func (p place) build(t testing.TB, change ...func(*pgbouncer.Options)) *stand {
	t.Helper()
	s := postgres.Start(t, postgres.Options{Version: p.server})
	db := s.NewDatabase(t)
	st := &stand{place: p, db: db, url: db.URL}
	if p.mode == direct {
		return st
	}
	o := pgbouncer.Options{Version: p.bouncer, PoolSize: 4, MaxPreparedStatements: -1, Settings: map[string]string{"server_round_robin": "1"}}
	o.PoolMode, _, _ = strings.Cut(p.mode, " ")
	if p.mode == tracked || p.mode == statementTracked {
		o.MaxPreparedStatements = 200
	}
	if p.mode == session {
		o.PoolSize = 40
	}
	for _, f := range change {
		f(&o)
	}
	st.b = pgbouncer.Start(t, s, o)
	st.url = st.b.URL(db.Name)
	return st
}

// spread makes PgBouncer open n server connections, by using them all at once.
func (s *stand) spread(t testing.TB, n int) {
	t.Helper()
	if !s.shares() {
		return
	}
	// In statement mode BEGIN is refused; a lock that nobody gets until all are there does in every mode.
	keeper := s.plain(t)
	s.must(t, keeper, "select pg_advisory_lock(815)")
	var wg sync.WaitGroup
	for range n {
		wg.Go(func() {
			c, err := pgconn.Connect(context.Background(), s.url)
			if err != nil {
				t.Errorf("spread: %v", err)
				return
			}
			defer func() { _ = c.Close(context.Background()) }()
			if r := c.ExecParams(context.Background(), "select pg_advisory_xact_lock_shared(815)", nil, nil, nil, nil).Read(); r.Err != nil {
				t.Errorf("spread: %v", r.Err)
			}
		})
	}
	eventually(t, fmt.Sprintf("%d servers wait", n), func() bool {
		var waiting int
		err := keeper.QueryRow(context.Background(), "select count(*) from pg_locks where locktype = 'advisory' and not granted and objid = 815"+
			" and database = (select oid from pg_database where datname = current_database())").Scan(&waiting)
		return err == nil && waiting == n || t.Failed()
	})
	s.must(t, keeper, "select pg_advisory_unlock(815)")
	wg.Wait()
}

// plain returns a pgx connection straight to the server.
func (s *stand) plain(t testing.TB) *pgx.Conn {
	t.Helper()
	c, err := pgx.Connect(context.Background(), s.db.URL)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close(context.Background()) })
	return c
}

func (s *stand) must(t testing.TB, c *pgx.Conn, sql string, args ...any) {
	t.Helper()
	if _, err := c.Exec(context.Background(), sql, args...); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

// one returns the single value of a query as text, read past every pooler.
func one(t testing.TB, c *pgx.Conn, sql string, args ...any) string {
	t.Helper()
	var text *string
	if err := c.QueryRow(context.Background(), "select ("+sql+")::text", args...).Scan(&text); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	if text == nil {
		return "NULL"
	}
	return *text
}

// lostOnly reports whether err is a *PreparedStatementError as it has to be: with the server's own error in it and a remedy for people.
func lostOnly(err error) bool {
	var lost *executor.PreparedStatementError
	var pgErr *pgconn.PgError
	return errors.As(err, &lost) && errors.As(err, &pgErr) && (pgErr.Code == "26000" || pgErr.Routine == "") &&
		strings.HasPrefix(lost.Name, "bp_") && strings.Contains(err.Error(), "run it again")
}

// logbook is a slog.Handler that keeps what it gets.
type logbook struct {
	mu      sync.Mutex
	entries []logEntry
}

type logEntry struct {
	level slog.Level
	text  string // message and attributes
}

func (l *logbook) logger() *slog.Logger { return slog.New(l) }

func (l *logbook) Enabled(context.Context, slog.Level) bool { return true }

func (l *logbook) Handle(_ context.Context, r slog.Record) error {
	text := r.Message
	r.Attrs(func(a slog.Attr) bool {
		text += " " + a.Key + "=" + a.Value.Resolve().String()
		return true
	})
	l.mu.Lock()
	defer l.mu.Unlock()
	l.entries = append(l.entries, logEntry{r.Level, text})
	return nil
}

func (l *logbook) WithAttrs([]slog.Attr) slog.Handler { return l }

func (l *logbook) WithGroup(string) slog.Handler { return l }

// at returns the texts logged at a level.
func (l *logbook) at(level slog.Level) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var texts []string
	for _, e := range l.entries {
		if e.level == level {
			texts = append(texts, e.text)
		}
	}
	return texts
}

func (l *logbook) all() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var b strings.Builder
	for _, e := range l.entries {
		fmt.Fprintf(&b, "%v %s\n", e.level, e.text)
	}
	return b.String()
}

// eventually polls until done says so, and fails the test after ten seconds.
func eventually(t testing.TB, what string, done func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); ; {
		if done() {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("still not so after 10 s: %s", what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}
