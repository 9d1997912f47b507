package executor_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/internal/logrec"
	"github.com/bounceproof/bounceproof/internal/pgscript"
	"github.com/bounceproof/bounceproof/prepare"
	"github.com/bounceproof/bounceproof/testenv/place"
)

// TestContextEndsOnServers is the same before real ones.
func TestContextEndsOnServers(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		p      place.Place
		policy executor.PreparedStatements
	}{
		{place.New(place.Direct, "", "15"), executor.Auto},
		{place.New(place.TransactionRaw, "1.18", "15"), executor.Shared},
		{place.New(place.TransactionTracked, "1.24", "17"), executor.Auto},
	} {
		t.Run(fmt.Sprint(test.p, ", ", test.policy), func(t *testing.T) {
			s := test.p.Start(t)
			admin := connect(t, s.DB.URL)
			mustExec(t, admin, "create table numbers (n int)")
			mustExec(t, admin, "create function slow(n int, s float8) returns int language sql as 'select n from (select pg_sleep(s)) x'")
			pool := newPool(t, s.URL, maxConns(1))
			logs := &logrec.Recorder{}
			ex := newExecutor(t, pool, executor.Config{PreparedStatements: test.policy, StatementCapacity: 3, Logger: logs.Logger()})
			if _, err := ex.Topology(t.Context()); err != nil {
				t.Fatal(err)
			}
			changes := len(logs.At(slog.LevelWarn))
			cancelled := 0
			for _, q := range questions {
				for k := 1; ; k++ {
					if k > 200 {
						t.Fatalf("%s: no end of looks", q.name)
					}
					if _, err := q.ask(t.Context(), ex, k); err != nil {
						t.Fatalf("%s: %v", q.name, err)
					}
					ctx := pgscript.TripAt(t.Context(), k, 0)
					got, err := q.ask(ctx, ex, 4000+k)
					tripped := ctx.Tripped()
					if err == nil && got != 4000+k || err != nil && (!tripped || !errors.Is(err, context.Canceled)) {
						t.Errorf("%s, look %d: %d, %v", q.name, k, got, err)
					}
					if err != nil {
						cancelled++
					}
					if err := asked(t.Context(), ex, 5000); err != nil {
						t.Errorf("%s, look %d: afterwards %v", q.name, k, err)
					}
					if !tripped {
						break
					}
				}
			}
			// In flight, and with rows on their way.
			for i, sql := range []string{"select slow($1::int4, 30)", "select slow($1::int4, g) from generate_series(0, 30, 30) g"} {
				for range 3 {
					ctx, cancel := context.WithCancel(t.Context())
					stop := time.AfterFunc(20*time.Millisecond, cancel)
					rows, err := ex.Query(ctx, sql, prepare.Stable, 6000+i)
					for err == nil && rows.Next() {
						var n int
						if err = rows.Scan(&n); err == nil && n != 6000+i {
							t.Errorf("%s answered %d", sql, n)
						}
					}
					rows.Close()
					if !errors.Is(rows.Err(), context.Canceled) {
						t.Errorf("%s: %v", sql, rows.Err())
					}
					stop.Stop()
					cancel()
					cancelled++
					if err := asked(t.Context(), ex, 7000); err != nil {
						t.Errorf("%s: afterwards %v", sql, err)
					}
				}
			}
			if err := givenBack(pool); err != nil {
				t.Error(err)
			}
			t.Log(cancelled, "calls ended by their context")
			if cancelled < 50 {
				t.Error("too few calls were ended:", cancelled)
			}
			if warnings := logs.At(slog.LevelWarn); len(warnings) != changes {
				t.Errorf("a context that ended was taken for something else: %v", warnings[changes:])
			}
		})
	}
}
