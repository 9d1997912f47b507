package proxy_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/internal/await"
	"github.com/bounceproof/bounceproof/testenv/postgres"
	"github.com/bounceproof/bounceproof/testenv/proxy"
)

func start(t *testing.T) (*proxy.Proxy, *postgres.Database) {
	t.Helper()
	s := postgres.Start(t, postgres.Options{})
	db := s.NewDatabase(t)
	return proxy.Start(t, db.URL), db
}

func connect(t *testing.T, p *proxy.Proxy, db *postgres.Database) *pgconn.PgConn {
	t.Helper()
	conn, err := pgconn.Connect(t.Context(), p.URL(db.URL))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

func TestCountsMessagesAndRoundTripsAfterStartUp(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	p, db := start(t)
	conn := connect(t, p, db)
	if c := p.Counts(); c.RoundTrips != 0 || len(c.Frontend)+len(c.Backend) != 0 {
		t.Fatalf("start-up is counted: %+v", c)
	}
	for _, step := range []struct {
		name       string
		do         func() error
		roundTrips int
		syncs      int
		frontend   map[byte]int
	}{
		{
			"simple query",
			func() error { _, err := conn.Exec(ctx, "select 1; select 2").ReadAll(); return err },
			1, 1,
			map[byte]int{'Q': 1},
		},
		{
			"extended query",
			func() error {
				return conn.ExecParams(ctx, "select $1::int", [][]byte{[]byte("1")}, nil, nil, nil).Read().Err
			},
			1, 1,
			map[byte]int{'P': 1, 'B': 1, 'D': 1, 'E': 1, 'S': 1},
		},
		{
			"prepare, then execute",
			func() error {
				if _, err := conn.Prepare(ctx, "s", "select 1", nil); err != nil {
					return err
				}
				return conn.ExecPrepared(ctx, "s", nil, nil, nil).Read().Err
			},
			2, 2,
			map[byte]int{'P': 1, 'D': 2, 'B': 1, 'E': 1, 'S': 2},
		},
		{
			"a pipeline of three syncs in one write",
			func() error {
				pipeline := conn.StartPipeline(ctx)
				for range 3 {
					pipeline.SendQueryParams("select 1", nil, nil, nil, nil)
					pipeline.SendPipelineSync()
				}
				if err := pipeline.Flush(); err != nil {
					return err
				}
				return pipeline.Close()
			},
			1, 3,
			map[byte]int{'P': 3, 'B': 3, 'D': 3, 'E': 3, 'S': 3},
		},
		{
			"an error",
			func() error {
				var pgErr *pgconn.PgError
				if err := conn.ExecParams(ctx, "select nothing", nil, nil, nil, nil).Read().Err; !errors.As(err, &pgErr) {
					return errors.New("no error")
				}
				return nil
			},
			1, 1,
			map[byte]int{'P': 1, 'B': 1, 'D': 1, 'E': 1, 'S': 1},
		},
		{
			"copy",
			func() error {
				if _, err := conn.Exec(ctx, "create temp table c (n int)").ReadAll(); err != nil {
					return err
				}
				_, err := conn.CopyFrom(ctx, strings.NewReader("1\n2\n"), "copy c from stdin")
				return err
			},
			2, 2,
			map[byte]int{'Q': 2, 'd': 1, 'c': 1},
		},
	} {
		p.Reset()
		if err := step.do(); err != nil {
			t.Fatalf("%s: %v", step.name, err)
		}
		c := p.Counts()
		if c.RoundTrips != step.roundTrips {
			t.Errorf("%s: %d round trips, want %d", step.name, c.RoundTrips, step.roundTrips)
		}
		if c.Syncs != step.syncs {
			t.Errorf("%s: %d syncs, want %d", step.name, c.Syncs, step.syncs)
		}
		if diff := cmp.Diff(step.frontend, c.Frontend); diff != "" {
			t.Errorf("%s: frontend messages (-want +got):\n%s", step.name, diff)
		}
		if c.Backend['Z'] != step.syncs {
			t.Errorf("%s: %d ReadyForQuery for %d syncs", step.name, c.Backend['Z'], step.syncs)
		}
		if c.FrontendBytes == 0 || c.BackendBytes == 0 {
			t.Errorf("%s: no bytes are counted: %+v", step.name, c)
		}
	}
	if n := len(p.Connections()); n != 1 {
		t.Errorf("%d connections, want 1", n)
	}
}

func TestLargeMessagesPassAndAreCountedOnce(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	p, db := start(t)
	conn := connect(t, p, db)
	big := strings.Repeat("x", 3<<20)
	res := conn.ExecParams(ctx, "select $1::text || $1", [][]byte{[]byte(big)}, nil, nil, nil).Read()
	if res.Err != nil || len(res.Rows[0][0]) != 2*len(big) {
		t.Fatalf("got %d rows, %v", len(res.Rows), res.Err)
	}
	c := p.Counts()
	if c.RoundTrips != 1 || c.Frontend['B'] != 1 || c.Backend['D'] != 1 || c.BackendBytes < 2*len(big) {
		t.Errorf("%+v", c)
	}
}

// TestCutsAtEveryBoundary cuts a transaction at each boundary in turn, and checks what the server made of it.
func TestCutsAtEveryBoundary(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	p, db := start(t)
	admin, err := pgx.Connect(ctx, db.URL)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = admin.Close(context.Background()) })
	if _, err := admin.Exec(ctx, "create table t (n int)"); err != nil {
		t.Fatal(err)
	}
	insert := func(conn *pgconn.PgConn, n string) error {
		return conn.ExecParams(ctx, "insert into t values ($1)", [][]byte{[]byte(n)}, nil, nil, nil).Read().Err
	}
	type plan func(n int) *proxy.Cut
	for name, tc := range map[string]struct {
		plan plan
		// committed is the first boundary at which the row is stored although the client got an error.
		boundaries, committed int
	}{
		// Parse Bind Describe Execute Sync
		"before frontend messages": {func(n int) *proxy.Cut { return p.CutBefore(proxy.Frontend, 0, n) }, 5, 6},
		"after frontend messages":  {func(n int) *proxy.Cut { return p.CutAfter(proxy.Frontend, 0, n) }, 5, 5},
		// ParseComplete BindComplete NoData CommandComplete ReadyForQuery; all follow the commit
		"before backend messages": {func(n int) *proxy.Cut { return p.CutBefore(proxy.Backend, 0, n) }, 5, 1},
		"before ReadyForQuery":    {func(n int) *proxy.Cut { return p.CutBefore(proxy.Backend, 'Z', n) }, 1, 1},
	} {
		n := 1
		for ; ; n++ {
			if _, err := admin.Exec(ctx, "truncate t"); err != nil {
				t.Fatal(err)
			}
			p.Heal()
			conn := connect(t, p, db)
			// pgconn answers a broken connection with a request to cancel, which would decide at random whether the row is stored.
			p.Refuse()
			cut := tc.plan(n)
			err := insert(conn, "1")
			if !cut.Fired() {
				cut.Cancel()
				if err != nil {
					t.Errorf("%s: no cut at %d, and yet %v", name, n, err)
				}
				break
			}
			if err == nil {
				t.Errorf("%s: a cut at %d, and no error", name, n)
			}
			if got, want := settledCount(t, admin, conn.PID()), n >= tc.committed; (got == 1) != want {
				t.Errorf("%s %d: %d rows, want one: %t", name, n, got, want)
			}
		}
		if n-1 != tc.boundaries {
			t.Errorf("%s: %d boundaries, want %d", name, n-1, tc.boundaries)
		}
	}
}

