package executor_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgxpool"
	"pgregory.net/rapid"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/internal/pgscript"
	"github.com/bounceproof/bounceproof/prepare"
	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
	"github.com/bounceproof/bounceproof/testenv/place"
)

const (
	modelTexts = 12
	divides    = "select 1 / $1::int"
)

// addText is a statement whose rows nobody takes for those of another one.
func addText(k int) string { return fmt.Sprintf("select $1::int + %d", 1000*(k+1)) }

func addResult(k, arg int) int { return arg + 1000*(k+1) }

// a step of a process is one of these, on texts of its choice. An error is one that a caller sees.
var modelSteps = []struct {
	name string
	do   func(ctx context.Context, ex *executor.Executor, texts []int) error
}{
	{"alone", func(ctx context.Context, ex *executor.Executor, texts []int) error {
		for _, k := range texts {
			if err := addRight(ctx, ex.QueryRow, k); err != nil {
				return err
			}
		}
		return nil
	}},
	{"Begin", func(ctx context.Context, ex *executor.Executor, texts []int) error { // which nobody can run again
		tx, err := ex.Begin(ctx)
		if err != nil {
			return err
		}
		defer func() { _ = tx.Rollback(ctx) }()
		for _, k := range texts {
			if err := addRight(ctx, tx.QueryRow, k); err != nil {
				return err
			}
		}
		return tx.Commit(ctx)
	}},
	{"Begin and a text of its own", func(ctx context.Context, ex *executor.Executor, texts []int) error {
		tx, err := ex.Begin(ctx)
		if err != nil {
			return err
		}
		defer func() { _ = tx.Rollback(ctx) }()
		if _, err := tx.Exec(ctx, "select 1"); err != nil {
			return err
		}
		for _, k := range texts {
			if err := addRight(ctx, tx.QueryRow, k); err != nil {
				return err
			}
		}
		return tx.Commit(ctx)
	}},
	{"queue", func(ctx context.Context, ex *executor.Executor, texts []int) error {
		tx, err := ex.Begin(ctx)
		if err != nil {
			return err
		}
		defer func() { _ = tx.Rollback(ctx) }()
		if err := addRight(ctx, tx.QueryRow, texts[0]); err != nil {
			return err
		}
		for _, k := range texts {
			if err := tx.(executor.Tx).Queue(addText(k), prepare.Stable, 1); err != nil {
				return err
			}
		}
		return tx.Commit(ctx)
	}},
	{"batch", func(ctx context.Context, ex *executor.Executor, texts []int) error {
		var b pgx.Batch
		for _, k := range texts {
			b.Queue(addText(k), prepare.Stable, 7)
		}
		results := ex.SendBatch(ctx, &b)
		for _, k := range texts {
			var n int
			if err := results.QueryRow().Scan(&n); err != nil || n != addResult(k, 7) {
				_ = results.Close()
				return fmt.Errorf("batch: got %d, want %d: %w", n, addResult(k, 7), err)
			}
		}
		return results.Close()
	}},
	{"failed", func(ctx context.Context, ex *executor.Executor, texts []int) error {
		tx, err := ex.Begin(ctx)
		if err != nil {
			return err
		}
		defer func() { _ = tx.Rollback(ctx) }()
		if err := addRight(ctx, tx.QueryRow, texts[0]); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, divides, prepare.Stable, 0); err == nil || !isCode(err, "22012") {
			return fmt.Errorf("want 22012, got %w", err)
		}
		for _, k := range texts {
			if err := addRight(ctx, tx.QueryRow, k); !isCode(err, "25P02") {
				return fmt.Errorf("want 25P02, got %w", err)
			}
		}
		return nil
	}},
}

func isCode(err error, code string) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && pgErr.Code == code
}

