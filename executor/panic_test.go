package executor_test

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.uber.org/goleak"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/internal/logrec"
	"github.com/bounceproof/bounceproof/internal/pgscript"
	"github.com/bounceproof/bounceproof/prepare"
)

// bombSource is a source of rows to copy.
type bombSource struct {
	b    *bomb
	left int
}

func (s *bombSource) Next() bool {
	s.b.tick("CopyFromSource.Next")
	s.left--
	return s.left >= 0
}

func (s *bombSource) Values() ([]any, error) {
	s.b.tick("CopyFromSource.Values")
	return []any{bombValue{s.b}}, nil
}

func (s *bombSource) Err() error {
	s.b.tick("CopyFromSource.Err")
	return nil
}

const selectN = "select $1::int4 as n"

// panicCalls is what a careful caller does: Rollback and Close are deferred, where pgx's documentation asks for it.
var panicCalls = map[string]func(ctx context.Context, db caller, b *bomb) error{
	"Exec": func(ctx context.Context, db caller, b *bomb) error {
		_, err := db.Exec(ctx, insertA, prepare.Stable, b, bombValue{b})
		return err
	},
	"Exec without arguments": func(ctx context.Context, db caller, _ *bomb) error {
		_, err := db.Exec(ctx, "select 1")
		return err
	},
	"Exec of the rewriter's": func(ctx context.Context, db caller, b *bomb) error {
		_, err := db.Exec(ctx, "select 1", b)
		return err
	},
	"Exec in pgx's mode": func(ctx context.Context, db caller, b *bomb) error {
		_, err := db.Exec(ctx, insertA, pgx.QueryExecModeExec, b, bombValue{b})
		return err
	},
	"Query": func(ctx context.Context, db caller, b *bomb) error {
		rows, err := db.Query(ctx, selectN, prepare.Stable, b, bombValue{b})
		if err != nil {
			return err
		}
		for rows.Next() {
			if err := rows.Scan(&bombValue{b}); err != nil {
				return err
			}
		}
		return rows.Err()
	},
	"Query, row by row": func(ctx context.Context, db caller, b *bomb) error {
		rows, err := db.Query(ctx, selectN, prepare.Stable, bombValue{b})
		if err != nil {
			return err
		}
		for rows.Next() {
			if err := rows.Scan(bombRow{bombValue{b}}); err != nil {
				return err
			}
		}
		return rows.Err()
	},
	"Query in pgx's mode": func(ctx context.Context, db caller, b *bomb) error {
		rows, err := db.Query(ctx, selectN, pgx.QueryExecModeExec, b, bombValue{b})
		if err != nil {
			return err
		}
		rows.Close()
		return rows.Err()
	},
	"QueryRow": func(ctx context.Context, db caller, b *bomb) error {
		return db.QueryRow(ctx, selectN, prepare.Stable, b, bombValue{b}).Scan(&bombValue{b})
	},
	"SendBatch": func(ctx context.Context, db caller, b *bomb) (err error) {
		var batch pgx.Batch
		batch.Queue(insertA, prepare.Stable, b, bombValue{b})
		batch.Queue(selectN, prepare.Stable, bombValue{b}).QueryRow(func(row pgx.Row) error {
			b.tick("function of an item")
			return row.Scan(&bombValue{b})
		})
		batch.Queue(insertA, prepare.Stable, 1)
		return db.SendBatch(ctx, &batch).Close()
	},
	"SendBatch, read one by one": func(ctx context.Context, db caller, b *bomb) error {
		var batch pgx.Batch
		batch.Queue(selectN, prepare.Stable, b, bombValue{b})
		batch.Queue(selectN, prepare.Stable, 1)
		results := db.SendBatch(ctx, &batch)
		defer func() { _ = results.Close() }()
		rows, err := results.Query()
		if err != nil {
			return err
		}
		for rows.Next() {
			if err := rows.Scan(&bombValue{b}); err != nil {
				return err
			}
		}
		if err := results.QueryRow().Scan(&bombValue{b}); err != nil {
			return err
		}
		return results.Close()
	},
	"SendBatch that begins": func(ctx context.Context, db caller, b *bomb) error {
		var batch pgx.Batch
		batch.BeginTx(pgx.TxOptions{})
		batch.Queue(selectN, prepare.Stable, b, bombValue{b})
		results := db.SendBatch(ctx, &batch)
		defer func() { _ = results.Tx().Rollback(ctx) }()
		if err := results.Close(); err != nil {
			return err
		}
		return results.Tx().Commit(ctx)
	},
	"CopyFrom": func(ctx context.Context, db caller, b *bomb) error {
		_, err := db.CopyFrom(ctx, pgx.Identifier{"a"}, []string{"n"}, &bombSource{b: b, left: 2})
		return err
	},
	"Begin": func(ctx context.Context, db caller, b *bomb) error {
		tx, err := db.Begin(ctx)
		if err != nil {
			return err
		}
		defer func() { _ = tx.Rollback(ctx) }()
		return inBombTx(ctx, tx, b)
	},
	"BeginTx": func(ctx context.Context, db caller, b *bomb) error {
		tx, err := db.BeginTx(ctx, pgx.TxOptions{BeginQuery: "begin", CommitQuery: "commit"})
		if err != nil {
			return err
		}
		defer func() { _ = tx.Rollback(ctx) }()
		return inBombTx(ctx, tx, b)
	},
	"InTx": func(ctx context.Context, db caller, b *bomb) error {
		return db.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
			b.tick("function of InTx")
			if _, err := tx.Exec(ctx, insertA, prepare.Stable, b, bombValue{b}); err != nil {
				return err
			}
			tx.OnCommit(func() { b.tick("OnCommit") })
			return tx.Queue(insertA, prepare.Stable, b, bombValue{b})
		})
	},
	"InTx with a queue alone": func(ctx context.Context, db caller, b *bomb) error {
		return db.InTx(ctx, pgx.TxOptions{}, func(_ context.Context, tx executor.Tx) error {
			return tx.Queue(insertA, prepare.Stable, b, bombValue{b})
		})
	},
}

