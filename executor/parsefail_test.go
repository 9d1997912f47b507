package executor_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/prepare"
	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
)

// witness counts what happens to a pool's connections.
type witness struct {
	connects, fatals atomic.Int64
}

func (w *witness) watch(cfg *pgxpool.Config) {
	cfg.MaxConns = 1
	cfg.ConnConfig.AfterConnect = func(context.Context, *pgconn.PgConn) error {
		w.connects.Add(1)
		return nil
	}
	cfg.ConnConfig.OnPgError = func(_ *pgconn.PgConn, e *pgconn.PgError) bool {
		if e.Severity == "FATAL" {
			w.fatals.Add(1)
			return false
		}
		return true
	}
}

// TestAStatementThatFailedToParseWorksLater is the start of many a service: the table is not there yet. A tracking PgBouncer keeps the name
// of a Parse that failed, and ends a connection that parses it again.
func TestAStatementThatFailedToParseWorksLater(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		p      place
		policy executor.PreparedStatements
	}{
		{place{direct, "", "15"}, executor.Auto},
		{place{session, "1.18", "15"}, executor.Auto},
		{place{raw, "1.18", "15"}, executor.Auto},
		{place{raw, "1.18", "15"}, executor.Shared},
		{place{tracked, "1.24", "17"}, executor.Auto},
		{place{tracked, "1.26", "18"}, executor.Auto},
		{place{statementTracked, "1.24", "17"}, executor.Auto},
	} {
		t.Run(fmt.Sprint(test.p, ", ", test.policy), func(t *testing.T) {
			t.Parallel()
			s := test.p.build(t, func(o *pgbouncer.Options) { o.PoolSize = 2 })
			admin := s.plain(t)
			w := &witness{}
			pool := newPool(t, s.url, w.watch)
			ex := newExecutor(t, pool, executor.Config{PreparedStatements: test.policy})
			if _, err := ex.Topology(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := pool.Ping(t.Context()); err != nil {
				t.Fatal(err)
			}
			same := func(what string) {
				t.Helper()
				if w.connects.Load() != 1 || w.fatals.Load() != 0 {
					t.Errorf("%s: %d connections, %d FATAL errors", what, w.connects.Load(), w.fatals.Load())
				}
			}
			w.connects.Store(1) // those of the probe are none of the pool's

			const insert, query = "insert into outbox (n) values ($1)", "select n from outbox where n = $1"
			try := func(want string) {
				t.Helper()
				if _, err := ex.Exec(t.Context(), insert, prepare.Stable, 1); code(err) != want {
					t.Errorf("Exec: %v instead of %q", err, want)
				}
				var n int
				if err := ex.QueryRow(t.Context(), query, prepare.Stable, 1).Scan(&n); code(err) != want || want == "" && n != 1 {
					t.Errorf("QueryRow: %d, %v instead of %q", n, err, want)
				}
				var b pgx.Batch
				b.Queue(insert, prepare.Stable, 1)
				if err := ex.SendBatch(t.Context(), &b).Close(); code(err) != want {
					t.Errorf("SendBatch: %v instead of %q", err, want)
				}
				err := ex.InTx(t.Context(), pgx.TxOptions{}, func(_ context.Context, tx executor.Tx) error {
					tx.Queue(insert, prepare.Stable, 1)
					return nil
				})
				if code(err) != want {
					t.Errorf("Queue: %v instead of %q", err, want)
				}
				if test.p.refusesBegin() {
					return
				}
				err = ex.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
					_, err := tx.Exec(ctx, insert, prepare.Stable, 1)
					return err
				})
				if code(err) != want {
					t.Errorf("InTx: %v instead of %q", err, want)
				}
			}
			// The executor learns of the missing table.
			for range 3 {
				try("42P01")
			}
			s.must(t, admin, "create table outbox (n int)")
			for range 3 {
				try("")
			}
			same("a table that came late")

			// An executor that knows the statements, on a connection that has not parsed them: now it is the named Parse that fails.
			s.must(t, admin, "drop table outbox")
			pool.Reset()
			if err := pool.Ping(t.Context()); err != nil {
				t.Fatal(err)
			}
			w.connects.Store(1)
			for range 3 {
				try("42P01")
			}
			s.must(t, admin, "create table outbox (n int)")
			for range 3 {
				try("")
			}
			same("a table that went and came back")
			if d := ex.Stats().Downgrades; d > 1 || d == 1 && test.p.mode != raw {
				t.Errorf("%d downgrades", d)
			}
			if s.b != nil && s.b.LogContains("prepared statement name is already in use") {
				t.Error("PgBouncer complained")
			}
		})
	}
}

