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

const (
	knownSelect = "select $1::int + 1"
	knownInsert = "insert into t values ($1)"
)

// forgettings are the ways for a caller to throw away a session's statements that the executor sees. Those that run alone are allowed outside
// of a transaction only. What runs in one group is sent before the answer to any of it has come.
var forgettings = []struct {
	name  string
	alone bool
	group bool
	do    func(ctx context.Context, ex *executor.Executor, sql string) error
}{
	{"Exec", true, false, func(ctx context.Context, ex *executor.Executor, sql string) error {
		_, err := ex.Exec(ctx, sql)
		return err
	}},
	{"Exec, stable", true, false, func(ctx context.Context, ex *executor.Executor, sql string) error {
		_, err := ex.Exec(ctx, sql, prepare.Stable)
		return err
	}},
	{"Query", true, false, func(ctx context.Context, ex *executor.Executor, sql string) error {
		rows, err := ex.Query(ctx, sql)
		if err != nil {
			return err
		}
		rows.Close()
		return rows.Err()
	}},
	{"QueryRow", true, false, func(ctx context.Context, ex *executor.Executor, sql string) error {
		if err := ex.QueryRow(ctx, sql).Scan(); !errors.Is(err, pgx.ErrNoRows) {
			return fmt.Errorf("want no rows, got %w", err)
		}
		return nil
	}},
	{"SendBatch", false, true, func(ctx context.Context, ex *executor.Executor, sql string) error {
		var b pgx.Batch
		b.Queue(knownSelect, prepare.Stable, 1)
		b.Queue(sql)
		b.Queue(knownSelect, prepare.Stable, 2)
		results := ex.SendBatch(ctx, &b)
		var first, second int
		err := results.QueryRow().Scan(&first)
		if err == nil {
			_, err = results.Exec()
		}
		if err == nil {
			err = results.QueryRow().Scan(&second)
		}
		if err = errors.Join(err, results.Close()); err == nil && (first != 2 || second != 3) {
			err = fmt.Errorf("got %d and %d", first, second)
		}
		return err
	}},
	{"tx.Exec", false, false, func(ctx context.Context, ex *executor.Executor, sql string) error {
		return ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
			if _, err := tx.Exec(ctx, knownInsert, prepare.Stable, 1); err != nil {
				return err
			}
			if _, err := tx.Exec(ctx, sql); err != nil {
				return err
			}
			_, err := tx.Exec(ctx, knownInsert, prepare.Stable, 2)
			return err
		})
	}},
	{"tx.Queue", false, true, func(ctx context.Context, ex *executor.Executor, sql string) error {
		return ex.InTx(ctx, pgx.TxOptions{}, func(_ context.Context, tx executor.Tx) error {
			return errors.Join(tx.Queue(knownInsert, prepare.Stable, 1), tx.Queue(sql), tx.Queue(knownInsert, prepare.Stable, 2))
		})
	}},
}

