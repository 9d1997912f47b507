package executor_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.uber.org/goleak"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/internal/pgscript"
	"github.com/bounceproof/bounceproof/prepare"
	"github.com/bounceproof/bounceproof/testenv/place"
)

func parsePool(t testing.TB, url string, change ...func(*pgxpool.Config)) *pgxpool.Config {
	t.Helper()
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range change {
		f(cfg)
	}
	return cfg
}

// newPoolExecutor returns an executor with a pool of its own.
func newPoolExecutor(t testing.TB, pool *pgxpool.Config, cfg executor.Config) *executor.Executor {
	t.Helper()
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	ex, err := executor.NewPool(t.Context(), pool, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ex.Close(context.Background()) })
	return ex
}

// loadsTypes is what programs do in AfterConnect.
func loadsTypes(_ context.Context, c *pgx.Conn) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	types, err := c.LoadTypes(ctx, []string{"mood"})
	if err != nil {
		return err
	}
	c.TypeMap().RegisterTypes(types)
	one, err := c.LoadType(ctx, "mood")
	if err != nil {
		return err
	}
	c.TypeMap().RegisterType(one)
	return nil
}

// TestTypesAreLoadedBehindAPooler: what AfterConnect loads is there, with Guard or NewPool. The control is a bare pool, whose error behind a pooler
// that forwards names says what to do.
func TestTypesAreLoadedBehindAPooler(t *testing.T) {
	t.Parallel()
	for _, p := range place.OneOfEachKind() {
		t.Run(p.String(), func(t *testing.T) {
			t.Parallel()
			st := p.Start(t)
			mustExec(t, connect(t, st.DB.URL), "create type mood as enum ('sad', 'ok')")
			openServers(t, st, 2)
			hooked := func(cfg *pgxpool.Config) { cfg.MaxConns, cfg.AfterConnect = 8, loadsTypes }
			load := func(ex *executor.Executor) error {
				for range 5 {
					var wg sync.WaitGroup
					errs := make([]error, 8)
					for i := range errs {
						wg.Go(func() {
							var moods []string
							if errs[i] = ex.QueryRow(t.Context(), "select array['sad', $1]::mood[]", prepare.Stable, "ok").Scan(&moods); errs[i] == nil && len(moods) != 2 {
								errs[i] = fmt.Errorf("%q", moods)
							}
						})
					}
					wg.Wait()
					ex.Reset() // and all over again, on new connections
					if err := errors.Join(errs...); err != nil {
						return err
					}
				}
				return nil
			}
			if err := load(newPoolExecutor(t, parsePool(t, st.URL, hooked), executor.Config{})); err != nil {
				t.Errorf("NewPool: %v", err)
			}
			guarded := guardedPool(t, st.URL, executor.Config{}, hooked)
			if err := load(newExecutor(t, guarded, executor.Config{})); err != nil {
				t.Errorf("Guard and New: %v", err)
			}
			err := load(newExecutor(t, newPool(t, st.URL, hooked), executor.Config{}))
			if !p.ForwardsNames() {
				if err != nil {
					t.Errorf("New: %v", err)
				}
				return
			}
			var hook *executor.HookError
			var pgErr *pgconn.PgError
			if !errors.As(err, &hook) || !errors.As(err, &pgErr) || !strings.HasPrefix(hook.Name, "stmtcache_") {
				t.Fatalf("control: a bare pool: %v", err)
			}
			for _, remedy := range []string{"executor.NewPool", "executor.Guard"} {
				if !strings.Contains(err.Error(), remedy) {
					t.Errorf("the error does not name %s: %v", remedy, err)
				}
			}
		})
	}
}

// A name that the caller's own hook prepared has another remedy.
func TestAHooksOwnNameIsNoMatterOfGuard(t *testing.T) {
	t.Parallel()
	st := place.New(place.TransactionRaw, "1.18", "15").Start(t)
	ex := newPoolExecutor(t, parsePool(t, st.URL, maxConns(2), func(cfg *pgxpool.Config) {
		cfg.AfterConnect = func(ctx context.Context, c *pgx.Conn) error {
			_, err := c.Prepare(ctx, "mine", "select 1")
			return err
		}
	}), executor.Config{})
	var hook *executor.HookError
	for range 4 {
		c, err := ex.Acquire(t.Context())
		if errors.As(err, &hook) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(c.Release)
	}
	if hook == nil || hook.Name != "mine" || strings.Contains(hook.Error(), "Guard") || !strings.Contains(hook.Error(), "prepare.Stable") {
		t.Errorf("%+v, %v", hook, hook)
	}
}

// scriptedPool returns an executor with a pool of its own in front of a scripted backend.
func scriptedPool(t testing.TB, o pgscript.Options, cfg executor.Config, change ...func(*pgxpool.Config)) (*pgscript.Backend, *executor.Executor) {
	t.Helper()
	b := pgscript.New(t, o)
	t.Cleanup(b.Close)
	return b, newPoolExecutor(t, parsePool(t, pgscript.URL, append(change, func(pc *pgxpool.Config) { b.Use(pc.ConnConfig) })...), cfg)
}

