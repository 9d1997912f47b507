package executor_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/internal/logrec"
	"github.com/bounceproof/bounceproof/prepare"
	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
	"github.com/bounceproof/bounceproof/testenv/place"
)

// lookalike is an error of the caller's own that looks like one of ours.
type lookalike struct{ code, message string }

// ourOwnName is the name of the statement that raises in the tests below.
var ourOwnName = prepare.Name(raiseSQL, []uint32{25, 25}, "")

const (
	raiseSQL = "select boom($1, $2)"
	callSQL  = "call booming($1, $2)"
)

var lookalikes = []lookalike{
	{"26000", `prepared statement "` + ourOwnName + `" does not exist`},
	{"26000", `prepared statement "PGBOUNCER_1" does not exist`},
	{"26000", "unnamed prepared statement does not exist"},
	{"42P05", `prepared statement "` + ourOwnName + `" already exists`},
	{"0A000", "cached plan must not change result type"},
	{"08P01", "prepared statement did not exist"},
	{"08P01", "bind message supplies 2 parameters, but prepared statement \"\" requires 2"},
	{"08P01", "bind message has 1 result formats but query has 1 columns"},
	{"22P03", "incorrect binary data format in bind parameter 1"},
	{"42804", "column \"a\" is of type integer but expression is of type text"},
	{"34000", `portal "" does not exist`},
	{"57P01", "terminating connection due to administrator command"},
	{"25P02", "current transaction is aborted, commands ignored until end of transaction block"},
}

// foreignSchema is what raises: a function, a procedure, a trigger, and a deferred one. The sequence counts executions, rolled back or not.
const foreignSchema = `
create sequence raised;
create function boom(code text, message text) returns int language plpgsql as $$
begin
	perform nextval('raised');
	raise exception using errcode = code, message = message;
end $$;
create function "boom$1"(code text, message text) returns int language sql as 'select boom(code, message)';
create procedure booming(code text, message text) language plpgsql as 'begin perform boom(code, message); end';
create function boom_trigger() returns trigger language plpgsql as 'begin perform boom(new.code, new.message); return new; end';
create table at_once (code text, message text);
create trigger t before insert on at_once for each row execute function boom_trigger();
create table later (code text, message text);
create constraint trigger t after insert on later deferrable initially deferred for each row execute function boom_trigger();
create table runs (n int);
`

