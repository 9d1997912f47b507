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
	"github.com/bounceproof/bounceproof/internal/await"
	"github.com/bounceproof/bounceproof/prepare"
	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
	"github.com/bounceproof/bounceproof/testenv/place"
)

// connCounter counts what happens to a pool's connections.
type connCounter struct {
	connects, fatals atomic.Int64
}

func (counter *connCounter) watch(cfg *pgxpool.Config) {
	cfg.MaxConns = 1
	cfg.ConnConfig.AfterConnect = func(context.Context, *pgconn.PgConn) error {
		counter.connects.Add(1)
		return nil
	}
	cfg.ConnConfig.OnPgError = func(_ *pgconn.PgConn, e *pgconn.PgError) bool {
		if e.Severity == "FATAL" {
			counter.fatals.Add(1)
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
		p      place.Place
		policy executor.PreparedStatements
	}{
		{place.New(place.Direct, "", "15"), executor.Auto},
		{place.New(place.Session, "1.18", "15"), executor.Auto},
		{place.New(place.TransactionRaw, "1.18", "15"), executor.Auto},
		{place.New(place.TransactionRaw, "1.18", "15"), executor.Shared},
		{place.New(place.TransactionTracked, "1.24", "17"), executor.Auto},
		{place.New(place.TransactionTracked, "1.26", "18"), executor.Auto},
		{place.New(place.StatementTracked, "1.24", "17"), executor.Auto},
	} {
		t.Run(fmt.Sprint(test.p, ", ", test.policy), func(t *testing.T) {
			t.Parallel()
			s := test.p.Start(t, func(o *pgbouncer.Options) { o.PoolSize = 2 })
			admin := connect(t, s.DB.URL)
			counter := &connCounter{}
			pool := newPool(t, s.URL, counter.watch)
			ex := newExecutor(t, pool, executor.Config{PreparedStatements: test.policy})
			if _, err := ex.Topology(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := pool.Ping(t.Context()); err != nil {
				t.Fatal(err)
			}
			same := func(what string) {
				t.Helper()
				if counter.connects.Load() != 1 || counter.fatals.Load() != 0 {
					t.Errorf("%s: %d connections, %d FATAL errors", what, counter.connects.Load(), counter.fatals.Load())
				}
			}
			counter.connects.Store(1) // those of the probe are none of the pool's

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
				if test.p.RefusesBegin() {
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
			mustExec(t, admin, "create table outbox (n int)")
			for range 3 {
				try("")
			}
			same("a table that came late")

			// An executor that knows the statements, on a connection that has not parsed them: now it is the named Parse that fails.
			mustExec(t, admin, "drop table outbox")
			pool.Reset()
			if err := pool.Ping(t.Context()); err != nil {
				t.Fatal(err)
			}
			counter.connects.Store(1)
			for range 3 {
				try("42P01")
			}
			mustExec(t, admin, "create table outbox (n int)")
			for range 3 {
				try("")
			}
			same("a table that went and came back")
			if d := ex.Stats().Downgrades; d > 1 || d == 1 && test.p.Mode != place.TransactionRaw {
				t.Errorf("%d downgrades", d)
			}
			if s.Bouncer != nil && s.Bouncer.LogContains("prepared statement name is already in use") {
				t.Error("PgBouncer complained")
			}
		})
	}
}

// TestAStatementRefusedInAnAbortedTransactionWorksLater is the same for 25P02.
func TestAStatementRefusedInAnAbortedTransactionWorksLater(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		p      place.Place
		policy executor.PreparedStatements
	}{
		{place.New(place.Direct, "", "15"), executor.Auto},
		{place.New(place.TransactionRaw, "1.18", "15"), executor.Shared},
		{place.New(place.TransactionTracked, "1.24", "17"), executor.Auto},
		{place.New(place.TransactionTracked, "1.26", "18"), executor.Auto},
	} {
		t.Run(fmt.Sprint(test.p, ", ", test.policy), func(t *testing.T) {
			t.Parallel()
			s := test.p.Start(t, func(o *pgbouncer.Options) { o.PoolSize = 2 })
			mustExec(t, connect(t, s.DB.URL), "create table outbox (n int primary key)")
			counter := &connCounter{}
			pool := newPool(t, s.URL, counter.watch)
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
			counter.connects.Store(1)
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
			if counter.connects.Load() != 1 || counter.fatals.Load() != 0 {
				t.Errorf("%d connections, %d FATAL errors", counter.connects.Load(), counter.fatals.Load())
			}
			if ex.Stats().Downgrades != 0 {
				t.Errorf("%+v", ex.Stats())
			}
			if s.Bouncer != nil && s.Bouncer.LogContains("prepared statement name is already in use") {
				t.Error("PgBouncer complained")
			}
		})
	}
}

// Negative control: a name that is parsed again without a Close is the end of the connection, as the tests above would see.
func TestTrackingPoolerKeepsTheNameOfAFailedParse(t *testing.T) {
	t.Parallel()
	for _, p := range []place.Place{place.New(place.TransactionTracked, "1.24", "17"), place.New(place.TransactionTracked, "1.26", "18")} {
		t.Run(p.String(), func(t *testing.T) {
			t.Parallel()
			s := p.Start(t, func(o *pgbouncer.Options) { o.PoolSize = 2 })
			counter := &connCounter{}
			pool := newPool(t, s.URL, counter.watch)
			err := pool.AcquireFunc(t.Context(), func(c *pgxpool.Conn) error {
				pg := c.Conn().PgConn()
				if _, err := pg.Prepare(t.Context(), "by_hand", "select n from outbox", nil); code(err) != "42P01" {
					t.Error(err)
				}
				_, err := pg.Prepare(t.Context(), "by_hand", "select n from outbox", nil)
				return err
			})
			if err == nil || counter.fatals.Load() != 1 {
				t.Errorf("%v, %d FATAL errors", err, counter.fatals.Load())
			}
			await.True(t, "PgBouncer has logged it", func() bool { return s.Bouncer.LogContains("prepared statement name is already in use") })
		})
	}
}