// useKnown runs statements that have names, alone and in a transaction.
func useKnown(ctx context.Context, ex *executor.Executor) error {
	for i := range 2 {
		var n int
		if err := ex.QueryRow(ctx, knownSelect, prepare.Stable, i).Scan(&n); err != nil || n != i+1 {
			return fmt.Errorf("got %d, %w", n, err)
		}
		err := ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
			_, err := tx.Exec(ctx, knownInsert, prepare.Stable, i)
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// TestForgettingStatementsIsNoDowngrade: who throws away all statements of a session through the executor has not lost one.
func TestForgettingStatementsIsNoDowngrade(t *testing.T) {
	t.Parallel()
	for _, p := range []place.Place{place.New(place.Direct, "", "15"), place.New(place.TransactionTracked, "1.24", "17")} {
		t.Run(p.String(), func(t *testing.T) {
			t.Parallel()
			r := p.Start(t)
			admin := connect(t, r.DB.URL)
			mustExec(t, admin, "create table t (v int)")
			for _, sql := range []string{"deallocate all", "DEALLOCATE PREPARE ALL", "discard all"} {
				for _, f := range forgettings {
					if !f.alone && strings.HasPrefix(sql, "discard") {
						continue // PostgreSQL refuses it in a transaction
					}
					t.Run(sql+"/"+f.name, func(t *testing.T) {
						logs := &logrec.Recorder{}
						ex := newExecutor(t, newPool(t, r.URL, maxConns(1)), executor.Config{Logger: logs.Logger()})
						for i := range 3 {
							if err := useKnown(t.Context(), ex); err != nil {
								t.Fatalf("before, round %d: %v", i, err)
							}
							before := one(t, admin, "select count(*) from t")
							if err := f.do(t.Context(), ex, sql); err != nil {
								t.Fatalf("round %d: %v", i, err)
							}
							if got := one(t, admin, "select count(*) from t"); strings.HasPrefix(f.name, "tx.") && got != plus(t, before, 2) {
								t.Errorf("round %d: %s rows became %s", i, before, got)
							}
							if err := useKnown(t.Context(), ex); err != nil {
								t.Fatalf("after, round %d: %v", i, err)
							}
						}
						if n := ex.Stats(); n.Downgrades != 0 || n.Named == 0 {
							t.Errorf("%+v", n)
						}
						if got := logs.At(slog.LevelWarn); len(got) != 0 {
							t.Errorf("warned: %v", got)
						}
					})
				}
			}
		})
	}
}

// What throws statements away is not undone when something behind it fails, or when nobody reads its result.
func TestForgettingStatementsOutlivesAFailure(t *testing.T) {
	t.Parallel()
	r := place.New(place.Direct, "", "15").Start(t)
	mustExec(t, connect(t, r.DB.URL), "create table t (v int)")
	errMine := errors.New("a function's own")
	var unread pgx.Batch
	unread.Queue(knownSelect, prepare.Stable, 1).QueryRow(func(pgx.Row) error { return errMine })
	unread.Queue("deallocate all")
	failings := map[string]func(ctx context.Context, ex *executor.Executor) error{
		"Exec": func(ctx context.Context, ex *executor.Executor) error {
			_, err := ex.Exec(ctx, "select 1; deallocate all; select 1 / 0")
			return err
		},
		"SendBatch": func(ctx context.Context, ex *executor.Executor) error { return ex.SendBatch(ctx, &unread).Close() },
		"tx.SendBatch": func(ctx context.Context, ex *executor.Executor) error {
			return ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error { return tx.SendBatch(ctx, &unread).Close() })
		},
		"tx.Queue": func(ctx context.Context, ex *executor.Executor) error {
			return ex.InTx(ctx, pgx.TxOptions{}, func(_ context.Context, tx executor.Tx) error {
				return errors.Join(tx.Queue(knownInsert, prepare.Stable, 1), tx.Queue("deallocate all"), tx.Queue("select 1 / $1::int", 0))
			})
		},
	}
	for _, policy := range []executor.PreparedStatements{executor.Auto, executor.On} {
		for name, fail := range failings {
			ex := newExecutor(t, newPool(t, r.URL, maxConns(1)), executor.Config{PreparedStatements: policy})
			for range 2 {
				if err := useKnown(t.Context(), ex); err != nil {
					t.Fatal(policy, name, err)
				}
				var pgErr *pgconn.PgError
				if err := fail(t.Context(), ex); !errors.Is(err, errMine) && (!errors.As(err, &pgErr) || pgErr.Code != "22012") {
					t.Fatal(policy, name, err)
				}
				if err := useKnown(t.Context(), ex); err != nil {
					t.Error(policy, name, err)
				}
			}
			if n := ex.Stats(); n.Downgrades != 0 || n.Named == 0 {
				t.Errorf("%v %s: %+v", policy, name, n)
			}
		}
	}
}

// Under shared a transaction knows which names its server connection has, until it throws them away itself.
func TestForgettingSharedStatements(t *testing.T) {
	t.Parallel()
	r := place.New(place.TransactionRaw, "1.18", "15").Start(t)
	mustExec(t, connect(t, r.DB.URL), "create table t (v int)")
	const sql, another = "deallocate all", "insert into t values ($1 + 1)"
	send := func(ctx context.Context, tx pgx.Tx, sqls ...string) error {
		var b pgx.Batch
		for _, sql := range sqls {
			args := []any{prepare.Stable}
			if strings.Contains(sql, "$1") {
				args = append(args, 1)
			}
			b.Queue(sql, args...)
		}
		return tx.SendBatch(ctx, &b).Close()
	}
	for name, forget := range map[string]func(ctx context.Context, tx pgx.Tx) error{
		"Exec":              func(ctx context.Context, tx pgx.Tx) error { _, err := tx.Exec(ctx, sql); return err },
		"Exec, several":     func(ctx context.Context, tx pgx.Tx) error { _, err := tx.Exec(ctx, "select 1; "+sql); return err },
		"Exec, stable":      func(ctx context.Context, tx pgx.Tx) error { _, err := tx.Exec(ctx, sql, prepare.Stable); return err },
		"SendBatch, last":   func(ctx context.Context, tx pgx.Tx) error { return send(ctx, tx, knownInsert, sql) },
		"SendBatch, first":  func(ctx context.Context, tx pgx.Tx) error { return send(ctx, tx, sql, knownInsert) },
		"SendBatch, middle": func(ctx context.Context, tx pgx.Tx) error { return send(ctx, tx, another, sql, knownInsert) },
		"Queue": func(_ context.Context, tx pgx.Tx) error {
			q := tx.(executor.Tx)
			return errors.Join(q.Queue(another, prepare.Stable, 1), q.Queue(sql), q.Queue(knownInsert, prepare.Stable, 1))
		},
		"nested, rolled back": func(ctx context.Context, tx pgx.Tx) error {
			nested, err := tx.Begin(ctx)
			if err != nil {
				return err
			}
			return errors.Join(send(ctx, nested, sql), nested.Rollback(ctx))
		},
	} {
		ex := newExecutor(t, newPool(t, r.URL, maxConns(1)), executor.Config{PreparedStatements: executor.Shared})
		for round := range 3 {
			tx, err := ex.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			_, first := tx.Exec(t.Context(), knownInsert, prepare.Stable, 1)
			_, second := tx.Exec(t.Context(), another, prepare.Stable, 1)
			forgotten := forget(t.Context(), tx)
			_, behind := tx.Exec(t.Context(), knownInsert, prepare.Stable, 1)
			if err := errors.Join(first, second, forgotten, behind, tx.Commit(t.Context())); err != nil {
				t.Errorf("%s, round %d: %v", name, round, err)
			}
		}
		if n := ex.Stats(); n.Shared == 0 || n.Downgrades != 0 {
			t.Errorf("%s: %+v", name, n)
		}
	}
}

// Control: statements that are thrown away behind the executor's back are lost, which is evidence, and the caller does not notice.
func TestForgettingStatementsUnseenIsADowngrade(t *testing.T) {
	t.Parallel()
	r := place.New(place.Direct, "", "15").Start(t)
	mustExec(t, connect(t, r.DB.URL), "create table t (v int)")
	logs := &logrec.Recorder{}
	ex := newExecutor(t, newPool(t, r.URL, maxConns(1)), executor.Config{Logger: logs.Logger()})
	if err := useKnown(t.Context(), ex); err != nil {
		t.Fatal(err)
	}
	if _, err := ex.Pool().Exec(t.Context(), "deallocate all"); err != nil {
		t.Fatal(err)
	}
	if err := useKnown(t.Context(), ex); err != nil {
		t.Error(err)
	}
	if n := ex.Stats(); n.Downgrades != 1 || len(logs.At(slog.LevelWarn)) != 1 {
		t.Errorf("%+v, log:\n%s", n, logs.All())
	}
}

// A neighbour threw away all statements of the server connection. The first statement of a transaction misses its name and is redone; the next
// ones must not count on theirs, for a miss in the middle is the transaction's end.
func TestAMissTellsOfAllNamesOfItsServer(t *testing.T) {
	t.Parallel()
	r := place.New(place.TransactionRaw, "1.18", "15").Start(t, func(o *pgbouncer.Options) { o.PoolSize = 1 })
	mustExec(t, connect(t, r.DB.URL), "create table t (v int)")
	ex := newExecutor(t, newPool(t, r.URL, maxConns(1)), executor.Config{PreparedStatements: executor.Shared})
	neighbour := newPool(t, r.URL, maxConns(1))
	const another = "insert into t values ($1 + 1)"
	for round := range 3 {
		tx, err := ex.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		_, first := tx.Exec(t.Context(), knownInsert, prepare.Stable, 1)
		_, second := tx.Exec(t.Context(), another, prepare.Stable, 1)
		if err := errors.Join(first, second, tx.Commit(t.Context())); err != nil {
			t.Errorf("round %d: %v", round, err)
		}
		if _, err := neighbour.Exec(t.Context(), "deallocate all"); err != nil {
			t.Fatal(err)
		}
	}
	if n := ex.Stats(); n.Misses != 2 || n.Downgrades != 0 {
		t.Errorf("want a miss in the second and third round each: %+v", n)
	}
}
