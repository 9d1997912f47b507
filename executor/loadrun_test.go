package executor_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/internal/await"
	"github.com/bounceproof/bounceproof/internal/logrec"
	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
	"github.com/bounceproof/bounceproof/testenv/place"
)

// loadTime is how long a load runs at least.
func loadTime(t *testing.T) time.Duration {
	if os.Getenv("TESTENV_LONG") == "1" {
		return 20 * time.Second
	}
	if testing.Short() {
		t.Log("SHORTENED to 1 second by -short")
		return time.Second
	}
	t.Log("SHORTENED to 4 seconds: set TESTENV_LONG=1 for 20 seconds")
	return 4 * time.Second
}

// loadRun is two executors, one auto, one shared, as two processes with the same statements would be, with 32 goroutines each, while other
// clients and the administrator disturb the servers behind the pooler.
type loadRun struct {
	*place.Running
	stop         chan struct{}
	executors    map[executor.PreparedStatements]*loadedExecutor
	disturbances sync.WaitGroup
	reconnects   atomic.Int64
}

// loadedExecutor is an executor and its clients.
type loadedExecutor struct {
	s       *loadRun
	policy  executor.PreparedStatements
	ex      *executor.Executor
	logs    *logrec.Recorder
	clients []*loadClient
	done    sync.WaitGroup

	mu       sync.Mutex // guards what follows
	changes  []executor.Change
	failures []string
	failed   int

	ops  atomic.Int64
	lost atomic.Int64 // typed errors in explicit transactions
}

const (
	loadClients = 32 // an executor
	loadServers = 8
	// loadDeadline is how long anything may take that has to come, and loadStuck how long no operation may end. Only a fault runs into them.
	loadDeadline = 2 * time.Minute
	loadStuck    = time.Minute
)

// newLoadRun starts the place and makes both executors, which know the pooler; no client runs yet.
func newLoadRun(t *testing.T, p place.Place, change ...func(*pgbouncer.Options)) *loadRun {
	st := p.Start(t, append([]func(*pgbouncer.Options){func(o *pgbouncer.Options) { o.PoolSize = loadServers }}, change...)...)
	openServers(t, st, loadServers)
	plain := connect(t, st.DB.URL)
	mustExec(t, plain, "create table counter (id int primary key, n bigint not null) with (fillfactor = 50)")
	mustExec(t, plain, "create table log (client int, n bigint)")
	mustExec(t, plain, "insert into counter select g, 0 from generate_series(1, 1000) g")
	s := &loadRun{Running: st, stop: make(chan struct{}), executors: map[executor.PreparedStatements]*loadedExecutor{}}
	for i, policy := range []executor.PreparedStatements{executor.Auto, executor.Shared} {
		c := &loadedExecutor{s: s, policy: policy, logs: &logrec.Recorder{}}
		c.ex = newExecutor(t, newPool(t, st.URL, maxConns(16)), executor.Config{
			PreparedStatements: policy, Logger: c.logs.Logger(), ReprobeAfter: 200 * time.Millisecond,
			Trace: &executor.Trace{Changed: func(change executor.Change) {
				c.mu.Lock()
				defer c.mu.Unlock()
				c.changes = append(c.changes, change)
			}},
		})
		if _, err := c.ex.Topology(t.Context()); err != nil {
			t.Fatal(err)
		}
		for k := range loadClients {
			c.clients = append(c.clients, newLoadClient(c, 100*i+k+1))
		}
		s.executors[policy] = c
	}
	return s
}

// begin sets everybody to work.
func (s *loadRun) begin(t *testing.T) {
	for _, c := range s.executors {
		for _, client := range c.clients {
			c.done.Go(func() { client.run(t.Context(), s.stop) })
		}
	}
}

// disturb calls do again and again until the run ends.
func (s *loadRun) disturb(every time.Duration, do func() error, t *testing.T) {
	s.disturbances.Go(func() {
		tick := time.NewTicker(every)
		defer tick.Stop()
		for {
			select {
			case <-s.stop:
				return
			case <-tick.C:
			}
			if err := do(); err != nil {
				t.Errorf("disturbance: %v", err)
				return
			}
		}
	})
}

