package fallback_test

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

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
	check("policy ", int(fallback.PolicyShared), func(i int) string { return fallback.Policy(i).String() })
	check("mode ", int(fallback.ModeStatement), func(i int) string { return fallback.Mode(i).String() })
	check("strategy ", int(fallback.Shared), func(i int) string { return fallback.Strategy(i).String() })
	check("executed ", int(fallback.No), func(i int) string { return fallback.Executed(i).String() })
	check("connection ", int(fallback.Alive), func(i int) string { return fallback.Connection(i).String() })
}

func TestPolicyAsAFlag(t *testing.T) {
	t.Parallel()
	for _, want := range []fallback.Policy{fallback.PolicyAuto, fallback.PolicyOn, fallback.PolicyOff, fallback.PolicyShared} {
		var got fallback.Policy
		set := flag.NewFlagSet("", flag.ContinueOnError)
		set.TextVar(&got, "prepared", fallback.PolicyAuto, "")
		if err := set.Parse([]string{"-prepared", want.String()}); err != nil || got != want {
			t.Errorf("%v came back as %v, %v", want, got, err)
		}
	}
	var p fallback.Policy
	if err := p.UnmarshalText([]byte("maybe")); err == nil || !strings.Contains(err.Error(), "auto, on, off, shared") {
		t.Errorf("got %v", err)
	}
	if _, err := fallback.Policy(9).MarshalText(); err == nil {
		t.Error("a policy that does not exist has a text")
	}
}

// How the parts go together: who runs statements asks the latch, probes when told to, and tells it what went wrong.
func Example() {
	ctx := context.Background()
	latch := fallback.NewLatch(fallback.LatchConfig{Logger: slog.New(slog.DiscardHandler)})

	pool := &pgxpool.Config{} // of a pool
	dial := fallback.Dialer(func(ctx context.Context) (*pgconn.Config, error) {
		c := pool.Copy()
		if c.BeforeConnect != nil {
			if err := c.BeforeConnect(ctx, c.ConnConfig); err != nil {
				return nil, err
			}
		}
		return &c.ConnConfig.Config, nil
	})
	_ = dial // if latch.Due() { top, err := fallback.Probe(ctx, dial); … }
	latch.Settle(ctx, fallback.Topology{Pooler: fallback.PoolerOther, Mode: fallback.ModeSession})

	ran := latch.Decision()
	fmt.Println(ran.Strategy, "behind", ran.Topology)

	err := &pgconn.PgError{
		Severity: "ERROR", Code: "26000", Routine: "FetchPreparedStatement", Message: `prepared statement "bp_7c0f" does not exist`,
	}
	verdict := fallback.Classify(err, fallback.Context{
		Strategy: ran.Strategy, Name: "bp_7c0f", Topology: ran.Topology, Phase: fallback.PhaseAlone, Alive: true,
	})
	if verdict.Evidence {
		latch.Trip(ctx, ran, verdict)
	}
	fmt.Println(verdict)
	fmt.Println(latch.Strategy())
	// Output:
	// named behind pooler, session-like
	// prepared statement lost: executed no, connection alive, run unprepared
	// unprepared
}
