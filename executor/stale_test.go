package executor_test

import (
	"fmt"
	"testing"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/prepare"
	"github.com/bounceproof/bounceproof/testenv/place"
)

// trackingPlaces are the poolers that track statements, which keep a stale plan for whoever parses the same text.
func trackingPlaces() []place.Place { return place.Suites(place.TransactionTracked) }

// Every text that an executor has moved on to after a stale plan is stale itself after the next migration, for whoever comes later.
func TestAFreshExecutorMeetsNoStalePlan(t *testing.T) {
	t.Parallel()
	for _, p := range trackingPlaces() {
		r := p.Start(t, oneServer)
		t.Run(p.String(), func(t *testing.T) {
			direct, url := newDatabase(t, r)
			admin := freshTable(t, direct)
			old := newExecutor(t, newPool(t, url, maxConns(1)), executor.Config{})
			use := func(ex *executor.Executor, want string) {
				t.Helper()
				for range 3 {
					if got, err := read(t.Context(), ex, prepare.Stable, 1); err != nil || got != want {
						t.Fatalf("%q, %v; want %q", got, err, want)
					}
				}
			}
			use(old, "id=1 a=11 b=22")
			stale := int64(0)
			for i, typ := range []string{"float8", "text", "float8 using a::float8", "text", "int8 using a::int8"} {
				mustExec(t, admin, "alter table t alter column a type "+typ)
				use(old, "id=1 a=11 b=22")
				fresh := newExecutor(t, newPool(t, url, maxConns(1)), executor.Config{})
				use(fresh, "id=1 a=11 b=22")
				if n := fresh.Stats(); n.Named == 0 && i < 2 {
					t.Errorf("the fresh executor has used no name: %+v", n)
				}
				stale += fresh.Stats().Retries
			}
			if stale == 0 {
				t.Error("no fresh executor has met a stale plan: nothing is shown")
			}
		})
	}
}

// A request of several statements meets a migration in each of them, and is sent again as often as one of one statement is.
func TestManyStaleStatementsInOneRequest(t *testing.T) {
	t.Parallel()
	for _, p := range place.OneOfEachKind() {
		r := p.Start(t, fewServers)
		for name, way := range manyAtOnce {
			t.Run(fmt.Sprintf("%v/%s", p, name), func(t *testing.T) {
				direct, url := newDatabase(t, r)
				admin := freshTable(t, direct)
				ex := newExecutor(t, newPool(t, url, maxConns(1)), executor.Config{})
				for i := range 2 {
					if err := way(t.Context(), ex, "11"); err != nil {
						t.Fatal("before:", i, err)
					}
				}
				mustExec(t, admin, "alter table t alter column a type float8; alter table t add column c int8 default 7")
				for i := range 2 {
					if err := way(t.Context(), ex, "11"); err != nil {
						t.Fatal("after:", i, err)
					}
				}
			})
		}
	}
}
