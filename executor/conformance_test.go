package executor_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/internal/logrec"
	"github.com/bounceproof/bounceproof/testenv/place"
)

// cell is one operation under one policy in one place.
type cell struct {
	*place.Running
	ex     caller
	policy executor.PreparedStatements
	table  string // of the cell's own
	plain  *pgx.Conn
	lost   int // how often the operation gave up with the typed error
}

// caller is what an executor and a connection of its own have in common.
type caller interface {
	starter
	InTx(ctx context.Context, opts pgx.TxOptions, f func(ctx context.Context, tx executor.Tx) error) error
	Ping(ctx context.Context) error
}

// operation is one row of the matrix. run performs it once, the i-th time; what it returns is what the caller of the executor got. It
// fails the test where a result is wrong.
type operation struct {
	name   string
	begins bool // it needs BEGIN
	safe   bool // it binds no name on the strength of an earlier Parse, so that even On never loses a statement
	run    func(ctx context.Context, t *testing.T, c *cell, i int) error
}

var operations = []operation{
	{name: "Exec", run: conformExec},
	{name: "Query", run: conformQuery},
	{name: "QueryRow", run: conformQueryRow},
	{name: "SendBatch", safe: true, run: conformSendBatch},
	{name: "CopyFrom", safe: true, run: conformCopyFrom},
	{name: "Begin", begins: true, run: conformBegin},
	{name: "InTx", begins: true, run: conformInTx},
	{name: "NamedArgs", run: conformNamedArgs},
	{name: "QueueOnlyInTx", run: conformQueueOnly},
}

// conformanceRounds is how often a cell repeats its operation: each of four servers is met twice, and unmarked texts become stable.
const conformanceRounds = 8

// TestConformance runs every operation under every policy in every place. Every cell is a line of go test -v.
func TestConformance(t *testing.T) {
	for _, p := range place.Matrix() {
		t.Run(p.String(), func(t *testing.T) {
			t.Parallel()
			st := p.Start(t)
			openServers(t, st, 4)
			for _, policy := range []executor.PreparedStatements{executor.Auto, executor.On, executor.Off, executor.Shared} {
				t.Run(policy.String(), func(t *testing.T) {
					conform(t, st, policy, "", func(ex *executor.Executor, f func(caller) error) error { return f(ex) })
				})
			}
		})
	}
}

// TestConformanceOfAConn is the same on connections of one's own: each operation, each time, on one that it acquires.
func TestConformanceOfAConn(t *testing.T) {
	for _, p := range append(place.OneOfEachKind(), place.New(place.Statement, "1.24", "17")) {
		t.Run(p.String(), func(t *testing.T) {
			t.Parallel()
			st := p.Start(t)
			openServers(t, st, 4)
			for _, policy := range []executor.PreparedStatements{executor.Auto, executor.On, executor.Shared} {
				t.Run(policy.String(), func(t *testing.T) {
					conform(t, st, policy, "c", func(ex *executor.Executor, f func(caller) error) error {
						return ex.AcquireFunc(t.Context(), func(c *executor.Conn) error { return f(c) })
					})
				})
			}
		})
	}
}

// conform runs every operation under a policy; on says on what.
func conform(
	t *testing.T, st *place.Running, policy executor.PreparedStatements, prefix string,
	on func(ex *executor.Executor, f func(caller) error) error,
) {
	logs := &logrec.Recorder{}
	ex := newExecutor(t, newPool(t, st.URL, maxConns(2)), executor.Config{PreparedStatements: policy, Logger: logs.Logger()})
	plain := connect(t, st.DB.URL)
	lost := 0
	for i, op := range operations {
		t.Run(op.name, func(t *testing.T) {
			c := &cell{Running: st, policy: policy, plain: plain, table: fmt.Sprintf("%st_%s_%d", prefix, policy, i)}
			mustExec(t, plain, "create table "+c.table+" (id int primary key, n bigint not null, v jsonb, at timestamptz)")
			before := ex.Stats()
			for round := range conformanceRounds {
				err := on(ex, func(db caller) error {
					c.ex = db
					return op.run(t.Context(), t, c, round)
				})
				switch {
				case op.begins && st.Place.RefusesBegin():
					if !errors.Is(err, executor.ErrStatementMode) {
						t.Fatalf("round %d: want ErrStatementMode, got %v", round, err)
					}
				case err != nil && policy == executor.On && st.Place.ForwardsNames() && !op.safe:
					if !lostOnly(err) {
						t.Fatalf("round %d: under on a lost statement is a *PreparedStatementError, got %v", round, err)
					}
					c.lost++
				case err != nil:
					t.Fatalf("round %d: %v", round, err)
				}
			}
			lost += c.lost
			after := ex.Stats()
			t.Logf("cell: %v, %v, %s: named %d, unprepared %d, shared %d, passed %d; %d lost, %d run again", st.Place, policy, op.name,
				after.Named-before.Named, after.Unprepared-before.Unprepared, after.Shared-before.Shared, after.Passed-before.Passed,
				c.lost, after.Retries-before.Retries)
		})
	}
	if t.Failed() {
		return
	}
	conformTotals(t, st, policy, ex, logs, lost)
}

// conformTotals checks that a policy did what its name says, and said no more than it should.
func conformTotals(t *testing.T, st *place.Running, policy executor.PreparedStatements, ex *executor.Executor, logs *logrec.Recorder, lost int) {
	n := ex.Stats()
	var used []string
	for name, count := range map[string]int64{"named": n.Named, "shared": n.Shared} {
		if count > 0 {
			used = append(used, name)
		}
	}
	want := []string{"named"}
	switch {
	case policy == executor.Off:
		want = nil
	case policy == executor.Shared && st.Place.ForwardsNames():
		want = []string{"shared"}
	case policy == executor.Auto && st.Place.ForwardsNames():
		want = nil
	}
	if !slices.Equal(used, want) {
		t.Errorf("want statements with a name to be run %v, got %v: %+v", want, used, n)
	}
	if policy == executor.On && st.Place.ForwardsNames() && lost == 0 {
		t.Error("under on nothing was lost behind a pooler that loses names: the servers do not take turns, so this matrix proves nothing")
	}
	warnings := logs.At(slog.LevelWarn)
	wantWarnings := 0
	if policy == executor.Auto && st.Place.ForwardsNames() {
		wantWarnings = 1
	}
	if len(warnings) != wantWarnings {
		t.Errorf("want %d warnings, got %d: %s", wantWarnings, len(warnings), strings.Join(warnings, "\n"))
	}
	for _, secret := range []string{"select", "insert", "update", "hush"} {
		if strings.Contains(strings.ToLower(logs.All()), secret) {
			t.Errorf("the log shows SQL or arguments (%q):\n%s", secret, logs.All())
		}
	}
	top, err := ex.Topology(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%v, %v: taken for %v", st.Place, policy, top)
}
