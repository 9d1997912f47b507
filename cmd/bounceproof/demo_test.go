package main

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jedib0t/go-pretty/v6/text"
	"go.uber.org/goleak"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

// requireServers skips where there is no PostgreSQL at all.
func requireServers(t *testing.T) {
	t.Helper()
	if err := postgres.Available(""); err != nil {
		postgres.Unavailable(t, err)
	}
}

func TestDemo(t *testing.T) {
	requireServers(t)
	code, stdout, stderr := command(t.Context(), "demo", "--events", "1000")
	t.Log(stdout)
	if code != exitOK {
		t.Fatalf("status %d, %s", code, stderr)
	}
	if strings.Contains(stdout, "✗") || !strings.Contains(stdout, "All checks hold") {
		t.Error("a check failed, and the status is 0")
	}
	rows := 1
	for _, v := range []string{"1.18", "1.24"} {
		if pgbouncer.Available(v) == nil {
			rows++
			if v == "1.18" && !strings.Contains(stdout, "skipped") {
				rows++ // with the opt-in, if there was time
			}
		}
	}
	// Each row of the table says what it measured, and none is left out.
	if n := strings.Count(stdout, "1,000 transactions committed, 1,000 events in the log"); n != rows {
		t.Errorf("%d rows were measured, want %d", n, rows)
	}
	if os.Getenv("TESTENV_REQUIRE") == "all" && strings.Contains(stdout, "missing") {
		t.Error("a version is missing, and TESTENV_REQUIRE=all")
	}
}

func TestDemoStopsInOrder(t *testing.T) {
	requireServers(t)
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	ctx, cancel := context.WithCancel(t.Context())
	out := &watched{text: "published", found: cancel}
	var errOut watched
	begin := time.Now()
	code := run(ctx, []string{"demo", "--events", "1000000"}, out, &errOut)
	if code != exitInterrupted || !strings.Contains(errOut.String(), "interrupted") {
		t.Errorf("status %d, %s\n%s", code, errOut.String(), out)
	}
	if took := time.Since(begin); took > 30*time.Second {
		t.Errorf("it took %v", took)
	}
	if strings.Contains(out.String(), "╭") {
		t.Error("it printed a table of what was not measured")
	}
}

// perfect is what a run of two keyed events and one without a key looks like, and what the database says then.
func perfect() (*outcome, *stored) {
	o := &outcome{
		committed: 4,
		deliveries: []delivered{
			{seq: 1, key: "account-0", attempt: 1, movement: movement{Account: 0, Version: 1, Amount: 5}},
			{seq: 4, attempt: 1, movement: movement{Account: 50, Version: 1, Amount: -7}},
			{seq: 2, key: "account-1", attempt: 1, movement: movement{Account: 1, Version: 1, Amount: 1}},
			{seq: 3, key: "account-0", attempt: 1, movement: movement{Account: 0, Version: 2, Amount: 6}},
		},
		stats: executor.Stats{Named: 100, Parses: 2},
		total: executor.Stats{Named: 110, Unprepared: 3, Parses: 7},
	}
	t := &stored{
		events: map[int64]string{1: "account-0", 2: "account-1", 3: "account-0", 4: ""},
		order:  map[string][]int64{"account-0": {1, 3}, "account-1": {2}},
		accounts: map[int]movement{
			0: {Account: 0, Version: 2, Amount: 11}, 1: {Account: 1, Version: 1, Amount: 1},
			2: {Account: 2}, 50: {Account: 50, Version: 1, Amount: -7},
		},
		counted: true, binds: 110, parses: 5, forwarded: 4,
	}
	return o, t
}

// failing returns the checks that do not hold.
func failing(o *outcome, tr *stored, logged ...record) []string {
	r := &row{named: true}
	var texts []string
	for _, c := range append(audit(o, tr), auditStatements(r, o, tr, logged)...) {
		if !c.ok {
			texts = append(texts, c.text)
		}
	}
	return texts
}

