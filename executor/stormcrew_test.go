package executor_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
)

// stormTime is how long a storm lasts.
func stormTime(t *testing.T) time.Duration {
	if os.Getenv("TESTENV_LONG") == "1" {
		return 20 * time.Second
	}
	if testing.Short() {
		t.Log("SHORTENED to 1 second by -short")
		return time.Second
	}
	t.Log("SHORTENED to 4 seconds: set TESTENV_LONG=1 for 20 seconds a storm")
	return 4 * time.Second
}

// storm is two executors, one auto, one shared, as two processes with the same statements would be, 32 goroutines each, while others do
// their worst to the servers behind the pooler.
type storm struct {
	*stand
	stop       chan struct{}
	crews      map[executor.PreparedStatements]*crew
	hostiles   sync.WaitGroup
	reconnects atomic.Int64
}

// crew is an executor and those who use it.
type crew struct {
	s       *storm
	policy  executor.PreparedStatements
	ex      *executor.Executor
	book    *logbook
	workers []*worker
	done    sync.WaitGroup

	mu       sync.Mutex // guards what follows
	changes  []executor.Change
	failures []string
	failed   int

	ops  atomic.Int64
	lost atomic.Int64 // typed errors in explicit transactions
}

const (
	stormWorkers = 32 // an executor
	stormServers = 8
)

// newStorm builds the place and both crews; nobody works yet.
func newStorm(t *testing.T, p place, change ...func(*pgbouncer.Options)) *storm {
	st := p.build(t, append([]func(*pgbouncer.Options){func(o *pgbouncer.Options) { o.PoolSize = stormServers }}, change...)...)
	st.spread(t, stormServers)
	plain := st.plain(t)
	st.must(t, plain, "create table counter (id int primary key, n bigint not null) with (fillfactor = 50)")
	st.must(t, plain, "create table log (worker int, n bigint)")
	st.must(t, plain, "insert into counter select g, 0 from generate_series(1, 1000) g")
	s := &storm{stand: st, stop: make(chan struct{}), crews: map[executor.PreparedStatements]*crew{}}
	for i, policy := range []executor.PreparedStatements{executor.Auto, executor.Shared} {
		c := &crew{s: s, policy: policy, book: &logbook{}}
		c.ex = newExecutor(t, newPool(t, st.url, maxConns(16)), executor.Config{
			PreparedStatements: policy, Logger: c.book.logger(), ReprobeAfter: 200 * time.Millisecond,
			Trace: &executor.Trace{Changed: func(change executor.Change) {
				c.mu.Lock()
				defer c.mu.Unlock()
				c.changes = append(c.changes, change)
			}},
		})
		for k := range stormWorkers {
			c.workers = append(c.workers, newWorker(c, 100*i+k+1))
		}
		s.crews[policy] = c
	}
	return s
}

// begin sets everybody to work.
func (s *storm) begin(t *testing.T) {
	for _, c := range s.crews {
		for _, w := range c.workers {
			c.done.Go(func() { w.work(t.Context(), s.stop) })
		}
	}
}

// hostile runs do again and again until the storm ends.
func (s *storm) hostile(every time.Duration, do func() error, t *testing.T) {
	s.hostiles.Go(func() {
		tick := time.NewTicker(every)
		defer tick.Stop()
		for {
			select {
			case <-s.stop:
				return
			case <-tick.C:
			}
			if err := do(); err != nil {
				t.Errorf("hostile: %v", err)
				return
			}
		}
	})
}

// foreign runs a text on whichever server the pooler gives to a client of its own.
func (s *storm) foreign(t *testing.T, every time.Duration, sql string) {
	c, err := pgconn.Connect(t.Context(), s.url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close(context.Background()) })
	s.hostile(every, func() error {
		_, err := c.Exec(context.Background(), sql).ReadAll()
		return err
	}, t)
}

// reconnect has PgBouncer replace all servers, when all of them are there and none is about to go: one that is just logging in would fail,
// and PgBouncer would turn away the clients that wait for it ("server login has been failing"), which is its answer to everybody and not
// about statements.
func (s *storm) reconnect(t *testing.T, every time.Duration) {
	s.hostile(every, func() error {
		servers, err := s.b.Admin("show servers")
		if err != nil {
			return err
		}
		there := 0
		for _, server := range servers {
			if server["database"] == s.db.Name && (server["state"] == "active" || server["state"] == "idle") && server["close_needed"] == "0" {
				there++
			}
		}
		if there < stormServers {
			return nil
		}
		s.reconnects.Add(1)
		_, err = s.b.Admin("reconnect")
		return err
	}, t)
}

// end stops everybody and checks what has to hold in every storm: no error, every statement's effect there once, a warning per change.
func (s *storm) end(t *testing.T) {
	t.Helper()
	close(s.stop)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		s.hostiles.Wait()
		for _, c := range s.crews {
			c.done.Wait()
		}
	}()
	s.until(t, time.Minute, func() bool {
		select {
		case <-ended:
			return true
		default:
			return false
		}
	})
	plain := s.plain(t)
	for _, policy := range []executor.PreparedStatements{executor.Auto, executor.Shared} {
		c := s.crews[policy]
		for _, w := range c.workers {
			if got, want := one(t, plain, "select n from counter where id = $1", w.id), fmt.Sprint(w.n); got != want {
				t.Errorf("%v, worker %d: counter is %s, want %s", policy, w.id, got, want)
			}
			if got, want := one(t, plain, "select count(*) || '/' || coalesce(sum(n), 0) from log where worker = $1", w.id), fmt.Sprintf("%d/%d", w.logged, w.logged); got != want {
				t.Errorf("%v, worker %d: log has %s, want %s", policy, w.id, got, want)
			}
		}
		n := c.ex.Stats()
		t.Logf("%v, %v: %d operations, %d reconnects; named %d, unprepared %d, shared %d, passed %d; %d parses, %d misses, %d run again, %d lost in explicit transactions; changes %s",
			s.place, policy, c.ops.Load(), s.reconnects.Load(), n.Named, n.Unprepared, n.Shared, n.Passed, n.Parses, n.Misses, n.Retries, c.lost.Load(), c.route())
		if c.failed > 0 {
			t.Errorf("%v: %d errors reached callers, for instance:\n%s", policy, c.failed, strings.Join(c.failures, "\n"))
		}
		c.checkLog(t)
	}
}

