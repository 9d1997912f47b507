package executor_test

import (
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/internal/pgscript"
	"github.com/bounceproof/bounceproof/prepare"
)

// nopTracer is every tracer pgx has.
type nopTracer struct{}

func (nopTracer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	return ctx
}
func (nopTracer) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}
func (nopTracer) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	return ctx
}
func (nopTracer) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}
func (nopTracer) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData)     {}
func (nopTracer) TracePrepareStart(ctx context.Context, _ *pgx.Conn, _ pgx.TracePrepareStartData) context.Context {
	return ctx
}
func (nopTracer) TracePrepareEnd(context.Context, *pgx.Conn, pgx.TracePrepareEndData) {}

// A statement that a pooler lost is run again on another connection. When there is none to be had the caller gets both errors, and every
// method of what it holds still answers.
func TestLostStatementAndNoOtherConnection(t *testing.T) {
	t.Parallel()
	traced := func(cfg *pgxpool.Config) { cfg.ConnConfig.Tracer = nopTracer{} }
	plain := func(*pgxpool.Config) {}
	for _, op := range countedCalls {
		for name, tracer := range map[string]func(*pgxpool.Config){"plain": plain, "traced": traced} {
			s, _ := newScripted(t, pgscript.Options{Kind: pgscript.Tracked}, executor.Config{}, tracer)
			if err := op.run(t.Context(), s.ex, op.sqls); err != nil {
				t.Fatal(err)
			}
			s.b.ForgetNames()
			s.b.Reset()
			s.b.Call(pgscript.FromClient, 1, func() { s.b.Refuse(true) })
			err := op.run(t.Context(), s.ex, op.sqls)
			var pgErr *pgconn.PgError
			var connectErr *pgconn.ConnectError
			var lost *executor.PreparedStatementError
			switch {
			case op.name == "Exec without arguments": // has no prepared statement to lose
				if err != nil {
					t.Errorf("%s, %s: %v", op.name, name, err)
				}
			case op.name == "batch that begins a transaction": // is not run again, so it asks for no other connection
				if !errors.As(err, &lost) || !lost.InTx {
					t.Errorf("%s, %s: %v", op.name, name, err)
				}
			case !errors.As(err, &pgErr) || !errors.As(err, &connectErr) || errors.Is(err, executor.ErrCommitUnknown) || errors.Is(err, errWrong):
				t.Errorf("%s, %s: %v", op.name, name, err)
			}
			for _, sql := range op.sqls {
				if op.name != "Exec without arguments" && s.b.Ran(sql) != 0 {
					t.Errorf("%s, %s: executed", op.name, name)
				}
			}
			s.b.Refuse(false)
			if err := s.sane(t.Context()); err != nil {
				t.Errorf("%s, %s: %v", op.name, name, err)
			}
		}
	}
}

// The same in a transaction whose owner goes on as if nothing had been.
func TestTransactionWithoutAConnectionAnswers(t *testing.T) {
	t.Parallel()
	for _, sc := range []scene{scenes[1], scenes[3]} {
		for what, use := range map[string]func(ctx context.Context, tx executor.Tx) error{
			"Exec": func(ctx context.Context, tx executor.Tx) error {
				_, err := tx.Exec(ctx, insertA, prepare.Stable, 1)
				return err
			},
			"Exec, simple": func(ctx context.Context, tx executor.Tx) error {
				_, err := tx.Exec(ctx, "insert into c values (1)")
				return err
			},
			"Query": func(ctx context.Context, tx executor.Tx) error {
				rows, err := tx.Query(ctx, "select $1", 1)
				rows.Close()
				return err
			},
			"QueryRow": func(ctx context.Context, tx executor.Tx) error {
				var n int
				return tx.QueryRow(ctx, "select $1", prepare.Stable, 1).Scan(&n)
			},
			"SendBatch": func(ctx context.Context, tx executor.Tx) error {
				var b pgx.Batch
				b.Queue(insertA, 1)
				return tx.SendBatch(ctx, &b).Close()
			},
			"CopyFrom": func(ctx context.Context, tx executor.Tx) error {
				_, err := tx.CopyFrom(ctx, pgx.Identifier{"t"}, []string{"n"}, pgx.CopyFromRows([][]any{{1}}))
				return err
			},
			"Prepare": func(ctx context.Context, tx executor.Tx) error {
				_, err := tx.Prepare(ctx, "x", "select 5, $1")
				return err
			},
			"LargeObjects": func(ctx context.Context, tx executor.Tx) error {
				lo := tx.LargeObjects()
				_, err := lo.Create(ctx, 0)
				return err
			},
			"Conn": func(ctx context.Context, tx executor.Tx) error { return tx.Conn().Ping(ctx) },
			"nested": func(ctx context.Context, tx executor.Tx) error {
				sp, err := tx.Begin(ctx)
				if err != nil {
					return err
				}
				_, err = sp.Exec(ctx, insertA, prepare.Stable, 1)
				return errors.Join(err, sp.Rollback(ctx))
			},
			"Commit": func(ctx context.Context, tx executor.Tx) error { return tx.Commit(ctx) },
			"Commit with a queue": func(ctx context.Context, tx executor.Tx) error {
				tx.Queue(insertB, prepare.Stable, 1)
				return tx.Commit(ctx)
			},
		} {
			s, _ := newScripted(t, sc.o, executor.Config{PreparedStatements: sc.policy}, func(cfg *pgxpool.Config) { cfg.ConnConfig.Tracer = nopTracer{} })
			for range 3 {
				if o := inTx(t.Context(), s.ex, pgx.TxOptions{}, []string{insertA}, nil); o.err != nil {
					t.Fatal(o.err)
				}
			}
			s.b.Define(insertA, pgscript.Statement{
				Params: []uint32{23}, Tag: "INSERT 0 1", Fail: pgscript.FailTimes(pgscript.Execute, 1, pgscript.PoolerError("prepared statement did not exist")),
			})
			s.b.Reset()
			tx, err := s.ex.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			etx, ok := tx.(executor.Tx)
			if !ok {
				t.Fatalf("%T", tx)
			}
			s.b.Call(pgscript.FromClient, 1, func() { s.b.Refuse(true) })
			if _, err := tx.Exec(t.Context(), insertA, prepare.Stable, 1); err == nil {
				t.Fatal(sc.name, "no error")
			}
			if err := use(t.Context(), etx); err == nil || errors.Is(err, executor.ErrCommitUnknown) {
				t.Errorf("%s, %s: %v", sc.name, what, err)
			}
			_ = tx.Rollback(t.Context())
			if s.b.Committed(insertA)+s.b.Committed(insertB) != 0 {
				t.Errorf("%s, %s: committed", sc.name, what)
			}
			s.b.Refuse(false)
			if err := s.sane(t.Context()); err != nil {
				t.Errorf("%s, %s: %v", sc.name, what, err)
			}
		}
	}
}