// inBombTx does everything in a transaction and commits it.
func inBombTx(ctx context.Context, tx pgx.Tx, b *bomb) error {
	nested, err := tx.Begin(ctx)
	if err != nil {
		return err
	}
	if err := nested.QueryRow(ctx, selectN, prepare.Stable, b, bombValue{b}).Scan(&bombValue{b}); err != nil {
		return err
	}
	if err := nested.Commit(ctx); err != nil {
		return err
	}
	rows, err := tx.Query(ctx, selectN, prepare.Stable, bombValue{b})
	if err != nil {
		return err
	}
	for rows.Next() {
		if err := rows.Scan(&bombValue{b}); err != nil {
			return err
		}
	}
	var batch pgx.Batch
	batch.Queue(selectN, prepare.Stable, b, bombValue{b})
	if err := tx.SendBatch(ctx, &batch).Close(); err != nil {
		return err
	}
	if _, err := tx.CopyFrom(ctx, pgx.Identifier{"a"}, []string{"n"}, &bombSource{b: b, left: 1}); err != nil {
		return err
	}
	return tx.Commit(ctx)
}

// TestAPanicLeavesNoConnection lets everything of the caller's panic, one call after the other, in every method. The panic goes on, and the
// connection is released or closed. Not parallel: it counts goroutines.
func TestAPanicLeavesNoConnection(t *testing.T) {
	ignore := goleak.IgnoreCurrent()
	seen := map[string]bool{}
	for _, sc := range scenes {
		for name, call := range panicCalls {
			for _, forget := range []bool{false, true} {
				for on, in := range map[string]func(ctx context.Context, ex *executor.Executor, b *bomb) error{
					"executor": func(ctx context.Context, ex *executor.Executor, b *bomb) error { return call(ctx, ex, b) },
					"Conn": func(ctx context.Context, ex *executor.Executor, b *bomb) error {
						return ex.AcquireFunc(ctx, func(c *executor.Conn) error {
							b.tick("function of AcquireFunc")
							return call(ctx, c, b)
						})
					},
				} {
					b := &bomb{}
					s, end := newScripted(t, sc.o, executor.Config{PreparedStatements: sc.policy, Logger: slog.New(slog.DiscardHandler), Trace: &executor.Trace{
						Retried: func(fallback.Reason, string) { b.tick("Trace.Retried") },
						Changed: func(executor.Change) { b.tick("Trace.Changed") },
						Probed:  func(fallback.Topology, time.Duration, error) { b.tick("Trace.Probed") },
					}}, maxConns(2), func(cfg *pgxpool.Config) { cfg.ConnConfig.Tracer = bombTracer{b} })
					what := fmt.Sprintf("%s, %s on the %s, names forgotten %t", sc.name, name, on, forget)
					total := 0
					for at := 0; at <= total; at++ {
						if err := s.sane(t.Context()); err != nil {
							t.Fatalf("%s: %v", what, err)
						}
						if forget {
							s.b.ForgetNames()
						}
						b.arm(at)
						var err error
						v := panicked(func() { err = in(t.Context(), s.ex, b) })
						if at == 0 { // the control: how often anything is called
							if total = b.calls(); err != nil || total == 0 && name != "Exec without arguments" {
								t.Fatalf("%s: called %d times, %v", what, total, err)
							}
							continue
						}
						seen[b.where] = true
						b.arm(0)
						if v != errBomb { //nolint:errorlint // it is that very value
							if b.where == "" {
								continue // another way was taken this time
							}
							t.Errorf("%s: panic of %s: came out as %v, %v", what, b.where, v, err)
						}
						if err := givenBack(s.pool); err != nil {
							t.Fatalf("%s: call %d: %v", what, at, err)
						}
					}
					if err := s.sane(t.Context()); err != nil {
						t.Errorf("%s: %v", what, err)
					}
					end()
				}
			}
		}
	}
	for _, where := range []string{
		"rewriter", "TraceQueryStart", "TraceQueryEnd", "TraceBatchStart", "TraceBatchQuery", "TraceBatchEnd", "TracePrepareStart", "TracePrepareEnd",
		"TraceCopyFromStart", "TraceCopyFromEnd", "Valuer", "Scanner", "RowScanner", "CopyFromSource.Next", "CopyFromSource.Values", "CopyFromSource.Err",
		"function of an item", "function of InTx", "function of AcquireFunc", "OnCommit", "Trace.Retried",
	} {
		if !seen[where] {
			t.Errorf("%s never panicked", where)
		}
	}
	if err := goleak.Find(ignore); err != nil {
		t.Error(err)
	}
}

