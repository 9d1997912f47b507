package notify_test

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/internal/await"
	"github.com/bounceproof/bounceproof/internal/logrec"
	"github.com/bounceproof/bounceproof/notify"
	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

// newPool returns a pool that works behind every pooler.
func newPool(t *testing.T, url string) *pgxpool.Pool {
	t.Helper()
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	cfg.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

// recorder is a handler that remembers.
type recorder struct {
	mu     sync.Mutex
	events []notify.Event
}

func (r *recorder) HandleEvent(_ context.Context, e notify.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = append(r.events, e)
}

func (r *recorder) count(match func(notify.Event) bool) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := 0
	for _, e := range r.events {
		if match(e) {
			n++
		}
	}
	return n
}

func (r *recorder) kinds(kind notify.Kind) int {
	return r.count(func(e notify.Event) bool { return e.Kind == kind })
}

func (r *recorder) heard(payload string) bool {
	return r.count(func(e notify.Event) bool { return e.Kind == notify.Notified && e.Payload == payload }) > 0
}

// listening is a running listener with one recorder on channel "news".
type listening struct {
	*notify.Listener
	*recorder
	log  *logrec.Recorder
	stop func()
}

func listen(t *testing.T, pool notify.Pool, cfg notify.ListenerConfig) *listening {
	t.Helper()
	l := &listening{recorder: &recorder{}, log: &logrec.Recorder{}}
	if cfg.Logger == nil {
		cfg.Logger = l.log.Logger()
	}
	var err error
	if l.Listener, err = notify.NewListener(pool, cfg); err != nil {
		t.Fatal(err)
	}
	l.Handle("news", l.recorder)
	l.stop = run(t, l.Listener)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("%+v\n%.2000s", l.Status(), l.log.All())
		}
	})
	return l
}

// run runs a listener until the returned function is called, or the test ends.
func run(t *testing.T, l *notify.Listener) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- l.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run = %v, want nil", err)
		}
	})
	t.Cleanup(stop)
	return stop
}

func (l *listening) await(t *testing.T, state notify.State) {
	t.Helper()
	await.True(t, fmt.Sprintf("state %v (it is %v)", state, l.State()), func() bool { return l.State() == state })
}

func (l *listening) warnings() int     { return len(l.log.At(slog.LevelWarn)) }
func (l *listening) informations() int { return len(l.log.At(slog.LevelInfo)) }

// steady is for tests in which the server hears and says everything: nothing is polled, and a busy machine does not cost
// the connection.
var steady = notify.ListenerConfig{PollInterval: -1, ProvenPollInterval: -1, HeartbeatTimeout: time.Minute}

// steadyBy is steady by a session connection.
func steadyBy(direct string) notify.ListenerConfig {
	cfg := steady
	cfg.Direct = direct
	return cfg
}

func publish(t *testing.T, pool notify.Execer, payload string) {
	t.Helper()
	if _, err := pool.Exec(t.Context(), `select pg_notify('news', $1)`, pgx.QueryExecModeExec, payload); err != nil {
		t.Fatal(err)
	}
}

// mustReceive shows that the listener receives what others send.
func (l *listening) mustReceive(t *testing.T, pool notify.Execer) {
	t.Helper()
	payload := fmt.Sprint("hello ", time.Now().UnixNano())
	publish(t, pool, payload)
	await.True(t, "a notification", func() bool { return l.heard(payload) })
}

func everyPostgres(t *testing.T, f func(t *testing.T, s *postgres.Server)) {
	for _, v := range postgres.Versions() {
		t.Run("postgres "+v, func(t *testing.T) {
			t.Parallel()
			f(t, postgres.Start(t, postgres.Options{Version: v}))
		})
	}
}

func everyPgBouncer(t *testing.T, modes []string, f func(t *testing.T, s *postgres.Server, b *pgbouncer.Bouncer)) {
	for _, v := range pgbouncer.Versions() {
		for _, mode := range modes {
			t.Run("pgbouncer "+v+" "+mode, func(t *testing.T) {
				t.Parallel()
				s := postgres.Start(t, postgres.Options{})
				f(t, s, pgbouncer.Start(t, s, pgbouncer.Options{Version: v, PoolMode: mode}))
			})
		}
	}
}

func TestDirectConnectionIsProvenAndHears(t *testing.T) {
	t.Parallel()
	everyPostgres(t, func(t *testing.T, s *postgres.Server) {
		pool := newPool(t, s.NewDatabase(t).URL)
		l := listen(t, pool, steady)
		l.await(t, notify.Proven)
		await.True(t, "a resync", func() bool { return l.kinds(notify.Resynced) == 1 })
		l.mustReceive(t, pool)
		if st := l.Status(); st.Pooled || st.Proofs != 1 || st.Reason != "" || !l.Healthy() {
			t.Errorf("status %+v", st)
		}
		t.Logf("the note took %v", l.Status().ProofTime)
		l.stop()
		if l.State() != notify.Unknown {
			t.Errorf("state after Run is %v", l.State())
		}
		mustNobodyListen(t, pool)
	})
}

// mustNobodyListen shows that no connection of a listener is left.
func mustNobodyListen(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	await.True(t, "the listening connection to be gone", func() bool {
		var n int
		if err := pool.QueryRow(t.Context(), `select count(*) from pg_stat_activity where datname = current_database() and query like 'listen%'`).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n == 0
	})
}