// route is the crew's changes of strategy.
func (c *crew) route() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	route := "undecided"
	for _, change := range c.changes {
		route += " > " + change.To.String()
	}
	return route
}

// strategy is how the crew's executor runs its statements now.
func (c *crew) strategy() fallback.Strategy {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.changes) == 0 {
		return fallback.Undecided
	}
	return c.changes[len(c.changes)-1].To
}

// checkLog fails the test unless every change to unprepared is one warning, every way back one info, and nothing else was said aloud.
func (c *crew) checkLog(t *testing.T) {
	t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	warnings, infos := 0, 0
	for _, change := range c.changes {
		switch {
		case change.To == fallback.Unprepared, change.To == fallback.Shared && change.Reason != fallback.ReasonNone:
			warnings++
		case change.From != fallback.Undecided || change.To == fallback.Shared:
			infos++
		}
	}
	if got := c.book.at(slog.LevelWarn); len(got) != warnings {
		t.Errorf("%v: want %d warnings for %d changes, got %d: %s", c.policy, warnings, len(c.changes), len(got), strings.Join(got, "\n"))
	}
	if got := c.book.at(slog.LevelInfo); len(got) != infos {
		t.Errorf("%v: want %d infos for %d changes, got %d: %s", c.policy, infos, len(c.changes), len(got), strings.Join(got, "\n"))
	}
	if got := c.book.at(slog.LevelError); len(got) > 0 {
		t.Errorf("%v: %s", c.policy, strings.Join(got, "\n"))
	}
}

// stays fails the test unless the crew's executor went through exactly this.
func (c *crew) stays(t *testing.T, route string) {
	t.Helper()
	if got := c.route(); got != route {
		t.Errorf("%v: want %s, got %s", c.policy, route, got)
	}
}

// bareFails is the negative control: pgx as it comes, in the same storm, does fail with lost or doubled statements.
func (s *storm) bareFails(t *testing.T) {
	t.Helper()
	pool := newPool(t, s.url, maxConns(8))
	// No context ends here: PgBouncer up to 1.17 can let a CancelRequest hit a stranger's statement.
	var over atomic.Bool
	end := time.AfterFunc(10*time.Second, func() { over.Store(true) })
	defer end.Stop()
	found := make(chan error, 8)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for k := i; !over.Load(); k++ {
				var a, check int
				var mark string
				var id int
				err := pool.QueryRow(context.Background(), stormText(k%stormTexts), k, 1).Scan(&a, &check, &mark, &id)
				var pgErr *pgconn.PgError
				if errors.As(err, &pgErr) && (pgErr.Code == "26000" || pgErr.Code == "42P05") {
					found <- err
					over.Store(true)
					return
				}
			}
		})
	}
	wg.Wait()
	select {
	case err := <-found:
		t.Logf("negative control: bare pgx gets %v", err)
	default:
		t.Error("bare pgx survives this storm for 10 seconds: it proves nothing")
	}
}

// wait lets the storm blow.
func (s *storm) wait(t *testing.T) {
	t.Helper()
	s.until(t, stormTime(t), func() bool { return false })
	enough := s.until(t, time.Minute, func() bool {
		for _, c := range s.crews {
			if c.ops.Load() < 30*stormWorkers {
				return false
			}
		}
		return true
	})
	if !enough {
		t.Error("too few operations: this storm proves nothing")
	}
}

// until lets the storm blow until done says so, or the time is over. A storm in which nothing has moved for ten seconds fails the test.
func (s *storm) until(t *testing.T, limit time.Duration, done func() bool) bool {
	t.Helper()
	ops, moved := int64(-1), time.Now()
	for deadline := time.Now().Add(limit); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		if done() {
			return true
		}
		if now := s.crews[executor.Auto].ops.Load() + s.crews[executor.Shared].ops.Load(); now != ops {
			ops, moved = now, time.Now()
		} else if time.Since(moved) > 10*time.Second {
			s.stuck(t)
		}
	}
	return done()
}

// stuck ends the test with what everybody is waiting for.
func (s *storm) stuck(t *testing.T) {
	t.Helper()
	var b strings.Builder
	for _, command := range []string{"show pools", "show servers", "show clients"} {
		rows, err := s.b.Admin(command)
		fmt.Fprintln(&b, command, err)
		for _, row := range rows {
			if row["database"] == s.db.Name {
				fmt.Fprintln(&b, " ", row)
			}
		}
	}
	rows, _ := s.plain(t).Query(t.Context(), "select pid || ' ' || state || ' ' || coalesce(wait_event, '-') || ' ' || query from pg_stat_activity where datname = current_database()")
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	fmt.Fprintln(&b, "pg_stat_activity", err)
	for _, line := range lines {
		fmt.Fprintln(&b, " ", line)
	}
	stacks := make([]byte, 1<<20)
	stacks = stacks[:runtime.Stack(stacks, true)]
	t.Fatalf("nothing has moved for ten seconds:\n%s\n%s", &b, stacks)
}