func TestAuditFindsEveryFault(t *testing.T) {
	t.Parallel()
	o, tr := perfect()
	if bad := failing(o, tr); bad != nil {
		t.Fatalf("the perfect run fails: %q", bad)
	}
	var logged []record
	for name, test := range map[string]struct {
		spoil func(o *outcome, tr *stored)
		want  string
	}{
		"nothing was done":        {func(o *outcome, tr *stored) { *o, *tr = outcome{}, stored{} }, "transactions committed"},
		"a commit left no event":  {func(o *outcome, _ *stored) { o.committed++ }, "4 events in the log"},
		"an event was lost":       {func(o *outcome, _ *stored) { o.deliveries = o.deliveries[1:] }, "1 missing"},
		"an event was invented":   {func(o *outcome, _ *stored) { o.deliveries[1].seq = 99 }, "1 that nobody published"},
		"a key was changed":       {func(o *outcome, _ *stored) { o.deliveries[1].key = "account-9" }, "1 that nobody published"},
		"progress was lost":       {func(_ *outcome, tr *stored) { tr.undone = 1 }, "1 not recorded"},
		"one came twice":          {func(o *outcome, _ *stored) { o.deliveries = append(o.deliveries, o.deliveries[1]) }, "1 repeated"},
		"two of a key swapped":    {func(o *outcome, _ *stored) { slices.Reverse(o.deliveries) }, "1 not in order"},
		"seq not in commit order": {func(o *outcome, _ *stored) { o.deliveries[0].Version, o.deliveries[3].Version = 2, 1 }, "1 not in order"},
		"a balance is wrong":      {func(_ *outcome, tr *stored) { tr.accounts[2] = movement{Account: 2, Amount: 1} }, "1 do not"},
		"a version is wrong":      {func(_ *outcome, tr *stored) { tr.accounts[2] = movement{Account: 2, Version: 1} }, "1 do not"},
		"a transaction failed":    {func(o *outcome, _ *stored) { o.fail(errors.New("boom")) }, "1 failure, the first: boom"},
		"statements were parsed":  {func(o *outcome, _ *stored) { o.stats.Parses = 5 }, "0.0500 statements parsed"},
		"servers parsed":          {func(_ *outcome, tr *stored) { tr.forwarded = 6 }, "total_server_parse_count"},
		"parses were not counted": {func(o *outcome, _ *stored) { o.total.Parses = 30 }, "28 parses of a name"},
		"binds were not counted":  {func(_ *outcome, tr *stored) { tr.binds = 90 }, "counts 90"},
		"a warning too many":      {func(*outcome, *stored) { logged = []record{{level: slog.LevelWarn}} }, "1 warning instead of 0"},
	} {
		o, tr := perfect()
		logged = nil
		test.spoil(o, tr)
		bad := failing(o, tr, logged...)
		if !slices.ContainsFunc(bad, func(s string) bool { return strings.Contains(s, test.want) }) {
			t.Errorf("%s: failing are %q, want one with %q", name, bad, test.want)
		}
	}
}

func TestEnv(t *testing.T) {
	t.Parallel()
	var said []string
	e := &env{log: func(line string) { said = append(said, line) }}
	e.Cleanup(func() { e.Logf("first") })
	e.Cleanup(func() { e.Logf("second") })
	if err := e.attempt(func() { e.Skipf("no %s", "server"); t.Error("Skipf returned") }); err == nil || err.Error() != "no server" || e.Failed() {
		t.Errorf("Skipf: %v, failed %t", err, e.Failed())
	}
	if err := e.attempt(func() { e.Fatalf("broken"); t.Error("Fatalf returned") }); err == nil || err.Error() != "broken" || !e.Failed() {
		t.Errorf("Fatalf: %v, failed %t", err, e.Failed())
	}
	e.close()
	e.close()
	if diff := cmp.Diff([]string{"second", "first"}, said); diff != "" {
		t.Errorf("cleanups: %s", diff)
	}
}

func TestRecorder(t *testing.T) {
	t.Parallel()
	r := newRecorder()
	log := slog.New(r)
	log.Info("not kept", slog.Int("n", 1))
	log.With(slog.Int("a", 1)).WithGroup("g").With(slog.Int("b", 2)).
		Warn("kept", slog.Int("c", 3), slog.Group("h", slog.Int("d", 4)))
	log.Error("kept too")
	want := []record{
		{slog.LevelWarn, "kept", map[string]string{"a": "1", "g.b": "2", "g.c": "3", "g.h.d": "4"}},
		{slog.LevelError, "kept too", map[string]string{}},
	}
	if diff := cmp.Diff(want, r.records(), cmp.AllowUnexported(record{})); diff != "" {
		t.Error(diff)
	}
}

func TestTable(t *testing.T) {
	t.Parallel()
	o, _ := perfect()
	o.publishing, o.delivering = time.Millisecond, 2*time.Millisecond
	o.stats.Notifies = 1234
	rows := []*row{
		{name: "direct 17", err: errors.New("no server\nrun: make setup"), omitted: "missing"},
		{name: "direct 15", outcome: o, checks: []check{{ok: true}}},
		{name: "PgBouncer 1.18", outcome: o, checks: []check{{ok: true}, {ok: false}}, policy: executor.Shared, logged: []record{{level: slog.LevelError}}},
		{name: "PgBouncer 1.24", err: errors.New("boom")},
	}
	var ok []bool
	for _, r := range rows {
		ok = append(ok, r.ok())
	}
	if diff := cmp.Diff([]bool{true, true, false, false}, ok); diff != "" {
		t.Error(diff)
	}
	out := &watched{}
	v := newView(out)
	v.table(rows)
	golden(t, "table", out.String())

	out = &watched{}
	v = newView(out)
	v.terminal, v.width = true, 80
	v.table(rows)
	golden(t, "table_narrow", text.StripEscape(out.String()))
}

func TestThousands(t *testing.T) {
	t.Parallel()
	for n, want := range map[int]string{0: "0", 999: "999", 1000: "1,000", -1000: "-1,000", -100: "-100", 1234567: "1,234,567"} {
		if got := thousands(n); got != want {
			t.Errorf("%d: %s", n, got)
		}
	}
}