// raisers are the ways for an error of one's own to come about.
var raisers = []struct {
	name string
	tx   bool // a transaction, whose closure must not run twice
	do   func(ctx context.Context, ex *executor.Executor, d lookalike) error
}{
	{"QueryRow", false, func(ctx context.Context, ex *executor.Executor, d lookalike) error {
		var n int
		return ex.QueryRow(ctx, raiseSQL, prepare.Stable, d.code, d.message).Scan(&n)
	}},
	{"QueryRow, unmarked", false, func(ctx context.Context, ex *executor.Executor, d lookalike) error {
		var n int
		return ex.QueryRow(ctx, `select "boom$1"($1, $2)`, d.code, d.message).Scan(&n)
	}},
	{"Exec of a procedure", false, func(ctx context.Context, ex *executor.Executor, d lookalike) error {
		_, err := ex.Exec(ctx, callSQL, prepare.Stable, d.code, d.message)
		return err
	}},
	{"Exec of a trigger", false, func(ctx context.Context, ex *executor.Executor, d lookalike) error {
		_, err := ex.Exec(ctx, "insert into at_once values ($1, $2)", prepare.Stable, d.code, d.message)
		return err
	}},
	{"Exec of a deferred trigger", false, func(ctx context.Context, ex *executor.Executor, d lookalike) error {
		_, err := ex.Exec(ctx, "insert into later values ($1, $2)", prepare.Stable, d.code, d.message)
		return err
	}},
	{"after a row", false, func(ctx context.Context, ex *executor.Executor, d lookalike) error {
		rows, err := ex.Query(ctx, "select case n when 1 then 1 else boom($1, $2) end from (values (1), (2)) v (n)", prepare.Stable, d.code, d.message)
		if err != nil {
			return fmt.Errorf("%w: before the first row: %w", errWrong, err)
		}
		_, err = pgx.CollectRows(rows, pgx.RowTo[int])
		return err
	}},
	{"SendBatch", false, func(ctx context.Context, ex *executor.Executor, d lookalike) error {
		var b pgx.Batch
		b.Queue("insert into runs values ($1)", prepare.Stable, 1)
		b.Queue(raiseSQL, prepare.Stable, d.code, d.message)
		return ex.SendBatch(ctx, &b).Close()
	}},
	{"first of a transaction", true, func(ctx context.Context, ex *executor.Executor, d lookalike) error {
		return ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
			var n int
			return tx.QueryRow(ctx, raiseSQL, prepare.Stable, d.code, d.message).Scan(&n)
		})
	}},
	{"later in a transaction", true, func(ctx context.Context, ex *executor.Executor, d lookalike) error {
		return ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
			if _, err := tx.Exec(ctx, "insert into runs values ($1)", prepare.Stable, 1); err != nil {
				return fmt.Errorf("%w: %w", errWrong, err)
			}
			_, err := tx.Exec(ctx, callSQL, prepare.Stable, d.code, d.message)
			return err
		})
	}},
	{"queued", true, func(ctx context.Context, ex *executor.Executor, d lookalike) error {
		return ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
			tx.Queue("insert into at_once values ($1, $2)", prepare.Stable, d.code, d.message)
			_, err := tx.Exec(ctx, "insert into runs values ($1)", prepare.Stable, 1)
			return err
		})
	}},
	{"queued, and nothing else", true, func(ctx context.Context, ex *executor.Executor, d lookalike) error {
		return ex.InTx(ctx, pgx.TxOptions{}, func(_ context.Context, tx executor.Tx) error {
			tx.Queue("insert into runs values ($1)", prepare.Stable, 1)
			tx.Queue("insert into at_once values ($1, $2)", prepare.Stable, d.code, d.message)
			return nil
		})
	}},
	{"deferred to COMMIT", true, func(ctx context.Context, ex *executor.Executor, d lookalike) error {
		return ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
			_, err := tx.Exec(ctx, "insert into later values ($1, $2)", prepare.Stable, d.code, d.message)
			if err != nil {
				return fmt.Errorf("%w: before COMMIT: %w", errWrong, err)
			}
			return nil
		})
	}},
	{"deferred, queued, and nothing else", true, func(ctx context.Context, ex *executor.Executor, d lookalike) error {
		return ex.InTx(ctx, pgx.TxOptions{}, func(_ context.Context, tx executor.Tx) error {
			tx.Queue("insert into later values ($1, $2)", prepare.Stable, d.code, d.message)
			return nil
		})
	}},
	{"in a batch of a transaction", true, func(ctx context.Context, ex *executor.Executor, d lookalike) error {
		return ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
			var b pgx.Batch
			b.Queue(raiseSQL, prepare.Stable, d.code, d.message)
			return tx.SendBatch(ctx, &b).Close()
		})
	}},
	{"in a nested transaction", true, func(ctx context.Context, ex *executor.Executor, d lookalike) error {
		return ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
			sp, err := tx.Begin(ctx)
			if err != nil {
				return err
			}
			var n int
			err = sp.QueryRow(ctx, raiseSQL, prepare.Stable, d.code, d.message).Scan(&n)
			if sp.Rollback(ctx) != nil {
				return fmt.Errorf("%w: no way back to the savepoint after %w", errWrong, err)
			}
			// The transaction around it lives.
			if _, execErr := tx.Exec(ctx, "insert into runs values ($1)", prepare.Stable, 1); execErr != nil {
				return fmt.Errorf("%w: %w", errWrong, execErr)
			}
			return err
		})
	}},
}

// unchanged checks that err is the server's own and that the executor made nothing of it.
func unchanged(err error, d lookalike) error {
	var pgErr *pgconn.PgError
	var lost *executor.PreparedStatementError
	switch {
	case err == nil:
		return errors.New("no error")
	case !errors.As(err, &pgErr):
		return fmt.Errorf("no PgError in %w", err)
	case pgErr.Code != d.code || pgErr.Message != d.message:
		return fmt.Errorf("%s %q became %w", d.code, d.message, err)
	case !strings.Contains(pgErr.Where, "at RAISE"):
		return fmt.Errorf("its Where is %q", pgErr.Where)
	case errors.As(err, &lost), errors.Is(err, executor.ErrCommitUnknown), errors.Is(err, executor.ErrStatementMode), errors.Is(err, errWrong):
		return fmt.Errorf("it was taken for something else: %w", err)
	}
	return nil
}

