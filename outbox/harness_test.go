package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/internal/await"
	"github.com/bounceproof/bounceproof/outbox"
	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

// patience is how long a test waits for something that must happen. It is never slept through.
const patience = 2 * time.Minute

// link is the network between one process and its server. Cutting it is what the server sees of a process that was killed,
// and what a process sees of a network that is gone.
type link struct {
	mu    sync.Mutex
	cut   bool
	conns map[net.Conn]struct{}

	requests atomic.Int64 // writes: what is flushed at once is one request
}

// counted counts requests.
type counted struct {
	net.Conn
	n *atomic.Int64
}

func (c *counted) Write(b []byte) (int, error) {
	c.n.Add(1)
	return c.Conn.Write(b)
}

func (l *link) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cut {
		return nil, errors.New("link is cut")
	}
	var d net.Dialer
	c, err := d.DialContext(ctx, network, addr)
	if err == nil {
		l.conns[c] = struct{}{}
		return &counted{c, &l.requests}, nil
	}
	return nil, err
}

func (l *link) Cut() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cut = true
	for c := range l.conns {
		_ = c.Close()
	}
	clear(l.conns)
}

func (l *link) Restore() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cut = false
}

// process is a program of its own as far as the database can tell: a pool, an executor and a store.
type process struct {
	*link
	pool  *pgxpool.Pool
	ex    *executor.Executor
	store *outbox.Store
}

func newProcess(t *testing.T, url string, cfg outbox.Config) *process {
	t.Helper()
	pc, err := pgxpool.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	p := &process{link: &link{conns: make(map[net.Conn]struct{})}}
	pc.MaxConns = 24
	pc.ShouldPing = func(context.Context, pgxpool.ShouldPingParams) bool { return false } // a ping is a request that depends on the clock
	pc.ConnConfig.DialFunc = p.dial
	p.pool, err = pgxpool.NewWithConfig(t.Context(), pc)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.pool.Close)
	p.ex, err = executor.New(p.pool, executor.Config{Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		_ = p.ex.Close(ctx)
	})
	if cfg.Logger == nil {
		cfg.Logger = quiet
	}
	p.store, err = outbox.New(p.ex, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

var quiet = slog.New(slog.DiscardHandler)

// database is an empty, migrated outbox and a bare connection to look at it from outside.
type database struct {
	url  string
	conn *pgxpool.Pool // direct, pgx alone: the auditor
	proc *process
}

// setup returns a migrated outbox in a database of its own on any available server.
func setup(t *testing.T, cfg outbox.Config) *database {
	t.Helper()
	return setupOn(t, postgres.Start(t, postgres.Options{}), nil, cfg)
}

// setupOn is setup on a server, and through a pooler if there is one.
func setupOn(t *testing.T, s *postgres.Server, b *pgbouncer.Bouncer, cfg outbox.Config) *database {
	t.Helper()
	db := s.NewDatabase(t)
	url := db.URL
	if b != nil {
		url = b.URL(db.Name)
	}
	conn, err := pgxpool.New(t.Context(), db.URL)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(conn.Close)
	p := newProcess(t, url, cfg)
	if err := p.store.Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	return &database{url: url, conn: conn, proc: p}
}

func (db *database) count(t *testing.T, sql string, args ...any) (n int64) {
	t.Helper()
	if err := db.conn.QueryRow(context.WithoutCancel(t.Context()), sql, args...).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

func (p *process) publish(t *testing.T, events ...outbox.Event) {
	t.Helper()
	err := p.ex.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
		return p.store.Publish(ctx, tx, events...)
	})
	if err != nil {
		t.Fatal(err)
	}
}

func (p *process) subscribe(t *testing.T, name string, cfg outbox.SubscriptionConfig) *outbox.Subscription {
	t.Helper()
	sub, err := p.store.Subscribe(t.Context(), name, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return sub
}

// running is a dispatcher that runs.
type running struct {
	*outbox.Dispatcher
	cancel context.CancelFunc
	done   chan error
}

func start(t *testing.T, sub *outbox.Subscription, h outbox.Handler, cfg outbox.DispatcherConfig) *running {
	t.Helper()
	d, err := outbox.NewDispatcher(sub, h, cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	r := &running{Dispatcher: d, cancel: cancel, done: make(chan error, 1)}
	go func() { r.done <- d.Run(ctx) }()
	t.Cleanup(func() { r.stop(t) })
	return r
}

// stop ends a dispatcher in order. It may be called again.
func (r *running) stop(t *testing.T) {
	t.Helper()
	r.cancel()
	select {
	case err := <-r.done:
		if err != nil {
			t.Errorf("Run returned %v", err)
		}
		r.done <- nil
	case <-time.After(patience):
		t.Error("Run did not return")
	}
}

// ended waits until a dispatcher ends by itself, and returns what Run returned.
func (r *running) ended(t *testing.T) error {
	t.Helper()
	select {
	case err := <-r.done:
		r.done <- nil
		return err
	case <-time.After(patience):
		t.Fatal("Run goes on")
		return nil
	}
}

// recorder is a handler that remembers.
type recorder struct {
	mu    sync.Mutex
	seen  map[int64]int // deliveries by sequence number
	order map[string][]int64
	all   []outbox.Delivery
	n     atomic.Int64
}

func newRecorder() *recorder {
	return &recorder{seen: make(map[int64]int), order: make(map[string][]int64)}
}

func (r *recorder) handle(_ context.Context, d outbox.Delivery) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.seen[d.Seq]++
	if d.Key != "" {
		r.order[d.Key] = append(r.order[d.Key], d.Seq)
	}
	r.all = append(r.all, d)
	r.n.Add(1)
	return nil
}

func (r *recorder) deliveries() []outbox.Delivery {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]outbox.Delivery(nil), r.all...)
}

// distinct returns the numbers of what was delivered.
func (r *recorder) distinct() map[int64]int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return maps.Clone(r.seen)
}

// eventually waits for a condition.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	await.Within(t, patience, what, ok)
}

func events(n int, key func(i int) string) []outbox.Event {
	out := make([]outbox.Event, n)
	for i := range out {
		out[i] = outbox.Event{Type: "test", Key: key(i), Payload: fmt.Appendf(nil, "%d", i)}
	}
	return out
}

func unkeyed(int) string { return "" }
