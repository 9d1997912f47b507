package place_test

import (
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
	"github.com/bounceproof/bounceproof/testenv/place"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

func TestMatrixHoldsEveryVersionInEveryModeOnce(t *testing.T) {
	t.Parallel()
	seen := map[place.Place]bool{}
	for _, p := range place.Matrix() {
		if seen[p] {
			t.Errorf("twice: %v", p)
		}
		seen[p] = true
	}
	for _, m := range place.Modes() {
		ps := place.Suites(m)
		tracks := strings.HasSuffix(string(m), "tracked")
		want := pgbouncer.Versions()
		if tracks {
			want = slices.DeleteFunc(want, func(v string) bool { return !pgbouncer.Tracks(v) })
		}
		if len(ps) != len(want) {
			t.Errorf("%s: %v, want %d places", m, ps, len(want))
		}
		for _, p := range ps {
			if !seen[p] {
				t.Errorf("the matrix lacks %v", p)
			}
			if p.ForwardsNames() && (tracks || !p.SharesServers()) {
				t.Errorf("%v cannot forward names", p)
			}
		}
	}
	if got := place.New(place.Session, "", "13").String(); got != "session, any PgBouncer, PostgreSQL 13" {
		t.Errorf("String() = %q", got)
	}
}

// TestEveryModeIsWhatItSays prepares a statement, meets another server, and asks for the statement there.
func TestEveryModeIsWhatItSays(t *testing.T) {
	t.Parallel()
	for _, p := range []place.Place{
		place.New(place.Direct, "", ""), place.New(place.Session, "", ""), place.New(place.TransactionRaw, "1.18", ""),
		place.New(place.TransactionTracked, "1.24", ""), place.New(place.Statement, "1.24", ""), place.New(place.StatementTracked, "1.26", ""),
	} {
		t.Run(p.String(), func(t *testing.T) {
			t.Parallel()
			r := p.Start(t)
			pids := r.OnServers(t, 3, "pg_backend_pid()")
			slices.Sort(pids)
			if pids = slices.Compact(pids); len(pids) != 3 {
				t.Errorf("3 executions at once ran on the servers %q", pids)
			}
			c := connect(t, r.URL)
			if _, err := c.Prepare(t.Context(), "named", "select pg_backend_pid()", nil); err != nil {
				t.Fatal(err)
			}
			seen := map[string]bool{}
			lost := false
			for range 6 {
				seen[backend(t, c)] = true
				if res := c.ExecPrepared(t.Context(), "named", nil, nil, nil).Read(); res.Err != nil {
					lost = true
				}
			}
			if shares := len(seen) > 1; shares != p.SharesServers() {
				t.Errorf("SharesServers() is %t; servers: %v", p.SharesServers(), seen)
			}
			if lost != p.ForwardsNames() {
				t.Errorf("ForwardsNames() is %t; the name was lost: %t", p.ForwardsNames(), lost)
			}
			res := c.ExecParams(t.Context(), "begin", nil, nil, nil, nil).Read()
			if refused := res.Err != nil; refused != p.RefusesBegin() {
				t.Errorf("RefusesBegin() is %t; BEGIN: %v", p.RefusesBegin(), res.Err)
			}
		})
	}
}

func TestSeveralWaysLeadToOneDatabase(t *testing.T) {
	t.Parallel()
	s := postgres.Start(t, postgres.Options{})
	db := s.NewDatabase(t)
	for _, m := range []place.Mode{place.Direct, place.Session, place.TransactionRaw} {
		r := place.New(m, "", "").StartFor(t, s, db, func(o *pgbouncer.Options) { o.PoolSize = 1 })
		got := connect(t, r.URL).ExecParams(t.Context(), "select current_database()", nil, nil, nil, nil).Read()
		if got.Err != nil || string(got.Rows[0][0]) != db.Name {
			t.Errorf("%v leads to %q (%v), want %q", m, got.Rows, got.Err, db.Name)
		}
		if r.Bouncer != nil && configured(t, r.Bouncer, "default_pool_size") != "1" {
			t.Errorf("%v: change was not heeded", m)
		}
	}
}

// refusing is a test that is over at its first failure.
type refusing struct {
	testing.TB
	said string
}

func (r *refusing) Fatalf(format string, _ ...any) { r.said += format }

func TestPlacesThatCannotBeAreRefused(t *testing.T) {
	t.Parallel()
	for _, p := range []place.Place{
		place.New("pipeline", "1.18", "15"), place.New(place.Direct, "1.18", "15"), place.New(place.TransactionTracked, "1.18", "15"),
	} {
		tb := &refusing{TB: t}
		if r := p.Start(tb); r != nil || tb.said == "" {
			t.Errorf("%v was started", p)
		}
	}
}

func configured(t *testing.T, b *pgbouncer.Bouncer, key string) string {
	t.Helper()
	rows, err := b.Admin("show config")
	if err != nil {
		t.Fatal(err)
	}
	for _, row := range rows {
		if row["key"] == key {
			return row["value"]
		}
	}
	return ""
}

func connect(t *testing.T, url string) *pgconn.PgConn {
	t.Helper()
	c, err := pgconn.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close(context.Background()) })
	return c
}

func backend(t *testing.T, c *pgconn.PgConn) string {
	t.Helper()
	res := c.ExecParams(t.Context(), "select pg_backend_pid()::text", nil, nil, nil, nil).Read()
	if res.Err != nil {
		t.Fatal(res.Err)
	}
	return string(res.Rows[0][0])
}
