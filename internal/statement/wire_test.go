package statement_test

import (
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/internal/pgscript"
	"github.com/bounceproof/bounceproof/internal/statement"
	"github.com/bounceproof/bounceproof/prepare"
)

// wire is a connection to a scripted backend, and what prepare knows of it.
type wire struct {
	t *testing.T
	b *pgscript.Backend
	c *statement.Conn
	k *statement.Catalog
}

func newWire(t *testing.T, o pgscript.Options, capacity int) *wire {
	t.Helper()
	b := pgscript.New(t, o)
	return dialWire(t, b, capacity)
}

func dialWire(t *testing.T, b *pgscript.Backend, capacity int) *wire {
	t.Helper()
	conn, err := pgx.ConnectConfig(t.Context(), b.ConnConfig(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	b.Reset()
	return &wire{t: t, b: b, c: statement.Attach(conn, capacity), k: statement.NewCatalog(1, "")}
}

// learn returns the description of a text, and forgets what that took on the wire.
func (w *wire) learn(sql string) *statement.Description {
	w.t.Helper()
	d, err := w.k.Lookup(sql, true).Learn(w.t.Context(), w.c, nil)
	if err != nil {
		w.t.Fatal(err)
	}
	w.b.Reset()
	return d
}

// run runs an execution to its end and returns the one number it gave.
func (w *wire) run(ctx context.Context, e statement.Execution) (string, error) {
	rr, err := w.c.Run(ctx, &e)
	if err != nil {
		return "", err
	}
	return read(rr)
}

func read(rr *pgconn.ResultReader) (string, error) {
	var text string
	for rr.NextRow() {
		v := rr.Values()[0]
		if rr.FieldDescriptions()[0].Format == pgx.BinaryFormatCode {
			n := 0
			for _, b := range v {
				n = n<<8 | int(b)
			}
			v = []byte(itoa(n))
		}
		text += string(v)
	}
	_, err := rr.Close()
	return text, err
}

func itoa(n int) string {
	if n >= 10 {
		return itoa(n/10) + string(rune('0'+n%10))
	}
	return string(rune('0' + n))
}

// expect compares what was sent since the last call, in one write.
func (w *wire) expect(what string, want ...string) {
	w.t.Helper()
	if want == nil {
		want = []string{}
	}
	if diff := cmp.Diff(want, pgscript.Strings(w.b.Sent())); diff != "" {
		w.t.Errorf("%s (-want +got):\n%s", what, diff)
	}
	if len(want) > 0 && w.b.Writes() != 1 {
		w.t.Errorf("%s: %d writes", what, w.b.Writes())
	}
	w.b.Reset()
}

const (
	selectArg = "select $1"
	insertArg = "insert into t values ($1)"
)

func TestLearnMessages(t *testing.T) {
	t.Parallel()
	w := newWire(t, pgscript.Options{}, 10)
	d, err := w.k.Lookup(selectArg, true).Learn(t.Context(), w.c, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range w.b.Sent() {
		if len(m.OIDs) > 0 {
			t.Error("learning fixed the types it asks for:", m)
		}
	}
	w.expect("learning", `Parse "" select $1`, `Describe ""`, "Sync")
	if diff := cmp.Diff([]uint32{23}, d.ParamOIDs()); diff != "" || len(d.Fields()) != 1 {
		t.Error(diff, d.Fields())
	}
	if want := prepare.Name(selectArg, []uint32{23}, ""); d.Name() != want {
		t.Error(d.Name(), want)
	}

	// In a transaction that has not begun, BEGIN goes first: a failure leaves it as aborted as it would be in pgx.
	if _, err := w.k.Lookup(insertArg, true).Learn(t.Context(), w.c, &[]string{"begin", "savepoint a"}); err != nil {
		t.Fatal(err)
	}
	w.expect("learning in a transaction",
		`Parse "" begin`, `Bind ""`, "Describe portal", "Execute",
		`Parse "" savepoint a`, `Bind ""`, "Describe portal", "Execute",
		`Parse "" insert into t values ($1)`, `Describe ""`, "Sync")
	if status := w.c.PgConn().TxStatus(); status != 'T' {
		t.Errorf("status %c", status)
	}

	texts := []string{"select 1", "select 2, $1"}
	var sts []*statement.Statement
	for _, text := range texts {
		sts = append(sts, w.k.Lookup(text, true))
	}
	if _, err := w.c.LearnAll(t.Context(), sts, nil); err != nil {
		t.Fatal(err)
	}
	w.expect("learning several", `Parse "" select 1`, `Describe ""`, `Parse "" select 2, $1`, `Describe ""`, "Sync")
	for i, st := range sts {
		if st.Description() == nil || len(st.Description().ParamOIDs()) != i {
			t.Error(texts[i], st.Description())
		}
	}
	if w.c.Learns != 4 || w.c.Parses != 0 {
		t.Error(w.c.Learns, w.c.Parses)
	}
}

func TestLearnAllKeepsWhatWasLearntBeforeAFailure(t *testing.T) {
	t.Parallel()
	w := newWire(t, pgscript.Options{}, 10)
	w.b.Define("select 2", pgscript.Statement{Fail: pgscript.FailTimes(pgscript.Parse, 1, pgscript.ServerError("42P01", "no table", "parserOpenTable"))})
	a, b, c := w.k.Lookup("select 1", true), w.k.Lookup("select 2", true), w.k.Lookup("select 3", true)
	_, err := w.c.LearnAll(t.Context(), []*statement.Statement{a, b, c}, nil)
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) || pgErr.Code != "42P01" {
		t.Fatal(err)
	}
	if a.Description() == nil || b.Description() != nil || c.Description() != nil {
		t.Error(a.Description(), b.Description(), c.Description())
	}
	if got, err := w.run(t.Context(), statement.Execution{Description: a.Description()}); got != "1" || err != nil {
		t.Error(got, err)
	}
}

func TestRunMessages(t *testing.T) {
	t.Parallel()
	w := newWire(t, pgscript.Options{}, 10)
	sel, ins := w.learn(selectArg), w.learn(insertArg)
	s, i := sel.Name(), ins.Name()
	for _, step := range []struct {
		what   string
		d      *statement.Description
		s      fallback.Strategy
		parse  bool
		direct bool
		want   []string
	}{
		{"unprepared", sel, fallback.Unprepared, false, false, []string{`Parse "" select $1`, `Bind ""`, "Describe portal", "Execute", "Sync"}},
		{"unprepared, direct", sel, fallback.Unprepared, false, true, []string{`Parse "" select $1`, `Bind ""`, "Describe portal", "Execute", "Sync"}},
		{"first use", sel, fallback.Named, false, false, []string{"Close " + s, "Parse " + s, "Bind " + s, "Describe portal", "Execute", "Sync"}},
		{"later use behind a pooler", sel, fallback.Named, false, false, []string{"Bind " + s, "Describe portal", "Execute", "Sync"}},
		{"later use, direct", sel, fallback.Named, false, true, []string{"Bind " + s, "Execute", "Sync"}},
		{"first use, direct, no rows", ins, fallback.Named, false, true, []string{"Close " + i, "Parse " + i, "Bind " + i, "Describe portal", "Execute", "Sync"}},
		{"later use, direct, no rows", ins, fallback.Named, false, true, []string{"Bind " + i, "Describe portal", "Execute", "Sync"}},
		{"shared", sel, fallback.Shared, false, false, []string{"Bind " + s, "Describe portal", "Execute", "Sync"}},
		{"shared, direct: never without the description", sel, fallback.Shared, false, true, []string{"Bind " + s, "Describe portal", "Execute", "Sync"}},
		{"shared parse", sel, fallback.Shared, true, false, []string{"Close " + s, "Parse " + s, "Bind " + s, "Describe portal", "Execute", "Sync"}},
		{"shared parse again", sel, fallback.Shared, true, false, []string{"Close " + s, "Parse " + s, "Bind " + s, "Describe portal", "Execute", "Sync"}},
	} {
		got, err := w.run(t.Context(), statement.Execution{Description: step.d, Strategy: step.s, Parse: step.parse, Direct: step.direct, Args: []any{42}})
		if err != nil || step.d == sel && got != "42" {
			t.Errorf("%s: %q, %v", step.what, got, err)
		}
		for _, m := range w.b.Sent() {
			if m.Kind == "Parse" && !slices.Equal(m.OIDs, []uint32{23}) {
				t.Errorf("%s: a Parse without its types: %v", step.what, m.OIDs)
			}
		}
		w.expect(step.what, step.want...)
	}
	if w.c.Parses != 2+2+2 {
		t.Error("Parses:", w.c.Parses)
	}
}

// A direct connection decodes by the description that came with its own Parse; none recorded, one is asked for.
func TestRunDirectDescribesWithoutARecord(t *testing.T) {
	t.Parallel()
	w := newWire(t, pgscript.Options{}, 10)
	d := w.learn("fetch c")
	e := statement.Execution{Description: d, Strategy: fallback.Named, Direct: true}
	for range 3 {
		if _, err := w.run(t.Context(), e); err != nil {
			t.Fatal(err)
		}
	}
	w.b.Reset()
	if _, err := w.run(t.Context(), e); err != nil {
		t.Fatal(err)
	}
	w.expect("a statement without columns", "Bind "+d.Name(), "Describe portal", "Execute", "Sync")
}

func TestRunKnowsANameOnlyByProof(t *testing.T) {
	t.Parallel()
	w := newWire(t, pgscript.Options{}, 10)
	unique := pgscript.ServerError("23505", "duplicate", "_bt_check_unique")
	for _, test := range []struct {
		what  string
		sql   string
		step  pgscript.Step
		known bool
	}{
		// The row description proves the Parse, whatever Execute says.
		{"a query that fails while it runs", "select 1 + $1", pgscript.Execute, true},
		// No proof: no rows, and no success.
		{"a command that fails while it runs", "insert into a values ($1)", pgscript.Execute, false},
		{"a query refused at Bind", "select 2 + $1", pgscript.Bind, false},
		{"a query refused at Parse", "select 3 + $1", pgscript.Parse, false},
		{"a command that fails at the end of its transaction", "insert into b values ($1)", pgscript.Sync, false},
	} {
		d := w.learn(test.sql)
		st := pgscript.Statement{Params: []uint32{23}, Fail: pgscript.FailTimes(test.step, 1, unique)}
		if test.sql[0] == 's' {
			st.Columns = []pgscript.Column{{Name: "n", OID: 23}}
			st.Rows = func(args []string) [][]string { return [][]string{args} }
		}
		w.b.Define(test.sql, st)
		e := statement.Execution{Description: d, Strategy: fallback.Named, Args: []any{7}}
		var pgErr *pgconn.PgError
		if _, err := w.run(t.Context(), e); !errors.As(err, &pgErr) || pgErr.Code != "23505" {
			t.Errorf("%s: %v", test.what, err)
		}
		if w.c.Knows(d.Name()) != test.known {
			t.Errorf("%s: known is %t", test.what, !test.known)
		}
		w.b.Reset()
		if _, err := w.run(t.Context(), e); err != nil {
			t.Errorf("%s, again: %v", test.what, err)
		}
		want := []string{"Bind " + d.Name(), "Describe portal", "Execute", "Sync"}
		if !test.known {
			want = slices.Concat([]string{"Close " + d.Name(), "Parse " + d.Name()}, want)
		}
		w.expect(test.what+", again", want...)
	}
}

// The same after a failed Parse on a tracking pooler, which keeps the name and ends a connection that parses it again without Close.
func TestRunAfterAFailedParseOnATrackingPooler(t *testing.T) {
	t.Parallel()
	w := newWire(t, pgscript.Options{Kind: pgscript.Tracked}, 10)
	d := w.learn(insertArg)
	fail := func() {
		w.b.Define(insertArg, pgscript.Statement{Params: []uint32{23}, Fail: pgscript.FailTimes(pgscript.Parse, 1, pgscript.ServerError("42P01", "no table", "x"))})
	}
	for range 3 {
		fail()
		e := statement.Execution{Description: d, Strategy: fallback.Named, Args: []any{7}}
		if _, err := w.run(t.Context(), e); err == nil {
			t.Fatal("no error")
		}
		if w.c.PgConn().IsClosed() {
			t.Fatal("the connection was lost")
		}
	}
	if _, err := w.run(t.Context(), statement.Execution{Description: d, Strategy: fallback.Named, Args: []any{7}}); err != nil {
		t.Fatal(err)
	}
	// Negative control: without the Close it is lost.
	fail()
	pg := w.c.PgConn()
	_, _ = pg.Prepare(t.Context(), "by_hand", insertArg, nil)
	if _, _ = pg.Prepare(t.Context(), "by_hand", insertArg, nil); !pg.IsClosed() {
		t.Error("the pooler did not mind a second Parse")
	}
}

func TestRunRefusesArgumentsBeforeAnythingIsSent(t *testing.T) {
	t.Parallel()
	w := newWire(t, pgscript.Options{}, 10)
	d := w.learn(selectArg)
	for _, args := range [][]any{nil, {1, 2}, {int64(1) << 40}, {struct{}{}}} {
		for _, s := range []fallback.Strategy{fallback.Unprepared, fallback.Named, fallback.Shared} {
			if _, err := w.c.Run(t.Context(), &statement.Execution{Description: d, Strategy: s, Args: args}); err == nil {
				t.Error(s, args, "accepted")
			}
			if err := w.c.NewGroup().Add(statement.Execution{Description: d, Strategy: s, Args: args}); err == nil {
				t.Error(s, args, "accepted by a group")
			}
		}
	}
	w.expect("nothing")
	if got, err := w.run(t.Context(), statement.Execution{Description: d, Strategy: fallback.Named, Args: []any{8}}); got != "8" || err != nil {
		t.Error(got, err)
	}
}
