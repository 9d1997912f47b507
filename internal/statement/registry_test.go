package statement_test

import (
	"context"
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/internal/pgscript"
	"github.com/bounceproof/bounceproof/internal/statement"
	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

func TestAttachIsOnePerConnection(t *testing.T) {
	t.Parallel()
	w := newWire(t, pgscript.Options{}, 10)
	if again := statement.Attach(w.c.Conn(), 20); again != w.c {
		t.Error("another state for the same connection")
	}
	if other := dialWire(t, w.b, 10); other.c == w.c {
		t.Error("one state for two connections")
	}
}

// named executes a statement by name and returns what was sent.
func (w *wire) named(d *statement.Description) []string {
	w.t.Helper()
	w.b.Reset()
	if _, err := w.run(w.t.Context(), statement.Execution{Description: d, Strategy: fallback.Named}); err != nil {
		w.t.Fatal(err)
	}
	return pgscript.Strings(w.b.Sent())
}

func (w *wire) learnMany(n int) []*statement.Description {
	w.t.Helper()
	ds := make([]*statement.Description, n)
	for i := range ds {
		ds[i] = w.learn(fmt.Sprint("select ", i))
	}
	return ds
}

func TestEvictedNamesAreClosed(t *testing.T) {
	t.Parallel()
	w := newWire(t, pgscript.Options{}, 3)
	ds := w.learnMany(6)
	for _, d := range ds[:3] {
		w.named(d)
	}
	w.named(ds[0]) // now ds[1] is the least recently used
	w.named(ds[3])
	if w.c.Known() != 3 || w.c.Knows(ds[1].Name()) || !w.c.Knows(ds[0].Name()) {
		t.Fatal("not the least recently used one was evicted:", w.c.Known())
	}
	want := messages("Close "+ds[1].Name(), "Bind "+ds[0].Name(), "Describe portal", "Execute", "Sync")
	if diff := cmp.Diff(want, w.named(ds[0])); diff != "" {
		t.Error("the Close rides in front of the next request:", diff)
	}
	if got := w.named(ds[0]); len(got) != 4 {
		t.Error("it rides once:", got)
	}
	held := []string{ds[0].Name(), ds[2].Name(), ds[3].Name()}
	slices.Sort(held)
	if diff := cmp.Diff(held, w.b.Names()); diff != "" {
		t.Error("on the server:", diff)
	}
	// Also in front of a group, and of an execution without a name.
	w.named(ds[4])
	w.b.Reset()
	if _, err := w.run(t.Context(), statement.Execution{Description: ds[0]}); err != nil {
		t.Fatal(err)
	}
	w.expect("in front of an unprepared one", "Close "+ds[2].Name(), `Parse "" select 0`, `Bind ""`, "Describe portal", "Execute", "Sync")
	w.named(ds[5])
	w.b.Reset()
	g := w.c.NewGroup()
	g.AddText("begin")
	w.finish("a group", g, "")
	evicted := ds[3].Name()
	w.expect("in front of a group", messages("Close "+evicted, textBegin, "Sync")...)
}

// A request that is never sent must not take the owed Closes with it, or the names stay on the server for good.
func TestOwedCloseSurvivesARequestThatIsNotSent(t *testing.T) {
	t.Parallel()
	done, cancel := context.WithCancel(t.Context())
	cancel()
	for what, try := range map[string]func(w *wire, d *statement.Description) error{
		"a single statement": func(w *wire, d *statement.Description) error {
			_, err := w.run(done, statement.Execution{Description: d})
			return err
		},
		"arguments that cannot be encoded": func(w *wire, d *statement.Description) error {
			_, err := w.run(w.t.Context(), statement.Execution{Description: d, Args: []any{1}})
			return err
		},
		"a group": func(w *wire, d *statement.Description) error {
			g := w.c.NewGroup()
			if err := g.Add(statement.Execution{Description: d}); err != nil {
				return err
			}
			_, err := finish(done, g)
			return err
		},
	} {
		w := newWire(t, pgscript.Options{}, 1)
		ds := w.learnMany(2)
		w.named(ds[0])
		w.named(ds[1]) // evicts
		if err := try(w, ds[1]); err == nil {
			t.Fatal(what, "was sent")
		}
		if w.c.PgConn().IsClosed() {
			t.Error(what, "closed the connection")
			continue
		}
		if got := w.named(ds[1]); got[0] != "Close "+ds[0].Name() {
			t.Errorf("after %s the evicted name is not closed any more: %v", what, got)
		}
	}
}

func TestForgottenNamesAreParsedAgain(t *testing.T) {
	t.Parallel()
	w := newWire(t, pgscript.Options{}, 3)
	ds := w.learnMany(3)
	for _, d := range ds {
		w.named(d)
	}
	w.c.Forget(ds[0].Name())
	w.c.Forget("another name")
	first := func(d *statement.Description) []string {
		return messages("Close "+d.Name(), "Parse "+d.Name(), "Bind "+d.Name(), "Describe portal", "Execute", "Sync")
	}
	if diff := cmp.Diff(first(ds[0]), w.named(ds[0])); diff != "" {
		t.Error(diff)
	}
	w.c.ForgetAll()
	for _, d := range ds {
		if diff := cmp.Diff(first(d), w.named(d)); diff != "" {
			t.Error(diff)
		}
	}
}

// heldNames are the prepared statements of ours on a server connection, as PostgreSQL shows them.
func heldNames(t *testing.T, c *statement.Conn) []string {
	t.Helper()
	rows, _ := c.Conn().Query(t.Context(), "select name from pg_prepared_statements where name like 'bp\\_%' order by name", pgx.QueryExecModeSimpleProtocol)
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	return names
}

// On real servers: at most the capacity and the one that is about to be closed.
func TestNamesHeldByRealServers(t *testing.T) {
	t.Parallel()
	const capacity = 5
	server := postgres.Start(t, postgres.Options{})
	db := server.NewDatabase(t)
	urls := map[string]string{"direct": db.URL}
	// In session pooling the names of one client are those of its server connection.
	urls["PgBouncer, session"] = pgbouncer.Start(t, server, pgbouncer.Options{PoolMode: "session"}).URL(db.Name)
	for what, url := range urls {
		conn, err := pgx.Connect(t.Context(), url)
		if err != nil {
			t.Fatal(err)
		}
		c := statement.Attach(conn, capacity)
		k := statement.NewCatalog(1, "")
		var ds []*statement.Description
		for i := range 20 {
			d, err := k.Lookup(fmt.Sprint("select ", i, "::int4"), true).Learn(t.Context(), c, nil)
			if err != nil {
				t.Fatal(err)
			}
			ds = append(ds, d)
			rr, err := c.Run(t.Context(), &statement.Execution{Description: d, Strategy: fallback.Named})
			if err != nil {
				t.Fatal(err)
			}
			if text, err := read(rr); text != fmt.Sprint(i) || err != nil {
				t.Fatal(what, i, text, err)
			}
			if names := heldNames(t, c); len(names) > capacity+1 {
				t.Fatalf("%s: after %d statements the server holds %d", what, i+1, len(names))
			}
		}
		rr, err := c.Run(t.Context(), &statement.Execution{Description: ds[19], Strategy: fallback.Named})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := rr.Close(); err != nil {
			t.Fatal(err)
		}
		var want []string
		for _, d := range ds[15:] {
			want = append(want, d.Name())
		}
		slices.Sort(want)
		if diff := cmp.Diff(want, heldNames(t, c)); diff != "" {
			t.Errorf("%s: (-want +got)\n%s", what, diff)
		}
		if err := conn.Close(t.Context()); err != nil {
			t.Error(err)
		}
	}
}
