package statement_test

import (
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/internal/pgscript"
	"github.com/bounceproof/bounceproof/internal/statement"
)

// finish sends a group and reads all its results.
func finish(ctx context.Context, g *statement.Group) ([]string, error) {
	if err := g.Send(ctx); err != nil {
		return nil, errors.Join(err, g.Close())
	}
	var out []string
	for range g.Len() {
		rr, err := g.Next()
		if err != nil {
			return out, errors.Join(err, g.Close())
		}
		text, err := read(rr)
		if err != nil {
			return out, errors.Join(err, g.Close())
		}
		out = append(out, text)
	}
	return out, g.Close()
}

func (w *wire) finish(what string, g *statement.Group, want ...string) {
	w.t.Helper()
	got, err := finish(w.t.Context(), g)
	if err != nil {
		w.t.Fatalf("%s: %v", what, err)
	}
	if len(got) != len(want) {
		w.t.Fatalf("%s: %d results, want %d", what, len(got), len(want))
	}
	for i := range want {
		if got[i] != want[i] {
			w.t.Errorf("%s: result %d is %q, want %q", what, i, got[i], want[i])
		}
	}
}

var (
	textBegin  = []string{`Parse "" begin`, `Bind ""`, "Describe portal", "Execute"}
	textCommit = []string{`Parse "" commit`, `Bind ""`, "Describe portal", "Execute"}
)

func messages(parts ...any) []string {
	var out []string
	for _, p := range parts {
		switch p := p.(type) {
		case string:
			out = append(out, p)
		case []string:
			out = append(out, p...)
		}
	}
	return out
}

func TestGroupMessages(t *testing.T) {
	t.Parallel()
	w := newWire(t, pgscript.Options{}, 10)
	sel, ins := w.learn(selectArg), w.learn(insertArg)
	s, i := sel.Name(), ins.Name()
	add := func(g *statement.Group, d *statement.Description, st fallback.Strategy, arg int) {
		t.Helper()
		if err := g.Add(statement.Execution{Description: d, Strategy: st, Args: []any{arg}}); err != nil {
			t.Fatal(err)
		}
	}
	bind := func(name string) []string { return []string{"Bind " + name, "Describe portal", "Execute"} }
	parse := func(name string) []string { return []string{"Parse " + name, "Describe " + name} }

	g := w.c.NewGroup()
	g.AddText("begin")
	add(g, sel, fallback.Named, 1)
	add(g, ins, fallback.Named, 2)
	add(g, sel, fallback.Named, 3)
	g.AddText("commit")
	w.finish("named", g, "", "1", "", "3", "")
	w.expect("named: BEGIN precedes every Parse, and each statement has one",
		messages("Close "+s, "Close "+i, textBegin, parse(s), bind(s), parse(i), bind(i), bind(s), textCommit, "Sync")...)
	if w.b.Committed(insertArg) != 0 { // expect has reset the count
		t.Error("counted twice")
	}

	g = w.c.NewGroup()
	add(g, sel, fallback.Named, 4)
	add(g, ins, fallback.Named, 5)
	w.finish("named again", g, "4", "")
	w.expect("named again: no Parse", messages(bind(s), bind(i), "Sync")...)

	g = w.c.NewGroup()
	for n := range 2 {
		if err := g.Add(statement.Execution{Description: sel, Strategy: fallback.Named, Args: []any{n}, Parse: true}); err != nil {
			t.Fatal(err)
		}
	}
	w.finish("reparse", g, "0", "1")
	w.expect("reparse: once a group, known or not", messages("Close "+s, parse(s), bind(s), bind(s), "Sync")...)

	g = w.c.NewGroup()
	for n := range 2 {
		if err := g.Add(statement.Execution{Description: sel, Strategy: fallback.Shared, Args: []any{n}, Parse: true}); err != nil {
			t.Fatal(err)
		}
	}
	w.finish("shared, parsed", g, "0", "1")
	w.expect("shared: parsed once", messages("Close "+s, parse(s), bind(s), bind(s), "Sync")...)

	g = w.c.NewGroup()
	add(g, sel, fallback.Shared, 6)
	w.finish("bound", g, "6")
	w.expect("bound", messages(bind(s), "Sync")...)

	g = w.c.NewGroup()
	add(g, sel, fallback.Unprepared, 1)
	add(g, sel, fallback.Unprepared, 2)
	add(g, ins, fallback.Unprepared, 3)
	add(g, sel, fallback.Unprepared, 4)
	add(g, sel, fallback.Named, 5)
	add(g, sel, fallback.Unprepared, 6)
	g.AddText("select 7")
	add(g, sel, fallback.Unprepared, 8)
	w.finish("unprepared", g, "1", "2", "", "4", "5", "6", "7", "8")
	unnamed := func(sql string) []string { return messages(`Parse "" `+sql, bind(`""`)) }
	w.expect("unprepared: one Parse for a run of the same",
		messages(unnamed(selectArg), bind(`""`), unnamed(insertArg), unnamed(selectArg), bind(s), unnamed(selectArg),
			unnamed("select 7"), unnamed(selectArg), "Sync")...)
}

