package executor_test

import (
	"strings"
	"testing"
	"time"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
	"github.com/bounceproof/bounceproof/testenv/place"
)

// Raw poolers: other clients say DEALLOCATE ALL and DISCARD ALL, and the administrator replaces all servers, again and again.
func TestLoadRaw(t *testing.T) {
	for _, p := range place.Suites(place.TransactionRaw) {
		t.Run(p.String(), func(t *testing.T) {
			s := newLoadRun(t, p)
			s.begin(t)
			s.disturbWith(t, 97*time.Millisecond, "deallocate all")
			s.disturbWith(t, 331*time.Millisecond, "discard all")
			s.reconnect(t, 500*time.Millisecond)
			s.wait(t)
			s.bareFails(t)
			s.end(t)
			s.executors[executor.Auto].tookRoute(t, "undecided > unprepared")
			_, detours := s.executors[executor.Auto].route()
			if n := s.executors[executor.Auto].ex.Stats(); n.Shared != 0 || n.Named != 0 && detours == 0 {
				t.Errorf("auto used names behind a pooler that loses them: %+v", n)
			}
			_, detours = s.executors[executor.Shared].route()
			if n := s.executors[executor.Shared].ex.Stats(); n.Shared == 0 || n.Misses == 0 || n.Named != 0 && detours == 0 {
				t.Errorf("shared was not tried, or never missed: %+v", n)
			}
		})
	}
}

// Tracking poolers that keep five statements a server, with 55 in use, and the same other clients.
func TestLoadEviction(t *testing.T) {
	for _, p := range []place.Place{place.New(place.TransactionTracked, "1.24", "17"), place.New(place.TransactionTracked, "1.26", "18")} {
		t.Run(p.String(), func(t *testing.T) {
			s := newLoadRun(t, p, func(o *pgbouncer.Options) { o.MaxPreparedStatements = 5 })
			s.begin(t)
			s.disturbWith(t, 97*time.Millisecond, "deallocate all")
			s.disturbWith(t, 331*time.Millisecond, "discard all")
			s.reconnect(t, 500*time.Millisecond)
			s.wait(t)
			s.end(t)
			for _, c := range s.executors {
				c.tookRoute(t, "undecided > named")
			}
		})
	}
}

// A pooler that forgets after every transaction.
func TestLoadResetAlways(t *testing.T) {
	for _, p := range []place.Place{place.New(place.TransactionRaw, "1.15", "13"), place.New(place.TransactionRaw, "1.24", "17"), place.New(place.TransactionTracked, "1.24", "17"), place.New(place.TransactionTracked, "1.26", "18")} {
		t.Run(p.String(), func(t *testing.T) {
			s := newLoadRun(t, p, func(o *pgbouncer.Options) { o.Settings["server_reset_query_always"] = "1" })
			s.begin(t)
			s.wait(t)
			if p.ForwardsNames() {
				s.until(t, loadDeadline, func() bool { return s.executors[executor.Shared].strategy() == fallback.Unprepared })
				s.bareFails(t)
			}
			s.end(t)
			if p.Mode == place.TransactionTracked {
				for _, c := range s.executors {
					c.tookRoute(t, "undecided > named")
				}
				return
			}
			s.executors[executor.Auto].tookRoute(t, "undecided > unprepared")
			if route, _ := s.executors[executor.Shared].route(); !strings.HasPrefix(route, "undecided > shared > unprepared") {
				t.Errorf("shared, with every name lost after every transaction, has to give up; got %s", route)
			}
		})
	}
}

// The administrator turns tracking on and off while everybody works.
func TestLoadSwitch(t *testing.T) {
	for _, p := range []place.Place{place.New(place.TransactionRaw, "1.24", "17"), place.New(place.TransactionRaw, "1.26", "18")} {
		t.Run(p.String(), func(t *testing.T) {
			s := newLoadRun(t, p)
			s.begin(t)
			s.disturbWith(t, 97*time.Millisecond, "deallocate all")
			phase := loadTime(t) / 4
			both := func(auto, shared fallback.Strategy) func() bool {
				return func() bool {
					return s.executors[executor.Auto].strategy() == auto && s.executors[executor.Shared].strategy() == shared
				}
			}
			reach := func(what string, done func() bool) {
				t.Helper()
				if !s.until(t, loadDeadline, done) {
					t.Errorf("%s: not reached in time: auto %v, shared %v", what, s.executors[executor.Auto].ordered(), s.executors[executor.Shared].ordered())
				}
				s.until(t, phase, func() bool { return false })
			}
			reach("0", both(fallback.Unprepared, fallback.Shared))
			s.Bouncer.Set(t, "max_prepared_statements", "200")
			reach("0 to 200", both(fallback.Named, fallback.Named))
			for _, c := range s.executors {
				enough := s.until(t, loadDeadline, func() bool { return c.ex.Stats().Named >= 30*loadClients })
				if !enough || c.strategy() != fallback.Named {
					t.Errorf("%v: tracking did not last: %v, %d statements by name", c.policy, c.ordered(), c.ex.Stats().Named)
				}
			}
			s.Bouncer.Set(t, "max_prepared_statements", "0")
			reach("200 to 0", func() bool {
				return s.executors[executor.Auto].strategy() == fallback.Unprepared && s.executors[executor.Shared].strategy() != fallback.Named
			})
			s.end(t)
			s.executors[executor.Auto].tookRoute(t, "undecided > unprepared > named > unprepared")
			// Where the other client makes too many names missing, shared may give up in between, and try again.
			if route, _ := s.executors[executor.Shared].route(); !strings.HasPrefix(route, "undecided > shared > unprepared > ") ||
				strings.Count(route, "named") != 1 || !strings.Contains(route, " > named > unprepared") {
				t.Errorf("shared: %s", route)
			}
		})
	}
}

// The administrator changes session pooling to transaction pooling while everybody works: names that were right are lost on all connections
// at once.
func TestLoadModeChange(t *testing.T) {
	for _, p := range []place.Place{place.New(place.Session, "1.18", "15"), place.New(place.Session, "1.24", "17")} {
		t.Run(p.String(), func(t *testing.T) {
			s := newLoadRun(t, p, func(o *pgbouncer.Options) { o.PoolSize = 60 })
			s.begin(t)
			named := func() bool {
				return s.executors[executor.Auto].ex.Stats().Named > 10*loadClients && s.executors[executor.Shared].ex.Stats().Named > 10*loadClients
			}
			if !s.until(t, loadDeadline, named) {
				t.Error("session pooling: names are not used")
			}
			s.Bouncer.Reload(t, map[string]string{"pool_mode": "transaction", "default_pool_size": "60"})
			noticed := func() bool {
				return s.executors[executor.Auto].strategy() == fallback.Unprepared && s.executors[executor.Shared].strategy() == fallback.Shared
			}
			if !s.until(t, loadDeadline, noticed) {
				t.Error("transaction pooling: not noticed in time")
			}
			s.wait(t)
			s.end(t)
			s.executors[executor.Auto].tookRoute(t, "undecided > named > unprepared")
			if route, _ := s.executors[executor.Shared].route(); !strings.HasPrefix(route, "undecided > named > shared") {
				t.Errorf("shared: %s", route)
			}
		})
	}
}