// addRight runs a statement and checks what it answers.
func addRight(ctx context.Context, queryRow func(context.Context, string, ...any) pgx.Row, k int) error {
	arg := k*7 + 3
	var n int
	if err := queryRow(ctx, addText(k), prepare.Stable, arg).Scan(&n); err != nil {
		return err
	}
	if n != addResult(k, arg) {
		return fmt.Errorf("a wrong row: %d in place of %d", n, addResult(k, arg))
	}
	return nil
}

// history plays steps of several processes and of a hostile neighbour, one after the other, as drawn.
func history(rt *rapid.T, processes []*executor.Executor, hostile []func()) error {
	n := rapid.IntRange(10, 60).Draw(rt, "steps")
	for i := range n {
		if rapid.IntRange(0, 4).Draw(rt, "who") == 0 {
			hostile[rapid.IntRange(0, len(hostile)-1).Draw(rt, "hostile")]()
			continue
		}
		p := rapid.IntRange(0, len(processes)-1).Draw(rt, "process")
		step := modelSteps[rapid.IntRange(0, len(modelSteps)-1).Draw(rt, "step")]
		texts := rapid.SliceOfN(rapid.IntRange(0, modelTexts-1), 1, 4).Draw(rt, "texts")
		if err := step.do(context.Background(), processes[p], texts); err != nil {
			return fmt.Errorf("step %d, process %d, %s of %v: %w", i, p, step.name, texts, err)
		}
	}
	return nil
}