// TestAStatementRefusedInAnAbortedTransactionWorksLater is the same for 25P02.
func TestAStatementRefusedInAnAbortedTransactionWorksLater(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		p      place
		policy executor.PreparedStatements
	}{
		{place{direct, "", "15"}, executor.Auto},
		{place{raw, "1.18", "15"}, executor.Shared},
		{place{tracked, "1.24", "17"}, executor.Auto},
		{place{tracked, "1.26", "18"}, executor.Auto},
	} {
		t.Run(fmt.Sprint(test.p, ", ", test.policy), func(t *testing.T) {
			t.Parallel()
			s := test.p.build(t, func(o *pgbouncer.Options) { o.PoolSize = 2 })
			s.must(t, s.plain(t), "create table outbox (n int primary key)")
			w := &witness{}
			pool := newPool(t, s.url, w.watch)
			ex := newExecutor(t, pool, executor.Config{PreparedStatements: test.policy})
			if _, err := ex.Topology(t.Context()); err != nil {
				t.Fatal(err)
			}
			text := func(i int) string { return fmt.Sprintf("select $1::int4 + %d", i) }
			// The executor knows the texts; the connection that follows has parsed none.
			for i := range 6 {
				if _, err := ex.Exec(t.Context(), text(i), prepare.Stable, 1); err != nil {
					t.Fatal(err)
				}
			}
			pool.Reset()
			if err := pool.Ping(t.Context()); err != nil {
				t.Fatal(err)
			}
			w.connects.Store(1)
			for i := range 6 {
				for range 2 {
					tx, err := ex.Begin(t.Context())
					if err != nil {
						t.Fatal(err)
					}
					if _, err := tx.Exec(t.Context(), "select 1 / $1::int4", prepare.Stable, 0); code(err) != "22012" {
						t.Fatal(err)
					}
					for range 2 {
						if _, err := tx.Exec(t.Context(), text(i), prepare.Stable, 1); code(err) != "25P02" {
							t.Errorf("in the aborted transaction: %v", err)
						}
					}
					// A text that nobody knows yet is refused as well.
					if _, err := tx.Exec(t.Context(), text(100+i), prepare.Stable, 1); code(err) != "25P02" {
						t.Errorf("in the aborted transaction: %v", err)
					}
					if i%2 == 0 {
						err = tx.Rollback(t.Context())
					} else if err = tx.Commit(t.Context()); errors.Is(err, pgx.ErrTxCommitRollback) {
						err = nil
					}
					if err != nil {
						t.Fatal(err)
					}
				}
				for _, k := range []int{i, 100 + i} {
					var n int
					if err := ex.QueryRow(t.Context(), text(k), prepare.Stable, 1).Scan(&n); err != nil || n != 1+k {
						t.Errorf("afterwards: %d, %v", n, err)
					}
				}
			}
			if w.connects.Load() != 1 || w.fatals.Load() != 0 {
				t.Errorf("%d connections, %d FATAL errors", w.connects.Load(), w.fatals.Load())
			}
			if ex.Stats().Downgrades != 0 {
				t.Errorf("%+v", ex.Stats())
			}
			if s.b != nil && s.b.LogContains("prepared statement name is already in use") {
				t.Error("PgBouncer complained")
			}
		})
	}
}

// Negative control: a name that is parsed again without a Close is the end of the connection, as the tests above would see.
func TestTrackingPoolerKeepsTheNameOfAFailedParse(t *testing.T) {
	t.Parallel()
	for _, p := range []place{{tracked, "1.24", "17"}, {tracked, "1.26", "18"}} {
		t.Run(p.String(), func(t *testing.T) {
			t.Parallel()
			s := p.build(t, func(o *pgbouncer.Options) { o.PoolSize = 2 })
			w := &witness{}
			pool := newPool(t, s.url, w.watch)
			err := pool.AcquireFunc(t.Context(), func(c *pgxpool.Conn) error {
				pg := c.Conn().PgConn()
				if _, err := pg.Prepare(t.Context(), "by_hand", "select n from outbox", nil); code(err) != "42P01" {
					t.Error(err)
				}
				_, err := pg.Prepare(t.Context(), "by_hand", "select n from outbox", nil)
				return err
			})
			if err == nil || w.fatals.Load() != 1 {
				t.Errorf("%v, %d FATAL errors", err, w.fatals.Load())
			}
			eventually(t, "PgBouncer has logged it", func() bool { return s.b.LogContains("prepared statement name is already in use") })
		})
	}
}
