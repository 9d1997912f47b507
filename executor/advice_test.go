package executor_test

import (
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/prepare"
	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
	"github.com/bounceproof/bounceproof/testenv/place"
)

// TestAdviceThatIsFollowedEndsTheWarning takes the warning at its word: what it advises is set, and nothing else, and a new executor has nothing to
// warn of.
func TestAdviceThatIsFollowedEndsTheWarning(t *testing.T) {
	t.Parallel()
	for _, p := range []place.Place{
		place.New(place.TransactionRaw, "1.15", ""), place.New(place.TransactionRaw, "1.18", ""), place.New(place.TransactionRaw, "1.24", ""), place.New(place.TransactionRaw, "1.26", ""),
		place.New(place.Statement, "1.18", ""), place.New(place.Statement, "1.24", ""), place.New(place.Statement, "1.26", ""),
	} {
		t.Run(p.String(), func(t *testing.T) {
			t.Parallel()
			st := p.Start(t)
			use := func(policy executor.PreparedStatements) (executor.Stats, []string) {
				t.Helper()
				ex, said := logged(t, newPool(t, st.URL), policy)
				for i := range 8 {
					var n int
					if err := ex.QueryRow(t.Context(), "select $1::int", prepare.Stable, i).Scan(&n); err != nil || n != i {
						t.Fatalf("%v: got %d, %v", policy, n, err)
					}
				}
				return ex.Stats(), said.At(slog.LevelWarn)
			}
			stats, warnings := use(executor.Auto)
			if len(warnings) != 1 || stats.Unprepared != 8 {
				t.Fatalf("want one warning, got %q; %+v", warnings, stats)
			}
			_, advice, _ := strings.Cut(warnings[0], "remedy=")
			advice, _, _ = strings.Cut(advice, " next_probe=")
			for _, way := range strings.Split(advice, ", or ") {
				switch {
				case strings.Contains(way, "max_prepared_statements above 0"):
					if !pgbouncer.Tracks(p.Bouncer) {
						continue // the advice is to upgrade: that is the other cases
					}
					st.Bouncer.Reload(t, map[string]string{"max_prepared_statements": "1"}) // the least that is above 0
					stats, warnings = use(executor.Auto)
					if len(warnings) != 0 || stats.Named != 8 {
						t.Errorf("%q: %q; %+v", way, warnings, stats)
					}
					st.Bouncer.Reload(t, map[string]string{"max_prepared_statements": "0"})
				case strings.Contains(way, "to shared"):
					stats, warnings = use(executor.Shared)
					if len(warnings) != 0 || stats.Shared != 8 {
						t.Errorf("%q: %q; %+v", way, warnings, stats)
					}
				case strings.Contains(way, "to off"):
					stats, warnings = use(executor.Off)
					if len(warnings) != 0 || stats.Unprepared != 8 {
						t.Errorf("%q: %q; %+v", way, warnings, stats)
					}
				default:
					t.Errorf("nobody has followed %q, of %q", way, advice)
				}
			}
		})
	}
}

// TestNobodyIsAdvisedToSetWhatIsSet goes through everything that makes an executor warn which has the setting already.
func TestNobodyIsAdvisedToSetWhatIsSet(t *testing.T) {
	t.Parallel()
	for _, policy := range []executor.PreparedStatements{executor.Auto, executor.Shared, executor.On} {
		t.Run(fmt.Sprint(policy), func(t *testing.T) {
			t.Parallel()
			// The statement is known in the pooler before a new process asks for it, so its Parse never reaches a server.
			st := place.New(place.TransactionTracked, "1.26", "").Start(t, func(o *pgbouncer.Options) { o.PoolSize = 1 })
			neighbour := connect(t, st.URL)
			ex, said := logged(t, newPool(t, st.URL), policy)
			for range 5 {
				_, err := ex.Exec(t.Context(), "select $1::int", prepare.Stable, 1)
				if err != nil && (policy != executor.On || !strings.Contains(err.Error(), "PGBOUNCER_")) {
					t.Fatal(err)
				}
				mustExec(t, neighbour, takeAway)
			}
			if top, err := ex.Topology(t.Context()); err != nil || !top.Tracks {
				t.Errorf("%v, %v", top, err)
			}
			if strings.Contains(said.All(), "set max_prepared_statements") || policy == executor.Shared && strings.Contains(said.All(), "to shared") {
				t.Errorf("advised what is set:\n%s", said.All())
			}
		})
	}
}
