package executor_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/internal/pgscript"
	"github.com/bounceproof/bounceproof/prepare"
	"github.com/bounceproof/bounceproof/testenv/place"
)

func acquire(t testing.TB, ex *executor.Executor) *executor.Conn {
	t.Helper()
	c, err := ex.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Release)
	return c
}

// connCalls is every method of a Conn that sends something.
var connCalls = map[string]func(ctx context.Context, c *executor.Conn) error{
	"Exec": func(ctx context.Context, c *executor.Conn) error {
		_, err := c.Exec(ctx, "select $1::int", prepare.Stable, 1)
		return err
	},
	"Exec without arguments": func(ctx context.Context, c *executor.Conn) error {
		_, err := c.Exec(ctx, "select 1")
		return err
	},
	"Query": func(ctx context.Context, c *executor.Conn) error {
		rows, err := c.Query(ctx, "select $1::int", prepare.Stable, 1)
		if err != nil {
			if rows.Next() || rows.Err() == nil {
				return errors.New("the rows say something else than Query")
			}
			return err
		}
		rows.Close()
		return rows.Err()
	},
	"QueryRow": func(ctx context.Context, c *executor.Conn) error {
		var n int
		return c.QueryRow(ctx, "select $1::int", prepare.Stable, 1).Scan(&n)
	},
	"SendBatch": func(ctx context.Context, c *executor.Conn) error {
		var b pgx.Batch
		b.Queue("select $1::int", prepare.Stable, 1)
		return c.SendBatch(ctx, &b).Close()
	},
	"SendBatch that begins": func(ctx context.Context, c *executor.Conn) error {
		var b pgx.Batch
		b.BeginTx(pgx.TxOptions{})
		b.Queue("select $1::int", prepare.Stable, 1)
		results := c.SendBatch(ctx, &b)
		if err := results.Close(); err != nil {
			return err
		}
		return results.Tx().Commit(ctx)
	},
	"CopyFrom": func(ctx context.Context, c *executor.Conn) error {
		_, err := c.CopyFrom(ctx, pgx.Identifier{"numbers"}, []string{"n"}, pgx.CopyFromRows([][]any{{1}}))
		return err
	},
	"Begin": func(ctx context.Context, c *executor.Conn) error {
		tx, err := c.Begin(ctx)
		if err != nil {
			if tx != nil {
				return errors.New("a transaction beside an error")
			}
			return err
		}
		_, err = tx.Exec(ctx, "select $1::int", prepare.Stable, 1)
		return errors.Join(err, tx.Rollback(ctx))
	},
	"BeginTx": func(ctx context.Context, c *executor.Conn) error {
		tx, err := c.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.Serializable})
		if err != nil {
			return err
		}
		return tx.Commit(ctx)
	},
	"InTx": func(ctx context.Context, c *executor.Conn) error {
		return c.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
			_, err := tx.Exec(ctx, "select $1::int", prepare.Stable, 1)
			return err
		})
	},
	"Ping": func(ctx context.Context, c *executor.Conn) error { return c.Ping(ctx) },
}

// A connection is one connection, whatever runs on it, and while it is out nobody else gets it.
func TestAConnIsOneConnection(t *testing.T) {
	t.Parallel()
	for _, p := range place.OneOfEachKind() {
		t.Run(p.String(), func(t *testing.T) {
			t.Parallel()
			st := p.Start(t)
			mustExec(t, connect(t, st.DB.URL), "create table numbers (n int)")
			pool := newPool(t, st.URL, maxConns(2))
			ex := newExecutor(t, pool, executor.Config{})
			c := acquire(t, ex)
			conn := c.Conn()
			for name, call := range connCalls {
				for range 3 {
					if err := call(t.Context(), c); err != nil {
						t.Errorf("%s: %v", name, err)
					}
				}
				if c.Conn() != conn || pool.Stat().AcquiredConns() != 1 || conn.PgConn().TxStatus() != 'I' {
					t.Errorf("%s: another connection, or %d are in use, or %c", name, pool.Stat().AcquiredConns(), conn.PgConn().TxStatus())
				}
			}
			other := acquire(t, ex)
			if other.Conn() == conn {
				t.Error("a connection was lent twice")
			}
			other.Release()
			c.Release()
			if err := givenBack(pool); err != nil {
				t.Error(err)
			}
		})
	}
}

