package executor_test

import (
	"context"
	"fmt"
	"hash/crc32"
	"log/slog"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/internal/await"
	"github.com/bounceproof/bounceproof/internal/logrec"
	"github.com/bounceproof/bounceproof/prepare"
	"github.com/bounceproof/bounceproof/testenv/place"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

// asLimited returns the address for a role that may have n connections to the server.
func asLimited(t *testing.T, st *place.Running, n int) string {
	t.Helper()
	role := fmt.Sprintf("limited_%08x", crc32.ChecksumIEEE([]byte(st.DB.Name))) // roles are the cluster's
	mustExec(t, connect(t, st.DB.URL), fmt.Sprintf("create role %s login password '%s' connection limit %d", role, postgres.Password(), n))
	u, err := url.Parse(st.URL)
	if err != nil {
		t.Fatal(err)
	}
	u.User = url.User(role)
	return u.String()
}

// TestAProbeThatGetsNoConnectionJudgesByThePools is a server that lets the pool have its connections and no more, the probe's included.
func TestAProbeThatGetsNoConnectionJudgesByThePools(t *testing.T) {
	t.Parallel()
	for _, version := range []string{"13", "18"} {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			st := place.New(place.Direct, "", version).Start(t)
			limited := asLimited(t, st, 1)
			for name, first := range map[string]func(ex *executor.Executor) error{
				"alone": func(ex *executor.Executor) error {
					_, err := ex.Exec(t.Context(), "select $1::int", prepare.Stable, 1)
					return err
				},
				"in a transaction": func(ex *executor.Executor) error {
					return ex.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
						_, err := tx.Exec(ctx, "select $1::int", prepare.Stable, 1)
						return err
					})
				},
				"Topology": func(ex *executor.Executor) error {
					if _, err := ex.Exec(t.Context(), "select 1"); err != nil { // now the pool has what there is
						return err
					}
					_, err := ex.Topology(t.Context())
					return err
				},
			} {
				pool := newPool(t, limited, maxConns(1))
				ex, said := logged(t, pool, executor.Auto)
				if err := first(ex); err != nil {
					t.Fatalf("%s: %v", name, err)
				}
				if _, err := ex.Exec(t.Context(), "select $1::int", prepare.Stable, 1); err != nil {
					t.Fatalf("%s: %v", name, err)
				}
				top, err := ex.Topology(t.Context())
				if err != nil || top.Mode != fallback.ModeDirect || top.Partial || ex.Stats().Named == 0 || ex.Stats().Unprepared != 0 || len(said.At(slog.LevelWarn)) != 0 {
					t.Errorf("%s: %v, %v, %+v\n%s", name, top, err, ex.Stats(), said.All())
				}
				pool.Close()
				await.True(t, "the role's connection has ended", func() bool {
					return one(t, connect(t, st.DB.URL), "select count(*) from pg_stat_activity where usename like 'limited%'") == "0"
				})
			}
		})
	}
}

// TestAPoolerThatGetsNoServerIsNoReasonForAdvice is the same limit behind a pooler: the probe's second connection is refused a server, and nothing
// is said to be so that was not seen.
func TestAPoolerThatGetsNoServerIsNoReasonForAdvice(t *testing.T) {
	t.Parallel()
	for _, p := range []place.Place{
		place.New(place.TransactionRaw, "1.18", ""), place.New(place.TransactionTracked, "1.24", ""),
		place.New(place.TransactionRaw, "1.26", ""), place.New(place.TransactionTracked, "1.26", ""),
		place.New(place.Session, "1.18", ""), place.New(place.Session, "1.26", ""),
	} {
		t.Run(p.String(), func(t *testing.T) {
			t.Parallel()
			st := p.Start(t)
			said := &logrec.Recorder{}
			var seen fallback.Topology
			var probeErr error
			ex := newExecutor(t, newPool(t, asLimited(t, st, 1), maxConns(1)), executor.Config{Logger: said.Logger(), Trace: &executor.Trace{
				Probed: func(top fallback.Topology, _ time.Duration, err error) { seen, probeErr = top, err },
			}})
			failed := 0
			for range 5 {
				var n int
				if err := ex.QueryRow(t.Context(), "select $1::int", prepare.Stable, 4).Scan(&n); err != nil {
					failed++ // the pool's own connection was refused its server
				} else if n != 4 {
					t.Fatalf("got %d", n)
				}
			}
			top := seen
			t.Logf("%v, open %t, %q; %d of 5 failed, probe: %v; %+v\n%s", top, top.Open(), top.Evidence, failed, probeErr, ex.Stats(), said.All())
			if top.Known() && top.Tracking() == fallback.TrackingNo != (p.Mode != place.TransactionTracked) {
				t.Errorf("taken for %v", top)
			}
			if strings.Contains(said.All(), "remedy") && top.Tracking() != fallback.TrackingNo {
				t.Errorf("advice without proof:\n%s", said.All())
			}
		})
	}
}
