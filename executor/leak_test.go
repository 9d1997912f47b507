package executor_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.uber.org/goleak"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/internal/await"
	"github.com/bounceproof/bounceproof/internal/logrec"
	"github.com/bounceproof/bounceproof/internal/pgscript"
	"github.com/bounceproof/bounceproof/prepare"
	"github.com/bounceproof/bounceproof/testenv/place"
)

// Tests of this file are not parallel: they look at the whole process.

// TestNoGoroutineIsLeft runs every call, whole and cut at a sample of its messages, and counts goroutines after each executor's end.
func TestNoGoroutineIsLeft(t *testing.T) {
	ignore := goleak.IgnoreCurrent()
	for _, sc := range scenes {
		for _, op := range countedCalls {
			s, end := newScripted(t, sc.o, executor.Config{PreparedStatements: sc.policy}, maxConns(2))
			if err := op.run(t.Context(), s.ex, op.sqls); err != nil {
				t.Fatal(err)
			}
			places := boundaries(s.b)
			end()
			if n := s.b.Open(); n != 0 {
				t.Errorf("%s, %s: %d connections are open after the pool was closed", sc.name, op.name, n)
			}
			for i := 3; i < len(places); i += 7 {
				s, end := newScripted(t, sc.o, executor.Config{PreparedStatements: sc.policy}, maxConns(2))
				if err := cutAt(t.Context(), s, op, places[i]); err != nil {
					t.Errorf("%s, %s: %v", sc.name, op.name, err)
				}
				end()
			}
			if err := goleak.Find(ignore); err != nil {
				t.Fatalf("%s, %s: %v", sc.name, op.name, err)
			}
		}
	}
	// Negative control.
	stop := make(chan struct{})
	go func() { <-stop }()
	if goleak.Find(ignore) == nil {
		t.Error("a goroutine that stays is not seen")
	}
	close(stop)
}

// statementsHeld returns the statements on a connection's server that are not ours, and how many are.
func statementsHeld(ctx context.Context, c *pgconn.PgConn) (ours int, foreign []string, _ error) {
	result := c.ExecParams(ctx, "select name, statement from pg_prepared_statements", nil, nil, nil, nil).Read()
	for _, row := range result.Rows {
		switch name := string(row[0]); {
		case strings.HasPrefix(name, prepare.NamePrefix):
			ours++
		case strings.HasPrefix(name, "PGBOUNCER_"): // the pooler's, which bounds them itself
		default:
			foreign = append(foreign, name+": "+string(row[1]))
		}
	}
	return ours, foreign, result.Err
}