// settledCount waits for a backend to end and counts the rows it has left.
func settledCount(t *testing.T, admin *pgx.Conn, pid uint32) (n int) {
	t.Helper()
	for deadline := time.Now().Add(await.Deadline); ; {
		var there bool
		err := admin.QueryRow(t.Context(), "select exists (select from pg_stat_activity where pid = $1), (select count(*) from t)", pid).Scan(&there, &n)
		if err != nil {
			t.Fatal(err)
		}
		if !there {
			// Once more: the row may have come after the snapshot.
			if err := admin.QueryRow(t.Context(), "select count(*) from t").Scan(&n); err != nil {
				t.Fatal(err)
			}
			return n
		}
		if time.Now().After(deadline) {
			t.Fatal("the server does not notice the cut")
		}
	}
}

func TestCutAfterBytesMayFallWithinAMessage(t *testing.T) {
	t.Parallel()
	p, db := start(t)
	conn := connect(t, p, db)
	cut := p.CutAfterBytes(proxy.Backend, 7)
	if _, err := conn.Exec(t.Context(), "select 1").ReadAll(); err == nil {
		t.Error("no error from a cut within the first answer")
	}
	if !cut.Fired() {
		t.Error("not fired")
	}
	if got := p.Counts().BackendBytes; got != 7 {
		t.Errorf("%d bytes were forwarded, want 7", got)
	}
	// Another connection is not touched by a cut that has happened.
	if _, err := connect(t, p, db).Exec(t.Context(), "select 1").ReadAll(); err != nil {
		t.Error(err)
	}
}

func TestBlackHoleKeepsConnectionsAndHealResumes(t *testing.T) {
	t.Parallel()
	p, db := start(t)
	conn := connect(t, p, db)
	p.BlackHole()
	answered := make(chan error, 1)
	go func() {
		_, err := conn.Exec(context.Background(), "select 1").ReadAll()
		answered <- err
	}()
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if _, err := pgconn.Connect(ctx, p.URL(db.URL)); err == nil {
		t.Error("a new connection got through the black hole")
	}
	select {
	case err := <-answered:
		t.Fatalf("an answer came out of the black hole: %v", err)
	default:
	}
	p.Heal()
	if err := <-answered; err != nil {
		t.Errorf("after healing: %v", err)
	}
}

func TestDelayRefuseAndCutAll(t *testing.T) {
	t.Parallel()
	p, db := start(t)
	conn := connect(t, p, db)
	p.Delay(50 * time.Millisecond)
	begin := time.Now()
	if _, err := conn.Exec(t.Context(), "select 1").ReadAll(); err != nil {
		t.Fatal(err)
	}
	if d := time.Since(begin); d < 100*time.Millisecond {
		t.Errorf("twice 50 ms took %v", d)
	}
	p.Heal()
	p.Refuse()
	if _, err := pgconn.Connect(t.Context(), p.URL(db.URL)); err == nil {
		t.Error("a connection was made although refused")
	}
	if _, err := conn.Exec(t.Context(), "select 1").ReadAll(); err != nil {
		t.Errorf("an existing connection: %v", err)
	}
	if p.Open() != 1 {
		t.Errorf("%d open connections, want 1", p.Open())
	}
	p.CutAll()
	if _, err := conn.Exec(t.Context(), "select 1").ReadAll(); err == nil {
		t.Error("a cut connection works")
	}
}
