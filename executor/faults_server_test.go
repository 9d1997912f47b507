package executor_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/internal/await"
	"github.com/bounceproof/bounceproof/testenv/place"
	"github.com/bounceproof/bounceproof/testenv/proxy"
)

// cutPlace is a pool that reaches a real server through a proxy, which cuts it.
type cutPlace struct {
	*place.Running
	px    *proxy.Proxy
	pool  *pgxpool.Pool
	ex    *executor.Executor
	admin *pgx.Conn
	runs  int
}

func newCutPlace(t *testing.T, p place.Place, policy executor.PreparedStatements) *cutPlace {
	t.Helper()
	s := &cutPlace{Running: p.Start(t)}
	s.px = proxy.Start(t, s.URL)
	s.pool = newPool(t, s.px.URL(s.URL), maxConns(1))
	s.admin = connect(t, s.DB.URL)
	mustExec(t, s.admin, "create table runs (id int, stmt int, attempt bigint)")
	for i := range 3 {
		mustExec(t, s.admin, fmt.Sprint("create sequence attempt_", i))
	}
	s.renew(t, policy)
	return s
}

// renew gives the place an executor that has seen the pooler and no statement.
func (s *cutPlace) renew(t *testing.T, policy executor.PreparedStatements) {
	t.Helper()
	s.ex = newExecutor(t, s.pool, executor.Config{PreparedStatements: policy})
	if _, err := s.ex.Topology(t.Context()); err != nil {
		t.Fatal(err)
	}
	// The goodbye of the look at the pooler must not be the message that is cut.
	await.True(t, "its connections have ended", func() bool { return s.px.Open() <= int(s.pool.Stat().TotalConns()) })
}

// next is a context with a run id of its own.
func (s *cutPlace) next(ctx context.Context) context.Context {
	s.runs++
	return context.WithValue(ctx, runKey{}, s.runs)
}

// attempts are how often each statement has ever been executed, rolled back or not: a sequence takes nothing back.
func (s *cutPlace) attempts(ctx context.Context, n int) ([]int, error) {
	parts := make([]string, n)
	for i := range parts {
		parts[i] = fmt.Sprintf("select case when is_called then last_value else 0 end from attempt_%d", i)
	}
	rows, _ := s.admin.Query(ctx, strings.Join(parts, " union all "))
	return pgx.CollectRows(rows, pgx.RowTo[int])
}

// committed are how often each statement of a run stands.
func (s *cutPlace) committed(ctx context.Context, n int) ([]int, error) {
	rows, _ := s.admin.Query(ctx, "select (select count(*) from runs where id = $1 and stmt = n) from generate_series(0, $2) n", runID(ctx), n-1)
	return pgx.CollectRows(rows, pgx.RowTo[int])
}

// settled waits until no server process works on anything of ours any more: where each connection has its own, until pid is gone, and
// behind a pooler until it lends no server, and every process is one it knows. A process that it has dropped may not have read yet what it
// was sent last.
func (s *cutPlace) settled(ctx context.Context, pid uint32) error {
	for deadline := time.Now().Add(await.Deadline); ; {
		busy, err := s.unsettled(ctx, int32(pid)) //nolint:gosec // a process id fits
		if len(busy) == 0 || err != nil {
			return err
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("the server still works on it, the connection's process was %d: %s", pid, strings.Join(busy, "; "))
		}
		time.Sleep(time.Millisecond)
	}
}

// unsettled are the processes that settled waits for.
func (s *cutPlace) unsettled(ctx context.Context, pid int32) (busy []string, _ error) {
	known := map[int32]bool{}
	if s.Bouncer != nil {
		servers, err := s.Bouncer.Admin("show servers")
		if err != nil {
			return nil, err
		}
		for _, server := range servers {
			if server["database"] != s.DB.Name {
				continue
			}
			if server["state"] == "active" {
				busy = append(busy, "lent: "+server["remote_pid"])
			}
			n, err := strconv.ParseInt(server["remote_pid"], 10, 32)
			if err != nil {
				return nil, err
			}
			known[int32(n)] = true
		}
	}
	rows, _ := s.admin.Query(ctx, "select pid, coalesce(state, 'unknown'), concat_ws(' ', wait_event_type, wait_event, application_name, query) from pg_stat_activity"+
		" where datname = current_database() and pid <> pg_backend_pid() and backend_type = 'client backend'")
	var process int32
	var state, doing string
	_, err := pgx.ForEachRow(rows, []any{&process, &state, &doing}, func() error {
		if state != "idle" || process == pid || s.Bouncer != nil && !known[process] {
			busy = append(busy, fmt.Sprintf("%d %s %s", process, state, doing))
		}
		return nil
	})
	return busy, err
}