// TestNothingIsLeftOnServers does everything, well and badly, and then looks at what is left in the pool, on the servers, and in the process.
func TestNothingIsLeftOnServers(t *testing.T) {
	const capacity = 4
	for _, test := range []struct {
		p      place.Place
		policy executor.PreparedStatements
		most   int // names of ours on one server connection; negative is not bounded by the executor
	}{
		{place.New(place.Direct, "", "15"), executor.Auto, capacity + 1}, // and the one whose Close rides with the next request
		{place.New(place.Direct, "", "15"), executor.Off, 0},
		{place.New(place.TransactionRaw, "1.18", "15"), executor.Auto, 0},
		{place.New(place.TransactionRaw, "1.18", "15"), executor.Shared, -1},
		{place.New(place.TransactionTracked, "1.24", "17"), executor.Auto, 0},
	} {
		t.Run(fmt.Sprint(test.p, ", ", test.policy), func(t *testing.T) {
			s := newCutPlace(t, test.p, test.policy)
			mustExec(t, s.admin, "create table numbers (n int)")
			s.pool.Close()
			ignore := goleak.IgnoreCurrent()
			cfg, err := pgxpool.ParseConfig(s.URL)
			if err != nil {
				t.Fatal(err)
			}
			cfg.MaxConns = 3
			pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
			if err != nil {
				t.Fatal(err)
			}
			ex, err := executor.New(pool, executor.Config{PreparedStatements: test.policy, StatementCapacity: capacity, Logger: new(logrec.Recorder).Logger()})
			if err != nil {
				t.Fatal(err)
			}
			for i := range 3 {
				for _, op := range countedCalls {
					if err := op.run(s.next(t.Context()), ex, op.sqls); err != nil {
						t.Errorf("%s: %v", op.name, err)
					}
				}
				for _, q := range questions {
					if _, err := q.ask(t.Context(), ex, 1); err != nil {
						t.Errorf("%s: %v", q.name, err)
					}
					for k := 1 + i; k < 20; k += 3 {
						_, _ = q.ask(pgscript.TripAt(t.Context(), k, 0), ex, 2)
					}
				}
				bad := []func() error{
					func() error {
						_, err := ex.Exec(t.Context(), "select 1 / $1::int4", prepare.Stable, 0)
						return err
					},
					func() error {
						_, err := ex.Exec(t.Context(), "select $1 from nowhere", prepare.Stable, 0)
						return err
					},
					func() error {
						_, err := ex.CopyFrom(t.Context(), pgx.Identifier{"numbers"}, []string{"n"}, pgx.CopyFromRows([][]any{{"x"}}))
						return err
					},
					func() error {
						return ex.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
							_, _ = tx.Exec(ctx, "select 2 / $1::int4", prepare.Stable, 0)
							_, err := tx.Exec(ctx, "select 3 / $1::int4", prepare.Stable, 1)
							return err
						})
					},
					func() error {
						var b pgx.Batch
						b.Queue("select 4 / $1::int4", prepare.Stable, 1)
						b.Queue("select 5 / $1::int4", prepare.Stable, 0)
						b.Queue("select 6 / $1::int4", prepare.Stable, 1)
						return ex.SendBatch(t.Context(), &b).Close()
					},
					func() (err error) {
						defer func() { err, _ = recover().(error) }()
						return ex.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
							_, _ = tx.Exec(ctx, "select 7 / $1::int4", prepare.Stable, 1)
							panic(errors.New("the closure panics"))
						})
					},
				}
				for n, f := range bad {
					if f() == nil {
						t.Errorf("failure %d succeeded", n)
					}
				}
				if err := ex.Notify("channel", fmt.Sprint(i)); err != nil {
					t.Error(err)
				}
			}
			if err := givenBack(pool); err != nil {
				t.Error(err)
			}
			ours := 0
			for _, c := range pool.AcquireAllIdle(t.Context()) {
				n, foreign, err := statementsHeld(t.Context(), c.Conn().PgConn())
				if err != nil || len(foreign) != 0 || test.most >= 0 && n > test.most {
					t.Errorf("%d names of ours, and %v, %v", n, foreign, err)
				}
				ours += n
				c.Release()
			}
			if ours == 0 && test.most != 0 {
				t.Error("not a single name is there to be counted")
			}
			if err := ex.Close(t.Context()); err != nil {
				t.Error(err)
			}
			pool.Close()
			if err := goleak.Find(ignore); err != nil {
				t.Error(err)
			}
			await.True(t, "no connection of ours is left", func() bool {
				if s.Bouncer == nil {
					return one(t, s.admin, "select count(*) from pg_stat_activity where datname = current_database() and backend_type = 'client backend'") == "1"
				}
				clients, err := s.Bouncer.Admin("show clients")
				if err != nil {
					t.Fatal(err)
				}
				for _, c := range clients {
					if c["database"] == s.DB.Name {
						return false
					}
				}
				return true
			})
			if busy := one(t, s.admin, "select count(*) from pg_stat_activity where datname = current_database() and state like 'idle in transaction%'"); busy != "0" {
				t.Errorf("%s server connections are left in a transaction", busy)
			}
		})
	}
}

// A backend that is closed under an executor leaves nothing either.
func TestNothingIsLeftWhenTheServerDies(t *testing.T) {
	ignore := goleak.IgnoreCurrent()
	for _, sc := range scenes {
		s, end := newScripted(t, sc.o, executor.Config{PreparedStatements: sc.policy}, maxConns(2))
		if err := s.sane(t.Context()); err != nil {
			t.Fatal(err)
		}
		rows, err := s.ex.Query(t.Context(), "select $1", prepare.Stable, 1)
		if err != nil {
			t.Fatal(err)
		}
		tx, err := s.ex.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := tx.Exec(t.Context(), insertA, prepare.Stable, 1); err != nil {
			t.Fatal(err)
		}
		s.b.Refuse(true)
		s.b.CutAll()
		rows.Close()
		if err := tx.Commit(t.Context()); err == nil {
			t.Error(sc.name, "committed")
		}
		if _, err := s.ex.Exec(t.Context(), insertA, prepare.Stable, 1); err == nil {
			t.Error(sc.name, "executed")
		}
		s.b.Refuse(false)
		if err := s.sane(t.Context()); err != nil {
			t.Errorf("%s: %v", sc.name, err)
		}
		end()
		if err := goleak.Find(ignore); err != nil {
			t.Errorf("%s: %v", sc.name, err)
		}
	}
}