func TestGroupStopsAtAFailure(t *testing.T) {
	t.Parallel()
	w := newWire(t, pgscript.Options{}, 10)
	a, b, c := w.learn("select 1, $1"), w.learn("insert into b values ($1)"), w.learn("select 3, $1")
	w.b.Define("insert into b values ($1)", pgscript.Statement{
		Params: []uint32{23}, Fail: pgscript.FailTimes(pgscript.Execute, 1, pgscript.ServerError("23505", "duplicate", "_bt_check_unique")),
	})
	g := w.c.NewGroup()
	for _, d := range []*statement.Description{a, b, c} {
		if err := g.Add(statement.Execution{Description: d, Strategy: fallback.Named, Args: []any{1}}); err != nil {
			t.Fatal(err)
		}
	}
	got, err := finish(t.Context(), g)
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) || pgErr.Code != "23505" || len(got) != 1 {
		t.Fatal(got, err)
	}
	if err := g.Close(); !errors.As(err, &pgErr) {
		t.Error("Close forgot the error:", err)
	}
	// What the answer proved is known, what was skipped is not.
	for _, d := range []*statement.Description{a, b, c} {
		if want := d != c; w.c.Knows(d.Name()) != want {
			t.Errorf("%s: known is %t", d.SQL(), !want)
		}
	}
	if got, err := w.run(t.Context(), statement.Execution{Description: a, Strategy: fallback.Named, Args: []any{9}}); got != "9" || err != nil {
		t.Error("the connection after it:", got, err)
	}
}

// A group's own end may fail, after every result: a deferred constraint.
func TestGroupEndFails(t *testing.T) {
	t.Parallel()
	w := newWire(t, pgscript.Options{}, 10)
	d := w.learn(insertArg)
	w.b.Define(insertArg, pgscript.Statement{
		Params: []uint32{23}, Fail: pgscript.FailTimes(pgscript.Sync, 1, pgscript.ServerError("23503", "deferred", "ri_ReportViolation")),
	})
	g := w.c.NewGroup()
	if err := g.Add(statement.Execution{Description: d, Args: []any{1}}); err != nil {
		t.Fatal(err)
	}
	got, err := finish(t.Context(), g)
	var pgErr *pgconn.PgError
	if len(got) != 1 || !errors.As(err, &pgErr) || pgErr.Code != "23503" {
		t.Error(got, err)
	}
	if w.c.PgConn().IsClosed() || w.c.PgConn().IsBusy() {
		t.Error("the connection is not free")
	}
}

// Closing a group early reads the rest, and the connection is free.
func TestGroupClosedEarly(t *testing.T) {
	t.Parallel()
	w := newWire(t, pgscript.Options{}, 10)
	d := w.learn(selectArg)
	for reads := range 3 {
		g := w.c.NewGroup()
		for n := range 3 {
			if err := g.Add(statement.Execution{Description: d, Strategy: fallback.Named, Args: []any{n}}); err != nil {
				t.Fatal(err)
			}
		}
		if err := g.Send(t.Context()); err != nil {
			t.Fatal(err)
		}
		for range reads {
			if _, err := g.Next(); err != nil {
				t.Fatal(err)
			}
		}
		if err := g.Close(); err != nil {
			t.Fatal(err)
		}
		if got, err := w.run(t.Context(), statement.Execution{Description: d, Strategy: fallback.Named, Args: []any{77}}); got != "77" || err != nil {
			t.Fatal(reads, got, err)
		}
	}
}