// scriptedWorld is a raw pooler that is played, three processes behind it that share their names, and who does them harm.
func scriptedWorld(t *testing.T, change func(*executor.Executor)) (processes []*executor.Executor, hostile []func(), end func()) {
	b := pgscript.New(t, pgscript.Options{Kind: pgscript.Raw, Servers: 3})
	for k := range modelTexts {
		b.Define(addText(k), pgscript.Statement{
			Params: []uint32{23}, Columns: []pgscript.Column{{Name: "n", OID: 23}}, Tag: "SELECT 1",
			Rows: func(args []string) [][]string {
				arg, _ := strconv.Atoi(args[0])
				return [][]string{{strconv.Itoa(addResult(k, arg))}}
			},
		})
	}
	b.Define(divides, pgscript.Statement{
		Params: []uint32{23}, Columns: []pgscript.Column{{Name: "n", OID: 23}}, Tag: "SELECT 1",
		Fail: func(at pgscript.Step) *pgproto3.ErrorResponse {
			if at != pgscript.Execute {
				return nil
			}
			return pgscript.ServerError("22012", "division by zero", "int4div")
		},
	})
	var pools []*pgxpool.Pool
	for range 3 {
		cfg, err := pgxpool.ParseConfig(pgscript.URL)
		if err != nil {
			t.Fatal(err)
		}
		b.Use(cfg.ConnConfig)
		cfg.MaxConns = 1
		pool, err := pgxpool.NewWithConfig(context.Background(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		pools = append(pools, pool)
		ex, err := executor.New(pool, executor.Config{
			PreparedStatements: executor.Shared, StatementCapacity: 4, ReprobeAfter: -1, Logger: slog.New(slog.DiscardHandler),
		})
		if err != nil {
			t.Fatal(err)
		}
		change(ex)
		processes = append(processes, ex)
	}
	abandon := func() { // a client that goes in the middle of a transaction: the pooler replaces the server connection
		c, err := pgx.ConnectConfig(context.Background(), b.ConnConfig(t))
		if err != nil {
			t.Fatal(err)
		}
		_, _ = c.PgConn().ExecParams(context.Background(), "begin", nil, nil, nil, nil).Close()
		_ = c.Close(context.Background())
	}
	return processes, []func(){b.ForgetNames, abandon}, func() {
		for i, ex := range processes {
			_ = ex.Close(context.Background())
			pools[i].Close()
		}
		b.Close()
	}
}

// TestSharedNamesHoldWhateverNeighboursDo draws histories of several processes, servers, evictions, failed transactions and neighbours, on a raw
// pooler that is played: nobody sees an error or a wrong row, in transactions that nobody can run again either.
func TestSharedNamesHoldWhateverNeighboursDo(t *testing.T) {
	t.Parallel()
	var shared, histories int64
	rapid.Check(t, func(rt *rapid.T) {
		processes, hostile, end := scriptedWorld(t, func(*executor.Executor) {})
		defer end()
		if err := history(rt, processes, hostile); err != nil {
			rt.Fatal(err)
		}
		histories++
		for _, ex := range processes {
			shared += ex.Stats().Shared
		}
	})
	if shared < 10*histories {
		t.Errorf("%d executions by shared names in %d histories", shared, histories)
	}
	t.Logf("%d histories, %d executions by shared names", histories, shared)
}

// TestSharedNamesDoNotHoldWithoutMarks is the control: with one rule taken away the same histories fail.
func TestSharedNamesDoNotHoldWithoutMarks(t *testing.T) {
	t.Parallel()
	failed := 0
	for seed := range 60 {
		err := func() (err error) {
			processes, hostile, end := scriptedWorld(t, (*executor.Executor).IgnoreMarks)
			defer end()
			_ = rapid.Custom(func(rt *rapid.T) int {
				err = history(rt, processes, hostile)
				return 0
			}).Example(seed)
			return err
		}()
		var lost *executor.PreparedStatementError
		switch {
		case errors.As(err, &lost):
			failed++
		case err != nil:
			t.Fatal(err)
		}
	}
	if failed == 0 {
		t.Error("the marks are good for nothing")
	}
	t.Logf("%d of 60 histories lost a statement", failed)
}

// TestSharedNamesHoldOnRealPoolers is the same on servers, with everybody at work at the same time.
func TestSharedNamesHoldOnRealPoolers(t *testing.T) {
	t.Parallel()
	for _, version := range []string{"1.15", "1.18", "1.26"} {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			st := place.New(place.TransactionRaw, version, "").Start(t, func(o *pgbouncer.Options) { o.PoolSize = 3 })
			steps := 150
			if testing.Short() {
				steps = 40
			}
			var wg, all sync.WaitGroup
			done := make(chan struct{})
			var executions, harm atomic.Int64
			for p := range 4 {
				ex := newExecutor(t, newPool(t, st.URL, maxConns(2)), executor.Config{PreparedStatements: executor.Shared, StatementCapacity: 4})
				wg.Go(func() {
					for i := range steps {
						step := modelSteps[(i*(p+1)+p)%len(modelSteps)]
						texts := []int{(i + p) % modelTexts, (i * 5) % modelTexts, (i * 7 * (p + 1)) % modelTexts}
						if err := step.do(t.Context(), ex, texts); err != nil {
							t.Errorf("process %d, step %d, %s of %v: %v", p, i, step.name, texts, err)
							return
						}
					}
					executions.Add(ex.Stats().Shared)
				})
			}
			neighbour := connect(t, st.URL)
			all.Go(func() {
				for i := 0; ; i++ {
					select {
					case <-done:
						return
					default:
					}
					sql := []string{"deallocate all", "discard all", takeAway, "prepare a_name_of_its_own as select 1", "select pg_sleep(0.002)"}[i%5]
					if _, err := neighbour.Exec(context.Background(), sql, pgx.QueryExecModeSimpleProtocol); err != nil && !isCode(err, "42P05") {
						t.Errorf("%s: %v", sql, err)
						return
					}
					if i%40 == 39 && version != "1.15" {
						if _, err := st.Bouncer.Admin("reconnect"); err != nil { // every server connection anew
							t.Error(err)
						}
					}
					harm.Add(1)
				}
			})
			wg.Wait()
			close(done)
			all.Wait()
			if executions.Load() == 0 || harm.Load() < 20 {
				t.Errorf("%d executions by shared names, %d acts of the neighbour", executions.Load(), harm.Load())
			}
			t.Logf("%d executions by shared names, %d acts of the neighbour", executions.Load(), harm.Load())
		})
	}
}