func TestForeignErrorsPassThrough(t *testing.T) {
	t.Parallel()
	for _, p := range place.OneOfEachKind() {
		t.Run(p.String(), func(t *testing.T) {
			t.Parallel()
			// One server connection: no statement of ours is lost here, so whatever happens comes of the caller's errors.
			s := p.Start(t, func(o *pgbouncer.Options) { o.PoolSize = 1 })
			admin := connect(t, s.DB.URL)
			mustExec(t, admin, foreignSchema)
			for _, policy := range []executor.PreparedStatements{executor.Auto, executor.On, executor.Off, executor.Shared} {
				logs := &logrec.Recorder{}
				pool := newPool(t, s.URL, maxConns(1))
				ex := newExecutor(t, pool, executor.Config{PreparedStatements: policy, Logger: logs.Logger()})
				if _, err := ex.Topology(t.Context()); err != nil {
					t.Fatal(err)
				}
				before, warnings := ex.Stats(), len(logs.At(slog.LevelWarn))
				misses := int64(0)
				for _, raiser := range raisers {
					for _, d := range lookalikes {
						what := fmt.Sprintf("%v, %s, %s %q", policy, raiser.name, d.code, d.message)
						count := one(t, admin, "select nextval('raised')")
						err := raiser.do(t.Context(), ex, d)
						if err := unchanged(err, d); err != nil {
							t.Errorf("%s: %v", what, err)
						}
						if got, want := one(t, admin, "select nextval('raised')"), plus(t, count, 2); got != want {
							t.Errorf("%s: executed more than once: %s instead of %s", what, got, want)
						}
					}
					misses = ex.Stats().Misses
				}
				if n := one(t, admin, "select count(*) from runs"); n != "0" && policy == executor.Auto {
					// Only the nested one commits nothing either: its closure returns the error.
					t.Errorf("%s of the failed transactions' inserts stand", n)
				}
				after := ex.Stats()
				if after.Downgrades != before.Downgrades || after.Retries != before.Retries+misses || after.Probes != before.Probes {
					t.Errorf("%v: %+v became %+v", policy, before, after)
				}
				if got := logs.At(slog.LevelWarn); len(got) != warnings {
					t.Errorf("%v: warned: %v", policy, got[warnings:])
				}
				pool.Close()
			}
		})
	}
}

func plus(t *testing.T, n string, by int) string {
	t.Helper()
	var value int
	if _, err := fmt.Sscan(n, &value); err != nil {
		t.Fatal(err)
	}
	return fmt.Sprint(value + by)
}

// A caller who uses SQL's own PREPARE, EXECUTE and DEALLOCATE gets PostgreSQL's own errors, whatever name it is.
func TestForeignNamesPassThrough(t *testing.T) {
	t.Parallel()
	s := place.New(place.Direct, "", "15").Start(t)
	for _, policy := range []executor.PreparedStatements{executor.Auto, executor.On, executor.Off, executor.Shared} {
		logs := &logrec.Recorder{}
		pool := newPool(t, s.URL, maxConns(1))
		ex := newExecutor(t, pool, executor.Config{PreparedStatements: policy, Logger: logs.Logger()})
		if _, err := ex.Topology(t.Context()); err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"missing", "sv_missing", `"PGBOUNCER_7"`, "odyssey_pstmt_1"} {
			for _, sql := range []string{"execute " + name, "deallocate " + name} {
				for _, do := range []func() error{
					func() error {
						_, err := ex.Exec(t.Context(), sql, prepare.Stable)
						return err
					},
					func() error {
						return inTxDo(t.Context(), ex, func(ctx context.Context, tx executor.Tx) error {
							_, err := tx.Exec(ctx, sql, prepare.Stable)
							return err
						})
					},
				} {
					err := do()
					var lost *executor.PreparedStatementError
					if code(err) != "26000" || errors.As(err, &lost) {
						t.Errorf("%v, %s: %v", policy, sql, err)
					}
				}
			}
		}
		if _, err := ex.Exec(t.Context(), "prepare mine as select 1", prepare.Stable); err != nil {
			t.Error(err)
		}
		if _, err := ex.Exec(t.Context(), "prepare mine as select 1", prepare.Stable); code(err) != "42P05" {
			t.Error(err)
		}
		if st := ex.Stats(); st.Downgrades > 0 && policy == executor.Auto || st.Retries != 0 {
			t.Errorf("%v: %+v", policy, st)
		}
		if got := logs.At(slog.LevelWarn); len(got) != 0 {
			t.Errorf("%v: warned: %v", policy, got)
		}
	}
}

// inTxDo runs a closure in a transaction, and fails if it is run twice.
func inTxDo(ctx context.Context, ex *executor.Executor, f func(ctx context.Context, tx executor.Tx) error) error {
	runs := 0
	err := ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
		runs++
		return f(ctx, tx)
	})
	if runs != 1 {
		return fmt.Errorf("%w: the closure ran %d times, after %w", errWrong, runs, err)
	}
	return err
}