// A panic of a hook of a guarded pool comes out where the connection was wanted, and leaves none behind. In a bare pool it ends the process, or
// loses the connection: the control shows the latter.
func TestAPanicOfAHookLeavesNoConnection(t *testing.T) {
	t.Parallel()
	for hook, set := range map[string]func(cfg *pgxpool.Config, b *bomb){
		"BeforeConnect": func(cfg *pgxpool.Config, b *bomb) {
			cfg.BeforeConnect = func(context.Context, *pgx.ConnConfig) error { b.tick("BeforeConnect"); return nil }
		},
		"AfterConnect": func(cfg *pgxpool.Config, b *bomb) {
			cfg.AfterConnect = func(context.Context, *pgx.Conn) error { b.tick("AfterConnect"); return nil }
		},
		"PrepareConn": func(cfg *pgxpool.Config, b *bomb) {
			cfg.PrepareConn = func(context.Context, *pgx.Conn) (bool, error) { b.tick("PrepareConn"); return true, nil }
		},
		"BeforeAcquire": func(cfg *pgxpool.Config, b *bomb) {
			cfg.BeforeAcquire = func(context.Context, *pgx.Conn) bool { b.tick("BeforeAcquire"); return true } //nolint:staticcheck // covered
		},
	} {
		for name, call := range panicCalls {
			b := &bomb{}
			logs := &logrec.Recorder{}
			_, ex := scriptedPool(t, pgscript.Options{}, executor.Config{Logger: logs.Logger()}, maxConns(1), func(cfg *pgxpool.Config) { set(cfg, b) })
			if _, err := ex.Topology(t.Context()); err != nil {
				t.Fatal(err)
			}
			b.arm(1)
			if v := panicked(func() { _ = call(t.Context(), ex, &bomb{}) }); v != errBomb { //nolint:errorlint // it is that very value
				t.Errorf("%s, %s: came out as %v", hook, name, v)
			}
			if err := givenBack(ex.Pool()); err != nil {
				t.Errorf("%s, %s: %v", hook, name, err)
			}
			if err := call(t.Context(), ex, &bomb{}); err != nil {
				t.Errorf("%s, %s: afterwards: %v", hook, name, err)
			}
			if len(logs.At(slog.LevelError)) != 1 {
				t.Errorf("%s, %s: logged %s", hook, name, logs.All())
			}
			b.arm(1)
			ex.Reset()
			var err error
			if v := panicked(func() { err = ex.Pool().Ping(t.Context()) }); v != nil || err == nil || !strings.Contains(err.Error(), errBomb.Error()) {
				t.Errorf("%s: the pool's own Acquire: %v, %v", hook, v, err)
			}
		}
	}
	b := &bomb{at: 1}
	scripted := pgscript.New(t, pgscript.Options{})
	t.Cleanup(scripted.Close)
	bare, err := pgxpool.NewWithConfig(t.Context(), parsePool(t, pgscript.URL, func(cfg *pgxpool.Config) {
		scripted.Use(cfg.ConnConfig)
		cfg.PrepareConn = func(context.Context, *pgx.Conn) (bool, error) { b.tick("PrepareConn"); return true, nil }
	}))
	if err != nil {
		t.Fatal(err)
	}
	if v := panicked(func() { _ = bare.Ping(t.Context()) }); v == nil || bare.Stat().AcquiredConns() != 1 {
		t.Errorf("control: %v, %d connections are lost", v, bare.Stat().AcquiredConns())
	}
}
