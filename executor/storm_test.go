package executor_test

import (
	"strings"
	"testing"
	"time"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
)

// Raw poolers: neighbours say DEALLOCATE ALL and DISCARD ALL, and the administrator replaces all servers, again and again.
func TestStormRaw(t *testing.T) {
	for _, p := range suites {
		t.Run(p.String(), func(t *testing.T) {
			s := newStorm(t, p)
			s.begin(t)
			s.foreign(t, 97*time.Millisecond, "deallocate all")
			s.foreign(t, 331*time.Millisecond, "discard all")
			s.reconnect(t, 500*time.Millisecond)
			s.wait(t)
			s.bareFails(t)
			s.end(t)
			s.crews[executor.Auto].stays(t, "undecided > unprepared")
			if n := s.crews[executor.Auto].ex.Stats(); n.Named+n.Shared != 0 {
				t.Errorf("auto used names behind a pooler that loses them: %+v", n)
			}
			if n := s.crews[executor.Shared].ex.Stats(); n.Shared == 0 || n.Misses == 0 || n.Named != 0 {
				t.Errorf("shared was not tried, or never missed: %+v", n)
			}
		})
	}
}

// Tracking poolers that keep five statements a server, with 55 in use, and the same neighbours.
func TestStormEviction(t *testing.T) {
	for _, p := range []place{{tracked, "1.24", "17"}, {tracked, "1.26", "18"}} {
		t.Run(p.String(), func(t *testing.T) {
			s := newStorm(t, p, func(o *pgbouncer.Options) { o.MaxPreparedStatements = 5 })
			s.begin(t)
			s.foreign(t, 97*time.Millisecond, "deallocate all")
			s.foreign(t, 331*time.Millisecond, "discard all")
			s.reconnect(t, 500*time.Millisecond)
			s.wait(t)
			s.end(t)
			for _, c := range s.crews {
				c.stays(t, "undecided > named")
			}
		})
	}
}

// A pooler that forgets after every transaction.
func TestStormResetAlways(t *testing.T) {
	for _, p := range []place{{raw, "1.15", "13"}, {raw, "1.24", "17"}, {tracked, "1.24", "17"}, {tracked, "1.26", "18"}} {
		t.Run(p.String(), func(t *testing.T) {
			s := newStorm(t, p, func(o *pgbouncer.Options) { o.Settings["server_reset_query_always"] = "1" })
			s.begin(t)
			s.wait(t)
			if p.forwards() {
				s.until(t, 30*time.Second, func() bool { return s.crews[executor.Shared].strategy() == fallback.Unprepared })
				s.bareFails(t)
			}
			s.end(t)
			if p.mode == tracked {
				for _, c := range s.crews {
					c.stays(t, "undecided > named")
				}
				return
			}
			s.crews[executor.Auto].stays(t, "undecided > unprepared")
			if route := s.crews[executor.Shared].route(); !strings.HasPrefix(route, "undecided > shared > unprepared") {
				t.Errorf("shared, with every name lost after every transaction, has to give up; got %s", route)
			}
		})
	}
}

// The administrator turns tracking on and off while everybody works.
func TestStormSwitch(t *testing.T) {
	for _, p := range []place{{raw, "1.24", "17"}, {raw, "1.26", "18"}} {
		t.Run(p.String(), func(t *testing.T) {
			s := newStorm(t, p)
			s.begin(t)
			s.foreign(t, 97*time.Millisecond, "deallocate all")
			phase := stormTime(t) / 4
			both := func(auto, shared fallback.Strategy) func() bool {
				return func() bool {
					return s.crews[executor.Auto].strategy() == auto && s.crews[executor.Shared].strategy() == shared
				}
			}
			reach := func(what string, done func() bool) {
				t.Helper()
				if !s.until(t, 30*time.Second, done) {
					t.Errorf("%s: not reached in 30 s: auto %s, shared %s", what, s.crews[executor.Auto].route(), s.crews[executor.Shared].route())
				}
				s.until(t, phase, func() bool { return false })
			}
			reach("0", both(fallback.Unprepared, fallback.Shared))
			s.b.Set(t, "max_prepared_statements", "200")
			reach("0 to 200", both(fallback.Named, fallback.Named))
			for _, c := range s.crews {
				enough := s.until(t, 30*time.Second, func() bool { return c.ex.Stats().Named >= 30*stormWorkers })
				if !enough || c.strategy() != fallback.Named {
					t.Errorf("%v: tracking did not last: %s, %d statements by name", c.policy, c.route(), c.ex.Stats().Named)
				}
			}
			s.b.Set(t, "max_prepared_statements", "0")
			reach("200 to 0", func() bool {
				return s.crews[executor.Auto].strategy() == fallback.Unprepared && s.crews[executor.Shared].strategy() != fallback.Named
			})
			s.end(t)
			s.crews[executor.Auto].stays(t, "undecided > unprepared > named > unprepared")
			// Where the neighbour makes too many names missing, shared may give up in between, and try again.
			if route := s.crews[executor.Shared].route(); !strings.HasPrefix(route, "undecided > shared > unprepared > ") ||
				strings.Count(route, "named") != 1 || !strings.Contains(route, " > named > unprepared") {
				t.Errorf("shared: %s", route)
			}
		})
	}
}

// The administrator changes session pooling to transaction pooling while everybody works: names that were right are lost on all connections
// at once.
func TestStormModeChange(t *testing.T) {
	for _, p := range []place{{session, "1.18", "15"}, {session, "1.24", "17"}} {
		t.Run(p.String(), func(t *testing.T) {
			s := newStorm(t, p, func(o *pgbouncer.Options) { o.PoolSize = 60 })
			s.begin(t)
			named := func() bool {
				return s.crews[executor.Auto].ex.Stats().Named > 10*stormWorkers && s.crews[executor.Shared].ex.Stats().Named > 10*stormWorkers
			}
			if !s.until(t, 30*time.Second, named) {
				t.Error("session pooling: names are not used")
			}
			s.b.Reload(t, map[string]string{"pool_mode": "transaction", "default_pool_size": "60"})
			s.wait(t)
			s.end(t)
			s.crews[executor.Auto].stays(t, "undecided > named > unprepared")
			if route := s.crews[executor.Shared].route(); !strings.HasPrefix(route, "undecided > named > shared") {
				t.Errorf("shared: %s", route)
			}
		})
	}
}