// The guard and the executor look once, and both know.
func TestNewPoolLooksOnce(t *testing.T) {
	for _, sc := range scenes {
		var mu sync.Mutex
		var seen []fallback.Topology
		b, ex := scriptedPool(t, sc.o, executor.Config{PreparedStatements: sc.policy, Trace: &executor.Trace{
			Probed: func(top fallback.Topology, _ time.Duration, _ error) {
				mu.Lock()
				defer mu.Unlock()
				seen = append(seen, top)
			},
		}}, maxConns(2))
		for range 3 {
			if _, err := ex.Exec(t.Context(), insertA, prepare.Stable, 1); err != nil {
				t.Fatal(err)
			}
		}
		top, err := ex.Topology(t.Context())
		if err != nil || len(seen) != 1 || ex.Stats().Probes != 1 || top.Mode != seen[0].Mode {
			t.Errorf("%s: %v, %v, looked %d times, says %d", sc.name, top, err, len(seen), ex.Stats().Probes)
		}
		want := pgx.QueryExecModeCacheDescribe
		if top.Mode == fallback.ModeDirect {
			want = pgx.QueryExecModeCacheStatement
		}
		if got := connMode(t, ex.Pool()); got != want {
			t.Errorf("%s: connections past the executor work in mode %v", sc.name, got)
		}
		if b.Ran(insertA) != 3 {
			t.Errorf("%s: ran %d times", sc.name, b.Ran(insertA))
		}
	}
}

// NewPool changes nothing of what it is given.
func TestNewPoolCopiesTheConfiguration(t *testing.T) {
	t.Parallel()
	b := pgscript.New(t, pgscript.Options{})
	t.Cleanup(b.Close)
	pc := parsePool(t, pgscript.URL, func(pc *pgxpool.Config) { b.Use(pc.ConnConfig) })
	pc.BeforeConnect, pc.PrepareConn, pc.ConnConfig.OnPgError = nil, nil, nil
	mode := pc.ConnConfig.DefaultQueryExecMode
	ex := newPoolExecutor(t, pc, executor.Config{})
	if err := ex.Ping(t.Context()); err != nil {
		t.Fatal(err)
	}
	if pc.BeforeConnect != nil || pc.PrepareConn != nil || pc.ConnConfig.OnPgError != nil || pc.ConnConfig.DefaultQueryExecMode != mode {
		t.Error("the caller's configuration was changed")
	}
	if cfg := ex.Config(); cfg.BeforeConnect == nil || cfg.PrepareConn == nil {
		t.Error("control: the pool is not guarded")
	}
	for field, cfg := range map[string]executor.Config{"Config.StatementCapacity": {StatementCapacity: -1}, "Config.PreparedStatements": {PreparedStatements: 99}} {
		if ex, err := executor.NewPool(t.Context(), pc, cfg); ex != nil || err == nil || !strings.Contains(err.Error(), field) {
			t.Errorf("%s: %v, %v", field, ex, err)
		}
	}
	if panicked(func() { _, _ = executor.NewPool(t.Context(), nil, executor.Config{}) }) == nil {
		t.Error("a nil configuration is no panic")
	}
}

// Close ends the pool that NewPool made, waits for what is in use as long as its context lasts, and leaves nothing.
func TestCloseEndsTheExecutorsOwnPool(t *testing.T) {
	ignore := goleak.IgnoreCurrent()
	b, ex := scriptedPool(t, pgscript.Options{}, executor.Config{}, maxConns(2))
	c := acquire(t, ex)
	if err := ex.Notify("c", "p"); err != nil {
		t.Fatal(err)
	}
	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := ex.Close(short); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "in use") {
		t.Errorf("with a connection in use: %v", err)
	}
	if _, err := ex.Exec(t.Context(), insertA, prepare.Stable, 1); !errors.Is(err, executor.ErrClosed) {
		t.Errorf("closed: %v", err)
	}
	if _, err := c.Exec(t.Context(), insertA, prepare.Stable, 1); err != nil {
		t.Errorf("the connection in use: %v", err)
	}
	c.Release()
	for range 2 {
		if err := ex.Close(t.Context()); err != nil {
			t.Error(err)
		}
	}
	if err := ex.Pool().Ping(t.Context()); err == nil {
		t.Error("the pool is open")
	}
	b.Close()
	if n := b.Open(); n != 0 {
		t.Errorf("%d connections are open", n)
	}
	if err := goleak.Find(ignore); err != nil {
		t.Error(err)
	}
}

// The executor's own probes through a guarded pool do not make the guard look too.
func TestAProbeOfAGuardedPoolIsOne(t *testing.T) {
	t.Parallel()
	b := pgscript.New(t, pgscript.Options{})
	t.Cleanup(b.Close)
	var probes atomic.Int32
	count := &executor.Trace{Probed: func(fallback.Topology, time.Duration, error) { probes.Add(1) }}
	pc := parsePool(t, pgscript.URL, func(pc *pgxpool.Config) { b.Use(pc.ConnConfig) })
	if err := executor.Guard(pc, executor.Config{Trace: count, Logger: slog.New(slog.DiscardHandler)}); err != nil {
		t.Fatal(err)
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), pc)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	if _, err := newExecutor(t, pool, executor.Config{}).Topology(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := probes.Load(); n != 0 {
		t.Errorf("the guard looked %d times while the executor did", n)
	}
	// The control: a connection of the pool makes it look.
	if err := pool.Ping(t.Context()); err != nil || probes.Load() != 1 {
		t.Errorf("%v, the guard looked %d times", err, probes.Load())
	}
}