// disturbWith runs a text again and again on whichever server the pooler gives to a client of its own.
func (s *loadRun) disturbWith(t *testing.T, every time.Duration, sql string) {
	c, err := pgconn.Connect(t.Context(), s.URL)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close(context.Background()) })
	s.disturb(every, func() error {
		_, err := c.Exec(context.Background(), sql).ReadAll()
		return err
	}, t)
}

// reconnect has PgBouncer replace all servers, when all of them are there and none is about to go: one that is just logging in would fail,
// and PgBouncer would turn away the clients that wait for it ("server login has been failing"), which is its answer to everybody and not
// about statements.
func (s *loadRun) reconnect(t *testing.T, every time.Duration) {
	s.disturb(every, func() error {
		servers, err := s.Bouncer.Admin("show servers")
		if err != nil {
			return err
		}
		there := 0
		for _, server := range servers {
			if server["database"] == s.DB.Name && (server["state"] == "active" || server["state"] == "idle") && server["close_needed"] == "0" {
				there++
			}
		}
		if there < loadServers {
			return nil
		}
		s.reconnects.Add(1)
		_, err = s.Bouncer.Admin("reconnect")
		return err
	}, t)
}

// end stops everybody and checks what has to hold in every run: no error, every statement's effect there once, a warning per change.
func (s *loadRun) end(t *testing.T) {
	t.Helper()
	close(s.stop)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		s.disturbances.Wait()
		for _, c := range s.executors {
			c.done.Wait()
		}
	}()
	s.until(t, loadDeadline, func() bool {
		select {
		case <-ended:
			return true
		default:
			return false
		}
	})
	plain := connect(t, s.DB.URL)
	for _, policy := range []executor.PreparedStatements{executor.Auto, executor.Shared} {
		c := s.executors[policy]
		for _, client := range c.clients {
			if got, want := one(t, plain, "select n from counter where id = $1", client.id), fmt.Sprint(client.n); got != want {
				t.Errorf("%v, client %d: counter is %s, want %s", policy, client.id, got, want)
			}
			if got, want := one(t, plain, "select count(*) || '/' || coalesce(sum(n), 0) from log where client = $1", client.id), fmt.Sprintf("%d/%d", client.logged, client.logged); got != want {
				t.Errorf("%v, client %d: log has %s, want %s", policy, client.id, got, want)
			}
		}
		n := c.ex.Stats()
		route, detours := c.route()
		t.Logf("%v, %v: %d operations, %d reconnects; named %d, unprepared %d, shared %d, passed %d; %d parses, %d misses, %d run again, %d lost in explicit transactions; changes %s, %d detours",
			s.Place, policy, c.ops.Load(), s.reconnects.Load(), n.Named, n.Unprepared, n.Shared, n.Passed, n.Parses, n.Misses, n.Retries, c.lost.Load(), route, detours)
		if c.failed > 0 {
			t.Errorf("%v: %d errors reached callers, for instance:\n%s", policy, c.failed, strings.Join(c.failures, "\n"))
		}
		c.checkLog(t)
	}
}

// route is the executor's changes of strategy, in the order of its decisions, and detours how many are left out of it.
//
// A probe claims only what it sees: where each of its two connections happened to be answered by one server for all rounds, or too late, as
// on a busy machine, it says session pooling, and the next statement that is lost corrects it. Such a detour, back to where it began or
// not yet ended, is no part of the route.
func (e *loadedExecutor) route() (route string, detours int) {
	changes := e.ordered()
	route = "undecided"
	for i := 0; i < len(changes); i++ {
		if i > 0 && changes[i].To == fallback.Named && changes[i].Topology.Mode == fallback.ModeSession &&
			(i+1 == len(changes) || changes[i+1].To == changes[i].From) {
			detours++
			i++
			continue
		}
		route += " > " + changes[i].To.String()
	}
	return route, detours
}

// ordered returns the changes in the order of the decisions; callbacks may come in another one.
func (e *loadedExecutor) ordered() []executor.Change {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.SortedFunc(slices.Values(e.changes), func(a, b executor.Change) int { return cmp.Compare(a.Number, b.Number) })
}

// strategy is how the executor runs its statements now.
func (e *loadedExecutor) strategy() fallback.Strategy {
	changes := e.ordered()
	if len(changes) == 0 {
		return fallback.Undecided
	}
	return changes[len(changes)-1].To
}