// serverPID is the process behind a connection of the pool, 0 if a pooler stands between.
func (s *cutPlace) serverPID(ctx context.Context) (pid uint32, err error) {
	if s.Place.Mode != place.Direct {
		return 0, nil
	}
	err = s.pool.AcquireFunc(ctx, func(c *pgxpool.Conn) error {
		pid = c.Conn().PgConn().PID()
		return nil
	})
	return pid, err
}

// cut runs a call and cuts its connection in place of the nth message from a side. It reports whether the call had so many messages.
func (s *cutPlace) cut(ctx context.Context, op countedCall, side proxy.Side, n int) (fired bool, _ error) {
	pid, err := s.serverPID(ctx)
	if err != nil {
		return false, err
	}
	before, err := s.attempts(ctx, len(op.sqls))
	if err != nil {
		return false, err
	}
	ctx = s.next(ctx)
	stats := s.ex.Stats()
	cut := s.px.CutBefore(side, 0, n)
	opErr := op.run(ctx, s.ex, op.sqls)
	fired = cut.Fired()
	cut.Cancel()
	if fired {
		if err := s.settled(ctx, pid); err != nil {
			return fired, err
		}
	}
	after, err := s.attempts(ctx, len(op.sqls))
	if err != nil {
		return fired, err
	}
	committed, err := s.committed(ctx, len(op.sqls))
	if err != nil {
		return fired, err
	}
	for i := range after {
		after[i] -= before[i]
	}
	one, none := true, true
	for _, n := range committed {
		one, none = one && n == 1, none && n == 0
	}
	unknown := errors.Is(opErr, executor.ErrCommitUnknown)
	switch {
	case errors.Is(opErr, errWrong):
		return fired, opErr
	case slices.Max(after) > 1:
		return fired, fmt.Errorf("executed %v times; %w", after, opErr)
	case !one && !none:
		return fired, fmt.Errorf("committed in part, %v; %w", committed, opErr)
	case opErr == nil && !one:
		return fired, fmt.Errorf("no error, and committed %v", committed)
	case opErr != nil && !fired:
		return fired, opErr
	case op.tx && opErr != nil && one && !unknown:
		return fired, fmt.Errorf("it is committed, and the error does not say that it may be: %w", opErr)
	case !op.tx && unknown:
		return fired, fmt.Errorf("a COMMIT that was not asked for is unknown: %w", opErr)
	}
	if now := s.ex.Stats(); now.Downgrades != stats.Downgrades {
		return fired, fmt.Errorf("a lost connection was taken for a lost statement; %w", opErr)
	}
	return fired, givenBack(s.pool)
}

// TestNothingRunsTwiceOnServers cuts real connections at every message. A counter table and sequences that no rollback takes back show how
// often each statement was executed, and what stands of it.
func TestNothingRunsTwiceOnServers(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		p      place.Place
		policy executor.PreparedStatements
		cold   bool // the executor does not know the statements
	}{
		{place.New(place.Direct, "", "15"), executor.Auto, true},
		{place.New(place.Direct, "", "15"), executor.Auto, false},
		{place.New(place.TransactionRaw, "1.18", "15"), executor.Auto, false},
		{place.New(place.TransactionRaw, "1.18", "15"), executor.Shared, false},
		{place.New(place.TransactionTracked, "1.24", "17"), executor.Auto, false},
	} {
		name := fmt.Sprint(test.p, ", ", test.policy)
		if test.cold {
			name += ", cold"
		}
		t.Run(name, func(t *testing.T) {
			s := newCutPlace(t, test.p, test.policy)
			cuts := 0
			for _, op := range countedCalls {
				if len(op.sqls) == 1 && strings.Contains(op.sqls[0], "values (0,") {
					continue // without arguments there is no run id
				}
				for _, side := range []proxy.Side{proxy.Frontend, proxy.Backend} {
					for n := 1; ; n++ {
						if test.cold {
							s.renew(t, test.policy)
						}
						// A connection that works, and statements that are known unless it is cold.
						warm := op
						if test.cold {
							warm = countedCall{run: func(ctx context.Context, ex *executor.Executor, _ []string) error { return ex.Pool().Ping(ctx) }}
						}
						if err := warm.run(s.next(t.Context()), s.ex, op.sqls); err != nil {
							t.Fatalf("%s: %v", op.name, err)
						}
						fired, err := s.cut(t.Context(), op, side, n)
						if err != nil {
							t.Errorf("%s, cut before message %d of the %v: %v", op.name, n, side, err)
						}
						if !fired {
							break
						}
						cuts++
					}
				}
			}
			t.Log(cuts, "cuts")
			if cuts < 150 {
				t.Error("too few cuts:", cuts)
			}
		})
	}
}