func TestSessionModeIsProvenAndHears(t *testing.T) {
	t.Parallel()
	everyPgBouncer(t, []string{"session"}, func(t *testing.T, s *postgres.Server, b *pgbouncer.Bouncer) {
		db := s.NewDatabase(t)
		pool := newPool(t, b.URL(db.Name))
		l := listen(t, pool, steady)
		l.await(t, notify.Proven)
		l.mustReceive(t, pool)
		if st := l.Status(); !st.Pooled {
			t.Errorf("status %+v, want Pooled", st)
		}
	})
}

func TestTransactionModeIsIsolatedAndPolled(t *testing.T) {
	t.Parallel()
	everyPgBouncer(t, []string{"transaction", "statement"}, func(t *testing.T, s *postgres.Server, b *pgbouncer.Bouncer) {
		for _, traffic := range []string{"quiet", "busy"} {
			t.Run(traffic, func(t *testing.T) {
				db := s.NewDatabase(t)
				pool := newPool(t, b.URL(db.Name))
				if traffic == "busy" {
					keepBusy(t, b.URL(db.Name), 8)
				}
				l := listen(t, pool, notify.ListenerConfig{PollInterval: 100 * time.Millisecond, Reprove: 300 * time.Millisecond, HeartbeatTimeout: 20 * time.Second})
				l.await(t, notify.Isolated)
				t.Log(l.Status().Reason)
				publish(t, pool, "unheard")
				before := l.kinds(notify.Polled)
				await.True(t, "polling", func() bool { return l.kinds(notify.Polled) >= before+5 })
				// It tried several times meanwhile.
				await.True(t, "more attempts", func() bool { return l.Status().Connects >= 4 })
				if st := l.Status(); st.Proofs != 0 || l.kinds(notify.Resynced) != 0 || l.Healthy() {
					t.Errorf("it claims health: %+v", st)
				}
				if n := l.warnings(); n != 1 || !strings.Contains(l.log.All(), "Direct") {
					t.Errorf("%d warnings, want one that names the remedy:\n%s", n, l.log.All())
				}
				l.stop()
				mustLeaveNoListen(t, b.URL(db.Name))
			})
		}
	})
}

// keepBusy has n clients run short transactions through a pooler until the test ends.
func keepBusy(t *testing.T, url string, n int) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	for range n {
		wg.Go(func() {
			conn, err := pgx.Connect(ctx, url)
			if err != nil {
				return
			}
			defer conn.Close(context.Background())
			for ctx.Err() == nil {
				_, _ = conn.Exec(ctx, "select pg_sleep(0.002)", pgx.QueryExecModeSimpleProtocol)
			}
		})
	}
	t.Cleanup(func() { cancel(); wg.Wait() })
}

// mustLeaveNoListen shows that no server connection of the pooler listens to anything: as many clients as it has servers
// hold one each at the same time.
func mustLeaveNoListen(t *testing.T, url string) {
	t.Helper()
	const servers = 4 // pgbouncer.Options.PoolSize
	var conns []*pgx.Conn
	for range servers {
		conns = append(conns, mustConnect(t, url))
	}
	listeningPID := make(chan string, servers)
	var wg sync.WaitGroup
	for _, conn := range conns {
		wg.Go(func() {
			var pid string
			var channels int
			err := conn.QueryRow(t.Context(), `select pg_backend_pid()::text, (select count(*) from pg_listening_channels()) from pg_sleep(1)`,
				pgx.QueryExecModeSimpleProtocol).Scan(&pid, &channels)
			if err != nil || channels != 0 {
				t.Errorf("server connection %s listens to %d channels (%v)", pid, channels, err)
			}
			listeningPID <- pid
		})
	}
	wg.Wait()
	close(listeningPID)
	distinct := map[string]bool{}
	for pid := range listeningPID {
		distinct[pid] = true
	}
	if len(distinct) < 2 {
		t.Errorf("only %d server connections were looked at", len(distinct))
	}
	for _, conn := range conns {
		_ = conn.Close(t.Context())
	}
}

func TestDirectSessionBesideATransactionPool(t *testing.T) {
	t.Parallel()
	everyPgBouncer(t, []string{"transaction"}, func(t *testing.T, s *postgres.Server, b *pgbouncer.Bouncer) {
		db := s.NewDatabase(t)
		pool := newPool(t, b.URL(db.Name))
		l := listen(t, pool, steadyBy(db.URL))
		l.await(t, notify.Proven)
		l.mustReceive(t, pool)
	})
}

// A Direct that works but leads elsewhere would hear nothing, for ever.
func TestDirectToAnotherDatabaseIsIsolated(t *testing.T) {
	t.Parallel()
	s := postgres.Start(t, postgres.Options{})
	pool := newPool(t, s.NewDatabase(t).URL)
	l := listen(t, pool, notify.ListenerConfig{Direct: s.NewDatabase(t).URL, HeartbeatTimeout: time.Second})
	l.await(t, notify.Isolated)
	await.True(t, "the reason", func() bool { return strings.Contains(l.Status().Reason, "another server or database") })
}
