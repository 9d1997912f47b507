package statement_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/internal/pgscript"
	"github.com/bounceproof/bounceproof/internal/statement"
)

// Where a pooler may answer Close and Parse itself, both stand in front of all other answers but those of BEGIN and the like.
func TestGroupBehindATrackingPooler(t *testing.T) {
	t.Parallel()
	w := newWire(t, pgscript.Options{Kind: pgscript.Tracked}, 100)
	const n = 40
	ds := make([]*statement.Description, n)
	for i := range ds {
		ds[i] = w.learn(fmt.Sprint("select $1, ", i))
	}
	sel, ins := w.learn(selectArg), w.learn(insertArg)
	add := func(g *statement.Group, d *statement.Description, st fallback.Strategy, arg int) fallback.Strategy {
		t.Helper()
		if err := g.Add(statement.Execution{Description: d, Strategy: st, Args: []any{arg}, Tracked: true}); err != nil {
			t.Fatal(err)
		}
		return g.Strategy(g.Len() - 1)
	}
	bind := func(name string) []string { return []string{"Bind " + name, "Describe portal", "Execute"} }
	parse := func(name string) []string { return []string{"Parse " + name, "Describe " + name} }
	unnamed := func(sql string) []string { return messages(`Parse "" `+sql, bind(`""`)) }
	s, i := sel.Name(), ins.Name()

	g := w.c.NewGroup()
	g.AddText("begin")
	add(g, ds[0], fallback.Unprepared, 1)
	add(g, sel, fallback.Named, 2)
	add(g, sel, fallback.Named, 3)
	add(g, ins, fallback.Named, 4)
	g.AddText("commit")
	w.finish("in front", g, "", "1", "2", "3", "", "")
	w.expect("in front, behind BEGIN", messages("Close "+s, "Close "+i, textBegin, parse(s), parse(i), unnamed(ds[0].SQL()), bind(s), bind(s), bind(i), textCommit, "Sync")...)

	// A text, DDL or what throws statements away may give a Parse another meaning, and nothing else that precedes a statement may.
	for _, test := range []struct {
		name, sql string
		text      bool
		moves     bool
	}{
		{"a query", "select 1, $1", false, true},
		{"a text", "set search_path = x", true, false},
		{"BEGIN", "begin", true, true},
		{"COMMIT", "commit", true, true},
		{"DDL", "create table x (n int)", false, false},
		{"a procedure", "call p($1)", false, false},
		{"DEALLOCATE", "deallocate x", false, false},
		{"TRUNCATE", "truncate x", false, true},
	} {
		w.c.ForgetAll()
		g := w.c.NewGroup()
		add(g, ds[0], fallback.Unprepared, 1)
		if test.text {
			g.AddText(test.sql)
		} else {
			d := w.learn(test.sql)
			var args []any
			if strings.Contains(test.sql, "$1") {
				args = []any{1}
			}
			if err := g.Add(statement.Execution{Description: d, Strategy: fallback.Unprepared, Args: args, Tracked: true}); err != nil {
				t.Fatal(err)
			}
		}
		if got := add(g, sel, fallback.Named, 2) == fallback.Named; got != test.moves {
			t.Errorf("behind %s a Parse moves in front: %t", test.name, got)
		}
	}

	// As much as the answers leave room for, and more with the next group; what is known rides in any number.
	w.c.ForgetAll()
	w.b.Reset()
	known := 0
	for round := range 4 {
		g := w.c.NewGroup()
		want := make([]string, n)
		named := 0
		for k, d := range ds {
			want[k] = fmt.Sprint(k)
			if add(g, d, fallback.Named, k) == fallback.Named {
				named++
			}
		}
		w.finish(fmt.Sprint("round ", round), g, want...)
		sent := pgscript.Strings(w.b.Sent())
		w.b.Reset()
		first := slices.IndexFunc(sent, func(m string) bool { return strings.HasPrefix(m, "Bind") })
		last := 0
		for k, m := range sent {
			if strings.HasPrefix(m, "Close") || strings.HasPrefix(m, "Parse bp_") {
				last = k
			}
		}
		if last > first && round < 2 {
			t.Errorf("round %d: %q behind %q", round, sent[last], sent[first])
		}
		if more := named - known; named < n && (more < 10 || more > 25) {
			t.Errorf("round %d: %d new names", round, more)
		}
		if known = named; known != w.c.Known() {
			t.Errorf("round %d: %d by name, the connection knows %d", round, known, w.c.Known())
		}
	}
	if known != n {
		t.Errorf("at last %d of %d by name", known, n)
	}
}

// The error of a Parse that stands in front belongs to the statement whose it is.
func TestGroupSaysWhoseParseFailed(t *testing.T) {
	t.Parallel()
	for _, tracked := range []bool{false, true} {
		w := newWire(t, pgscript.Options{}, 10)
		a, b := w.learn("select 1, $1"), w.learn("select 2, $1")
		w.b.Define("select 2, $1", pgscript.Statement{
			Params: []uint32{23}, Fail: pgscript.FailTimes(pgscript.Parse, 1, pgscript.ServerError("42P01", "gone", "parserOpenTable")),
		})
		g := w.c.NewGroup()
		g.AddText("begin")
		for _, d := range []*statement.Description{a, a, b, a} {
			if err := g.Add(statement.Execution{Description: d, Strategy: fallback.Named, Args: []any{1}, Tracked: tracked}); err != nil {
				t.Fatal(err)
			}
		}
		got, err := finish(t.Context(), g)
		var pgErr *pgconn.PgError
		if !errors.As(err, &pgErr) || pgErr.Code != "42P01" || g.Failed() != 3 {
			t.Errorf("tracked %t: %v, item %d", tracked, err, g.Failed())
		}
		if want := map[bool]int{false: 3, true: 1}[tracked]; len(got) != want {
			t.Errorf("tracked %t: %d results before it", tracked, len(got))
		}
		if !w.c.Knows(a.Name()) || w.c.Knows(b.Name()) {
			t.Errorf("tracked %t: known: %t, %t", tracked, w.c.Knows(a.Name()), w.c.Knows(b.Name()))
		}
	}
}
