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
		`topology.pooler=pgbouncer topology.mode=transaction topology.tracks=yes topology.evidence="one; two"`,
		`verdict.reason="prepared statement lost" verdict.sqlstate=26000 verdict.statement=` + ours + ` verdict.executed=no verdict.connection=alive`,
	} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("no %q in\n%s", want, b.String())
		}
	}
}

// Only what was seen is yes or no.
func TestTrackingIsYesNoOrNotSeen(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		top  fallback.Topology
		want string
		open bool
	}{
		{fallback.Topology{}, "not seen", true},
		{raw, "not seen", true},
		{statement, "not seen", true},
		{session, "not seen", false},
		{forwards, "no", false},
		{direct, "no", false},
		{tracking, "yes", false},
	} {
		if got := tt.top.Tracking().String(); got != tt.want || tt.top.Open() != tt.open {
			t.Errorf("%+v: %q, open %t", tt.top, got, tt.top.Open())
		}
		tt.top.Partial = true
		if !tt.top.Open() {
			t.Errorf("%+v: a look that was not finished leaves nothing open", tt.top)
		}
	}
}

// What an error proves of the pooler, and what it does not.
func TestAnErrorProvesWhetherAPoolerTracks(t *testing.T) {
	t.Parallel()
	lost := func(name string) error {
		return server("26000", `prepared statement "`+name+`" does not exist`, "FetchPreparedStatement")
	}
	refuses := &pgconn.PgError{Severity: "FATAL", Code: "08P01", Message: "prepared statement did not exist"}
	cockroach := &pgconn.PgError{Severity: "ERROR", Code: "26000", Message: `prepared statement "` + ours + `" does not exist`}
	for _, tt := range []struct {
		name string
		err  error
		of   fallback.Topology
		want fallback.Tracking
		mode fallback.Mode
	}{
		{"the pooler's name", lost("PGBOUNCER_2"), session, fallback.TrackingYes, fallback.ModeTransaction},
		{"the pooler's name, taken for one that forwards", lost("PGBOUNCER_2"), forwards, fallback.TrackingYes, fallback.ModeTransaction},
		{"another pooler's name", lost("odyssey_pstmt_12"), session, fallback.TrackingYes, fallback.ModeSession},
		{"our name", lost(ours), raw, fallback.TrackingNo, fallback.ModeTransaction},
		{"our name, where one tracked before", lost(ours), tracking, fallback.TrackingNo, fallback.ModeTransaction},
		{"the pooler's own error", refuses, raw, fallback.TrackingYes, fallback.ModeTransaction},
		{"a server without routines", cockroach, raw, fallback.TrackingUnknown, fallback.ModeTransaction},
		{"a syntax error", server("42601", "syntax error", "scanner_yyerror"), raw, fallback.TrackingUnknown, fallback.ModeTransaction},
		{"the pooler's name on a direct connection", lost("PGBOUNCER_2"), direct, fallback.TrackingNo, fallback.ModeDirect},
	} {
		evidence := len(tt.of.Evidence)
		got := tt.of.After(fallback.Classify(tt.err, named(tt.of)))
		if got.Tracking() != tt.want || got.Mode != tt.mode || got.Tracks && got.Forwards || len(tt.of.Evidence) != evidence {
			t.Errorf("%s: got %v, tracks: %v; want %v, %v", tt.name, got, got.Tracking(), tt.mode, tt.want)
		}
	}
	// A miss of shared names is no evidence, and proves nothing.
	shared := named(raw)
	shared.Strategy = fallback.Shared
	if got := raw.After(fallback.Classify(lost(ours), shared)); got.Tracking() != fallback.TrackingUnknown {
		t.Errorf("a miss made it %v", got.Tracking())
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
	check("reason ", int(fallback.ReasonDisorder), func(i int) string { return fallback.Reason(i).String() })
	check("action ", int(fallback.RerunTx), func(i int) string { return fallback.Action(i).String() })
	check("mode ", int(fallback.ModeStatement), func(i int) string { return fallback.Mode(i).String() })
	check("tracking ", int(fallback.TrackingYes), func(i int) string { return fallback.Tracking(i).String() })
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
