package notify_test

import (
	"context"
	"errors"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/internal/pgscript"
	"github.com/bounceproof/bounceproof/notify"
)

// A cancel request can hit somebody else's statement: a pooler lends the server on while the request is under way (PgBouncer up to 1.17,
// pgbouncer/pgbouncer#141, #717). pgx sends one for every statement whose context ends while it runs, so none of ours may.

// slowPool is a real pool whose answers take their time, so that the note of a statement arrives long before the statement's end.
type slowPool struct {
	*pgxpool.Pool
	pg *scripted
}

func (p *slowPool) Config() *pgxpool.Config { return p.pg.Config() }

type slowConn struct{ net.Conn }

func (c slowConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	time.Sleep(20 * time.Millisecond)
	return n, err
}

func newSlowPool(t *testing.T, pg *scripted) *slowPool {
	t.Helper()
	cfg := pg.Config()
	dial := cfg.ConnConfig.DialFunc
	cfg.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		return slowConn{conn}, err
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	return &slowPool{pool, pg}
}

// whileItRuns calls f as soon as somebody has a statement that notifies under way.
func whileItRuns(pg *scripted, f func()) {
	notes := pg.notes()
	f()
	for pg.notes() == notes {
		time.Sleep(time.Millisecond)
		synctest.Wait()
	}
}

// notes is how many notifying statements have begun.
func (s *scripted) notes() (n int) {
	for _, m := range pgscript.Strings(s.Sent()) {
		if strings.Contains(m, "pg_notify") {
			n++
		}
	}
	return n
}

func TestNoStatementIsCancelledInNormalOperation(t *testing.T) {
	t.Parallel()
	for name, act := range map[string]func(t *testing.T, pool *slowPool, l *listening, s *notify.Sender){
		"heartbeats": func(t *testing.T, _ *slowPool, l *listening, _ *notify.Sender) {
			time.Sleep(5 * time.Minute)
			l.must(t, notify.Proven)
			if n := l.Status().Proofs; n < 25 {
				t.Errorf("%d proofs", n)
			}
		},
		"the first heartbeat is under way": func(t *testing.T, pool *slowPool, l *listening, _ *notify.Sender) {
			l.stop()
			stop := func() {}
			whileItRuns(pool.pg, func() { stop = run(t, l.Listener) })
			stop()
		},
		"a later heartbeat is under way": func(t *testing.T, pool *slowPool, l *listening, _ *notify.Sender) {
			l.must(t, notify.Proven)
			whileItRuns(pool.pg, func() {})
			l.stop()
		},
		"the reader leaves": func(t *testing.T, pool *slowPool, l *listening, _ *notify.Sender) {
			other := l.Share()
			other.Handle("news", &recorder{})
			stop := run(t, other)
			time.Sleep(time.Second)
			whileItRuns(pool.pg, func() {})
			l.stop()
			time.Sleep(time.Second)
			if other.State() != notify.Proven {
				t.Errorf("state %v", other.State())
			}
			stop()
		},
		"the sender is closed": func(t *testing.T, pool *slowPool, _ *listening, s *notify.Sender) {
			whileItRuns(pool.pg, func() { notifyAll(t, s, "news", "1") })
			done, cancel := context.WithCancel(t.Context())
			cancel()
			if err := s.Close(done); !errors.Is(err, context.Canceled) {
				t.Errorf("Close = %v", err)
			}
		},
		"a flush ends": func(t *testing.T, pool *slowPool, _ *listening, s *notify.Sender) {
			whileItRuns(pool.pg, func() { notifyAll(t, s, "news", "1") })
			done, cancel := context.WithCancel(t.Context())
			cancel()
			if err := s.Flush(done); !errors.Is(err, context.Canceled) {
				t.Errorf("Flush = %v", err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				pg := newScripted(t, pgscript.Options{})
				pg.Define(senderSQL, pgscript.Statement{Params: []uint32{1009, 1009}, Tag: "SELECT 1"})
				pool := newSlowPool(t, pg)
				l := listen(t, pool, notify.ListenerConfig{})
				s := newSender(t, pool, notify.SenderConfig{})
				time.Sleep(time.Second)
				l.must(t, notify.Proven)
				act(t, pool, l, s)
				l.stop()
				time.Sleep(time.Minute)
				if err := s.Close(t.Context()); err != nil {
					t.Error(err)
				}
				pool.Close()
				if n := pg.Cancels(); n != 0 {
					t.Errorf("%d cancel requests", n)
				}
			})
		})
	}
}

const senderSQL = `select pg_catalog.pg_notify(t.c, t.p) from unnest($1::text[], $2::text[]) as t(c, p)`

// The control: a statement that is given up does send one, and it is counted.
func TestAStatementThatIsGivenUpSendsACancelRequest(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		pg := newScripted(t, pgscript.Options{})
		pg.silent = true
		pool := newSlowPool(t, pg)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := pool.Exec(ctx, `select pg_notify($1, $2)`, pgx.QueryExecModeExec, "a", "b")
		time.Sleep(time.Minute)
		pool.Close()
		if n := pg.Cancels(); n != 1 || !pgconn.Timeout(err) || pg.notes() != 1 {
			t.Errorf("%d cancel requests after %v, %d statements", n, err, pg.notes())
		}
	})
}