// checkLog fails the test unless every change to unprepared is one warning, every way back one info, and nothing else was said aloud.
func (e *loadedExecutor) checkLog(t *testing.T) {
	t.Helper()
	e.mu.Lock()
	defer e.mu.Unlock()
	warnings, infos := 0, 0
	for _, change := range e.changes {
		switch {
		case change.To == fallback.Unprepared, change.To == fallback.Shared && change.Reason != fallback.ReasonNone:
			warnings++
		case change.From != fallback.Undecided || change.To == fallback.Shared:
			infos++
		}
	}
	if got := e.logs.At(slog.LevelWarn); len(got) != warnings {
		t.Errorf("%v: want %d warnings for %d changes, got %d: %s", e.policy, warnings, len(e.changes), len(got), strings.Join(got, "\n"))
	}
	if got := e.logs.At(slog.LevelInfo); len(got) != infos {
		t.Errorf("%v: want %d infos for %d changes, got %d: %s", e.policy, infos, len(e.changes), len(got), strings.Join(got, "\n"))
	}
	if got := e.logs.At(slog.LevelError); len(got) > 0 {
		t.Errorf("%v: %s", e.policy, strings.Join(got, "\n"))
	}
}

// tookRoute fails the test unless the executor went through exactly this.
func (e *loadedExecutor) tookRoute(t *testing.T, route string) {
	t.Helper()
	if got, _ := e.route(); got != route {
		t.Errorf("%v: want %s, got %s", e.policy, route, got)
	}
}

// bareFails is the negative control: pgx as it comes, under the same disturbances, does fail with lost or doubled statements.
func (s *loadRun) bareFails(t *testing.T) {
	t.Helper()
	pool := newPool(t, s.URL, maxConns(8))
	// No context ends here: PgBouncer up to 1.17 can let a CancelRequest hit another client's statement.
	var over atomic.Bool
	end := time.AfterFunc(await.Deadline, func() { over.Store(true) })
	defer end.Stop()
	found := make(chan error, 8)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for k := i; !over.Load(); k++ {
				var a, check int
				var mark string
				var id int
				err := pool.QueryRow(context.Background(), loadText(k%loadTexts), k, 1).Scan(&a, &check, &mark, &id)
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
		t.Error("no statement of bare pgx was lost: this run proves nothing")
	}
}

// wait lets the load run until there were enough operations to tell something.
func (s *loadRun) wait(t *testing.T) {
	t.Helper()
	s.until(t, loadTime(t), func() bool { return false })
	enough := s.until(t, loadDeadline, func() bool {
		for _, c := range s.executors {
			if c.ops.Load() < 30*loadClients {
				return false
			}
		}
		return true
	})
	if !enough {
		t.Error("too few operations: this run proves nothing")
	}
}

// until lets the load run until done says so, or the time is over. A run in which no operation has ended for a minute fails the test.
func (s *loadRun) until(t *testing.T, limit time.Duration, done func() bool) bool {
	t.Helper()
	ops, moved := int64(-1), time.Now()
	for deadline := time.Now().Add(limit); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		if done() {
			return true
		}
		if now := s.executors[executor.Auto].ops.Load() + s.executors[executor.Shared].ops.Load(); now != ops {
			ops, moved = now, time.Now()
		} else if time.Since(moved) > loadStuck {
			s.stuck(t)
		}
	}
	return done()
}

// stuck ends the test with what everybody is waiting for.
func (s *loadRun) stuck(t *testing.T) {
	t.Helper()
	var b strings.Builder
	for _, command := range []string{"show pools", "show servers", "show clients"} {
		rows, err := s.Bouncer.Admin(command)
		fmt.Fprintln(&b, command, err)
		for _, row := range rows {
			if row["database"] == s.DB.Name {
				fmt.Fprintln(&b, " ", row)
			}
		}
	}
	rows, _ := connect(t, s.DB.URL).Query(t.Context(), "select pid || ' ' || state || ' ' || coalesce(wait_event, '-') || ' ' || query from pg_stat_activity where datname = current_database()")
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	fmt.Fprintln(&b, "pg_stat_activity", err)
	for _, line := range lines {
		fmt.Fprintln(&b, " ", line)
	}
	stacks := make([]byte, 1<<20)
	stacks = stacks[:runtime.Stack(stacks, true)]
	t.Fatalf("no operation has ended for a minute:\n%s\n%s", &b, stacks)
}