// What was released or hijacked answers with an error. A pgxpool.Conn panics.
func TestAReleasedConnSaysSo(t *testing.T) {
	t.Parallel()
	s, _ := newScripted(t, pgscript.Options{}, executor.Config{}, maxConns(2))
	for name, end := range map[string]func(c *executor.Conn){
		"released": func(c *executor.Conn) { c.Release(); c.Release() },
		"hijacked": func(c *executor.Conn) {
			conn := c.Hijack()
			c.Release()
			if err := conn.Ping(t.Context()); err != nil {
				t.Errorf("the connection that was hijacked: %v", err)
			}
			_ = conn.Close(t.Context())
		},
		"released by AcquireFunc": nil,
	} {
		var c *executor.Conn
		if end == nil {
			if err := s.ex.AcquireFunc(t.Context(), func(own *executor.Conn) error { c = own; return nil }); err != nil {
				t.Fatal(err)
			}
		} else {
			c = acquire(t, s.ex)
			end(c)
		}
		s.b.Reset()
		for call, f := range connCalls {
			if err := f(t.Context(), c); !errors.Is(err, executor.ErrReleased) {
				t.Errorf("%s, %s: %v", name, call, err)
			}
		}
		if c.Conn() != nil {
			t.Errorf("%s: it gives away a connection that is somebody else's", name)
		}
		if panicked(func() { c.Hijack() }) == nil {
			t.Errorf("%s: Hijack returned", name)
		}
		if sent := s.b.Sent(); len(sent) > 0 {
			t.Errorf("%s: sent %v", name, sent)
		}
		if err := givenBack(s.pool); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	// The control: this is what pgxpool does.
	bare, err := s.pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	bare.Release()
	if panicked(func() { _, _ = bare.Exec(t.Context(), "select 1") }) == nil {
		t.Error("pgxpool does not panic any more")
	}
}

// panicked returns what f panics with.
func panicked(f func()) (v any) {
	defer func() { v = recover() }()
	f()
	return nil
}

// A connection that died cannot be replaced under a Conn. The error is pgx's, nothing is run twice, and Release throws it away.
func TestADeadConnIsNotReplaced(t *testing.T) {
	for _, sc := range scenes {
		for name, call := range connCalls {
			t.Run(fmt.Sprint(sc.name, ", ", name), func(t *testing.T) {
				s, _ := newScripted(t, sc.o, executor.Config{PreparedStatements: sc.policy}, maxConns(2))
				c := acquire(t, s.ex)
				if _, err := c.Exec(t.Context(), "select $1::int", prepare.Stable, 1); err != nil {
					t.Fatal(err)
				}
				s.b.CutAll()
				connects := s.b.Connects()
				for range 2 {
					err := call(t.Context(), c)
					var lost *executor.PreparedStatementError
					if err == nil && name != "BeginTx" || errors.As(err, &lost) || errors.Is(err, executor.ErrReleased) {
						t.Errorf("%v", err)
					}
				}
				if !c.Conn().IsClosed() && name != "BeginTx" { // which sends nothing
					t.Error("the connection is not closed")
				}
				if n := s.b.Connects(); n != connects {
					t.Errorf("%d connections were made", n-connects)
				}
				c.Release()
				if err := s.sane(t.Context()); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

// What a pooler lost is run again on the same connection, unseen; in a transaction that a text has begun it is the typed error.
func TestAConnRunsAgainWhatWasLost(t *testing.T) {
	t.Parallel()
	s, _ := newScripted(t, pgscript.Options{}, executor.Config{}, maxConns(2))
	ctx := t.Context()
	c := acquire(t, s.ex)
	for i := range 4 {
		if i == 2 {
			s.b.ForgetNames()
		}
		if _, err := c.Exec(ctx, insertA, prepare.Stable, i); err != nil {
			t.Fatalf("%d: %v", i, err)
		}
	}
	if n := s.ex.Stats().Retries; n != 1 {
		t.Errorf("%d were run again", n)
	}
	s, _ = newScripted(t, pgscript.Options{}, executor.Config{}, maxConns(2))
	c = acquire(t, s.ex)
	if _, err := c.Exec(ctx, insertA, prepare.Stable, 1); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Exec(ctx, "begin"); err != nil {
		t.Fatal(err)
	}
	s.b.ForgetNames()
	_, err := c.Exec(ctx, insertA, prepare.Stable, 2)
	var lost *executor.PreparedStatementError
	if !errors.As(err, &lost) || !lost.InTx || s.ex.Stats().Retries != 0 {
		t.Errorf("%v, %+v", err, s.ex.Stats())
	}
	s, _ = newScripted(t, pgscript.Options{}, executor.Config{}, maxConns(2))
	c = acquire(t, s.ex)
	if _, err := c.Exec(ctx, insertA, prepare.Stable, 1); err != nil {
		t.Fatal(err)
	}
	runs, conn := 0, c.Conn()
	err = c.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
		runs++
		for i := range 2 {
			if runs == 1 && i == 1 {
				s.b.ForgetNames()
			}
			if _, err := tx.Exec(ctx, insertA, prepare.Stable, i); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil || runs != 2 || c.Conn() != conn || conn.PgConn().TxStatus() != 'I' {
		t.Errorf("InTx: %v, %d runs", err, runs)
	}
}

// Rows that are open keep others off the connection, and harm nothing.
func TestAConnIsBusyWhileRowsAreOpen(t *testing.T) {
	t.Parallel()
	for _, p := range place.OneOfEachKind() {
		t.Run(p.String(), func(t *testing.T) {
			t.Parallel()
			st := p.Start(t)
			mustExec(t, connect(t, st.DB.URL), "create table numbers (n int)")
			pool := newPool(t, st.URL, maxConns(2))
			ex := newExecutor(t, pool, executor.Config{})
			c := acquire(t, ex)
			for range 2 {
				rows, err := c.Query(t.Context(), "select g, repeat('x', 1000) from generate_series(1, $1) g", prepare.Stable, 5000)
				if err != nil {
					t.Fatal(err)
				}
				for name, call := range connCalls {
					if err := call(t.Context(), c); name != "BeginTx" && (err == nil || !strings.Contains(err.Error(), "busy")) {
						t.Errorf("%s: %v", name, err)
					}
				}
				n := 0
				for rows.Next() {
					n++
				}
				if err := rows.Err(); err != nil || n != 5000 {
					t.Errorf("%d rows, %v", n, err)
				}
			}
			if _, err := c.Exec(t.Context(), "select $1::int", prepare.Stable, 1); err != nil {
				t.Error(err)
			}
			if top, err := ex.Topology(t.Context()); err != nil || ex.Stats().Downgrades > 0 && !p.ForwardsNames() {
				t.Errorf("%v, %v, %+v", top, err, ex.Stats())
			}
			rows, err := c.Query(t.Context(), "select g, repeat('x', 1000) from generate_series(1, $1) g", prepare.Stable, 5000)
			if err != nil {
				t.Fatal(err)
			}
			c.Release() // as in pgxpool, which closes it
			rows.Close()
			if err := givenBack(pool); err != nil {
				t.Error(err)
			}
		})
	}
}

// Session state is the Conn's on a direct connection: that is what it is for.
func TestAConnKeepsTheSession(t *testing.T) {
	t.Parallel()
	st := place.New(place.Direct, "", "15").Start(t)
	ex := newExecutor(t, newPool(t, st.URL, maxConns(4)), executor.Config{})
	c := acquire(t, ex)
	ctx := t.Context()
	for _, sql := range []string{"create temp table mine (n int)", "set application_name = 'mine'", "select pg_advisory_lock(7)"} {
		if _, err := c.Exec(ctx, sql); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := c.CopyFrom(ctx, pgx.Identifier{"mine"}, []string{"n"}, pgx.CopyFromRows([][]any{{1}, {2}})); err != nil {
		t.Fatal(err)
	}
	var n int
	var name string
	if err := c.QueryRow(ctx, "select sum(n), current_setting('application_name') from mine where n < $1", prepare.Stable, 9).Scan(&n, &name); err != nil {
		t.Fatal(err)
	}
	var unlocked, stranger bool
	if err := c.QueryRow(ctx, "select pg_advisory_unlock($1)", prepare.Stable, int64(7)).Scan(&unlocked); err != nil {
		t.Fatal(err)
	}
	// The control: another connection sees none of it.
	if err := ex.QueryRow(ctx, "select to_regclass('mine') is not null").Scan(&stranger); err != nil {
		t.Fatal(err)
	}
	if n != 3 || name != "mine" || !unlocked || stranger {
		t.Errorf("sum %d, %q, unlocked %t, seen by another %t", n, name, unlocked, stranger)
	}
}
