package place

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

// Running is a place that has been started. Its fields do not change, and it is safe for concurrent use.
type Running struct {
	Place  Place
	Server *postgres.Server
	// DB is a database of the test's own. Its URL leads straight to the server, past every pooler.
	DB *postgres.Database
	// Bouncer is the PgBouncer, nil if there is none.
	Bouncer *pgbouncer.Bouncer
	// URL leads to DB by the way that the place is about.
	URL string
}

// Start starts the place on a server that tests share, with a database and a pooler of the test's own, which end with the test. It skips
// the test when this machine cannot provide a version. Where servers are shared there are four server connections, which take turns, so
// that a name is asked for on the wrong one at once; change may say otherwise. It is safe for concurrent use.
func (p Place) Start(tb postgres.TB, change ...func(*pgbouncer.Options)) *Running {
	tb.Helper()
	if err := p.check(); err != nil {
		tb.Fatalf("%v", err)
		return nil
	}
	return p.StartOn(tb, postgres.Start(tb, postgres.Options{Version: p.Server}), change...)
}

// StartOn is Start on a server that runs already, whatever its version is.
func (p Place) StartOn(tb postgres.TB, s *postgres.Server, change ...func(*pgbouncer.Options)) *Running {
	tb.Helper()
	if err := p.check(); err != nil {
		tb.Fatalf("%v", err)
		return nil
	}
	return p.StartFor(tb, s, s.NewDatabase(tb), change...)
}

// StartFor is StartOn for a database of that server, so that several ways lead to one database.
func (p Place) StartFor(tb postgres.TB, s *postgres.Server, db *postgres.Database, change ...func(*pgbouncer.Options)) *Running {
	tb.Helper()
	if err := p.check(); err != nil {
		tb.Fatalf("%v", err)
		return nil
	}
	r := &Running{Place: p, Server: s, DB: db, URL: db.URL}
	if m, _ := entryOf(p.Mode); m.open != nil {
		m.open(tb, r, change)
	}
	return r
}

// column returns the first column of a query's rows as text, "" for null.
func column(ctx context.Context, c *pgconn.PgConn, sql string) ([]string, error) {
	res := c.ExecParams(ctx, sql, nil, nil, nil, nil).Read()
	values := make([]string, len(res.Rows))
	for i, row := range res.Rows {
		values[i] = string(row[0])
	}
	return values, res.Err
}

// everyServerLock is the advisory lock that OnServers waits with. Databases are of one test, so nobody else takes it.
const everyServerLock = 815

// OnServers runs a query with one value on n server connections of the pooler at once, and returns the values as text. Each execution
// waits for a lock that is let go when all of them have arrived, so the pooler has opened n connections afterwards; in contrast to BEGIN
// that works in every mode. Without a pooler these are connections of its own, and nothing stays open.
func (r *Running) OnServers(tb postgres.TB, n int, value string) []string {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	values, err := r.onServers(ctx, n, value)
	if err != nil {
		tb.Fatalf("testenv: %v: %d server connections at once: %v", r.Place, n, err)
	}
	return values
}

func (r *Running) onServers(ctx context.Context, n int, value string) ([]string, error) {
	keeper, err := pgconn.Connect(ctx, r.DB.URL)
	if err != nil {
		return nil, err
	}
	defer func() { _ = keeper.Close(context.WithoutCancel(ctx)) }()
	if _, err := column(ctx, keeper, fmt.Sprintf("select pg_advisory_lock(%d)", everyServerLock)); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	values := make([]string, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			v, err := r.waitOnServer(ctx, value)
			if err != nil {
				cancel(err) // the others need not wait for one that will not come
				return
			}
			values[i] = v
		})
	}
	err = awaitWaiting(ctx, keeper, n)
	if err == nil {
		_, err = column(ctx, keeper, fmt.Sprintf("select pg_advisory_unlock(%d)", everyServerLock))
	}
	if err != nil {
		cancel(err)
	}
	wg.Wait()
	return values, context.Cause(ctx)
}

func (r *Running) waitOnServer(ctx context.Context, value string) (string, error) {
	c, err := pgconn.Connect(ctx, r.URL)
	if err != nil {
		return "", err
	}
	defer func() { _ = c.Close(context.WithoutCancel(ctx)) }()
	v, err := column(ctx, c, fmt.Sprintf("select (%s)::text from (select pg_advisory_xact_lock_shared(%d)) l", value, everyServerLock))
	if err == nil && len(v) != 1 {
		err = errors.New("no row")
	}
	if err != nil {
		return "", err
	}
	return v[0], nil
}

// awaitWaiting returns when n sessions of the database wait for the lock.
func awaitWaiting(ctx context.Context, keeper *pgconn.PgConn, n int) error {
	for {
		v, err := column(ctx, keeper, fmt.Sprintf("select count(*) from pg_locks where locktype = 'advisory' and not granted and objid = %d"+
			" and database = (select oid from pg_database where datname = current_database())", everyServerLock))
		if err != nil {
			return err
		}
		if v[0] == fmt.Sprint(n) {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s of them have one: %w", v[0], context.Cause(ctx))
		case <-time.After(5 * time.Millisecond):
		}
	}
}
