package fallback_test

import (
	"bytes"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/fallback"
)

func TestTopologyInWords(t *testing.T) {
	t.Parallel()
	suspected := fallback.Topology{Pooler: fallback.PoolerOther}
	for _, tt := range []struct {
		top      fallback.Topology
		text     string
		strategy fallback.Strategy
		pooled   bool
	}{
		{fallback.Topology{}, "unknown", fallback.Undecided, true},
		{direct, "direct", fallback.Named, false},
		{session, "pooler, session-like", fallback.Named, true},
		{raw, "pooler, transaction pooling", fallback.Unprepared, true},
		{statement, "pooler, statement pooling", fallback.Unprepared, true},
		{tracking, "pgbouncer, transaction pooling, tracks prepared statements", fallback.Named, true},
		{suspected, "pooler, mode unknown", fallback.Unprepared, true},
	} {
		if tt.top.String() != tt.text || tt.top.Strategy() != tt.strategy || tt.top.Pooled() != tt.pooled {
			t.Errorf("got %q, %v, pooled %v; want %q, %v, %v", tt.top, tt.top.Strategy(), tt.top.Pooled(), tt.text, tt.strategy, tt.pooled)
		}
	}
}

func TestTopologyAndVerdictInALog(t *testing.T) {
	t.Parallel()
	var b bytes.Buffer
	log := slog.New(slog.NewTextHandler(&b, nil))
	top := tracking
	top.Evidence = []string{"one", "two"}
	log.Info("x", slog.Any("topology", top))
	log.Info("x", slog.Any("verdict", fallback.Classify(server("26000", `prepared statement "`+ours+`" does not exist`, "FetchPreparedStatement"), named(raw))))
	for _, want := range []string{
		`topology.pooler=pgbouncer topology.mode=transaction topology.tracks=true topology.evidence="one; two"`,
		`verdict.reason="prepared statement lost" verdict.sqlstate=26000 verdict.statement=` + ours + ` verdict.executed=no verdict.connection=alive`,
	} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("no %q in\n%s", want, b.String())
		}
	}
}

// Every constant has a text of its own.
func TestEnumerationsInWords(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	check := func(kind string, last int, text func(int) string) {
		for i := range last + 1 {
			s := kind + text(i)
			if seen[s] || strings.HasSuffix(s, "invalid") || text(i) == "" {
				t.Errorf("%s %d is %q", kind, i, text(i))
			}
			seen[s] = true
		}
		if again := text(last + 1); !seen[kind+again] && again != "invalid" {
			t.Errorf("%s has one more: %q", kind, again)
		}
	}
	check("reason ", int(fallback.ReasonServer), func(i int) string { return fallback.Reason(i).String() })
	check("action ", int(fallback.RerunTx), func(i int) string { return fallback.Action(i).String() })
	check("mode ", int(fallback.ModeStatement), func(i int) string { return fallback.Mode(i).String() })
	check("strategy ", int(fallback.Shared), func(i int) string { return fallback.Strategy(i).String() })
	check("executed ", int(fallback.No), func(i int) string { return fallback.Executed(i).String() })
	check("connection ", int(fallback.Alive), func(i int) string { return fallback.Connection(i).String() })
}

// How the parts go together: what is there, and what an error on the way there means.
func Example() {
	// top, err := fallback.Probe(ctx, dial), or what an executor found: ex.Topology(ctx)
	top := fallback.Topology{Pooler: fallback.PoolerOther, Mode: fallback.ModeSession}
	fmt.Println(top.Strategy(), "behind", top)

	err := &pgconn.PgError{
		Severity: "ERROR", Code: "26000", Routine: "FetchPreparedStatement", Message: `prepared statement "bp_7c0f" does not exist`,
	}
	fmt.Println(fallback.Classify(err, fallback.Context{
		Strategy: fallback.Named, Name: "bp_7c0f", Topology: top, Phase: fallback.PhaseAlone, Alive: true,
	}))
	// Output:
	// named behind pooler, session-like
	// prepared statement lost: executed no, connection alive, run unprepared
}
