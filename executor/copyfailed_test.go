package executor_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/internal/await"
	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
	"github.com/bounceproof/bounceproof/testenv/place"
)

// duplicates is a COPY of many rows that the server refuses at the tenth, while most are still on their way.
func duplicates() pgx.CopyFromSource {
	return pgx.CopyFromSlice(50_000, func(i int) ([]any, error) {
		if i == 10 {
			i = 9
		}
		return []any{i, "a text that makes the row a little longer than it has to be"}, nil
	})
}

// copyInto copies into the table of the tests here.
func copyInto(ctx context.Context, into interface {
	CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, src pgx.CopyFromSource) (int64, error)
}, src pgx.CopyFromSource,
) error {
	_, err := into.CopyFrom(ctx, pgx.Identifier{"copied"}, []string{"id", "v"}, src)
	return err
}

// errSource is what a source fails with.
var errSource = errors.New("no more of them")

// failedCopies are the ways in which a COPY fails. Each leaves its connection in the pool's hands.
var failedCopies = map[string]func(ctx context.Context, ex *executor.Executor) error{
	"alone": func(ctx context.Context, ex *executor.Executor) error {
		return copyInto(ctx, ex, duplicates())
	},
	"transaction": func(ctx context.Context, ex *executor.Executor) error {
		return ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error { return copyInto(ctx, tx, duplicates()) })
	},
	"behind a statement": func(ctx context.Context, ex *executor.Executor) error {
		return ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
			if _, err := tx.Exec(ctx, "select 1"); err != nil {
				return err
			}
			return copyInto(ctx, tx, duplicates())
		})
	},
	"the error is dropped": func(ctx context.Context, ex *executor.Executor) error {
		err := ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
			_ = copyInto(ctx, tx, duplicates())
			return nil
		})
		if !errors.Is(err, pgx.ErrTxCommitRollback) {
			return fmt.Errorf("commit says %w", err)
		}
		return err
	},
	"savepoint, rolled back": func(ctx context.Context, ex *executor.Executor) error {
		var copyErr error
		err := ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
			nested, err := tx.Begin(ctx)
			if err != nil {
				return err
			}
			copyErr = copyInto(ctx, nested, duplicates())
			if err := nested.Rollback(ctx); err != nil {
				return fmt.Errorf("rollback to savepoint: %w", err)
			}
			_, err = tx.Exec(ctx, "insert into copied values (-1)")
			return err
		})
		if err != nil {
			panic(err) // what was rolled back is no concern of the rest
		}
		return copyErr
	},
	"two savepoints": func(ctx context.Context, ex *executor.Executor) error {
		return ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
			outer, err := tx.Begin(ctx)
			if err != nil {
				return err
			}
			inner, err := outer.Begin(ctx)
			if err != nil {
				return err
			}
			return copyInto(ctx, inner, duplicates())
		})
	},
	"the source fails": func(ctx context.Context, ex *executor.Executor) error {
		return ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
			n := 0
			return copyInto(ctx, tx, pgx.CopyFromFunc(func() ([]any, error) {
				if n++; n > 20_000 {
					return nil, errSource
				}
				return []any{n, "a text that makes the row a little longer than it has to be"}, nil
			}))
		})
	},
	"of a table that is not there": func(ctx context.Context, ex *executor.Executor) error {
		return ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
			_, err := tx.CopyFrom(ctx, pgx.Identifier{"nowhere"}, []string{"id"}, pgx.CopyFromRows([][]any{{1}}))
			return err
		})
	},
}

// oneServer gives a pooler one server connection, which is lost to everybody else when one client keeps it.
func oneServer(o *pgbouncer.Options) {
	o.PoolSize = 1
	o.Settings = map[string]string{"query_wait_timeout": "3"}
}

// everyVersion is a transaction pooler of each version, the newest in both ways.
func everyVersion() []place.Place {
	return append(place.Suites(place.TransactionRaw), place.New(place.TransactionTracked, "1.26", "18"))
}

func TestAFailedCopyGivesTheServerBack(t *testing.T) {
	t.Parallel()
	for _, p := range everyVersion() {
		r := p.Start(t, oneServer)
		admin := connect(t, r.DB.URL)
		mustExec(t, admin, "create table copied (id int primary key, v text)")
		ex := newExecutor(t, newPool(t, r.URL, maxConns(1)), executor.Config{})
		for name, fails := range failedCopies {
			t.Run(p.String()+"/"+name, func(t *testing.T) {
				for range 3 {
					ctx, cancel := context.WithTimeout(t.Context(), await.Deadline)
					err := fails(ctx, ex)
					if cancel(); err == nil || ctx.Err() != nil && !errors.Is(ctx.Err(), context.Canceled) {
						t.Fatal("the copy did not fail as it was to:", err)
					}
					// The connection of the executor stays open meanwhile, if it is to.
					ctx, cancel = context.WithTimeout(t.Context(), await.Deadline)
					t.Cleanup(cancel)
					other, err := pgx.Connect(ctx, r.URL)
					if err != nil {
						t.Fatal("somebody else gets no server:", err)
					}
					var n int
					err = other.QueryRow(ctx, "select 7", pgx.QueryExecModeSimpleProtocol).Scan(&n)
					if err != nil || n != 7 {
						t.Fatal("somebody else gets no server:", n, err)
					}
					_ = other.Close(t.Context())
					mustExec(t, admin, "truncate copied")
					if err := copyInto(t.Context(), ex, pgx.CopyFromRows([][]any{{1, "a"}})); err != nil {
						t.Fatal("the next copy:", err)
					}
					mustExec(t, admin, "truncate copied")
				}
			})
		}
	}
}

// What the connection would do if it stayed open: if nobody loses a server then, the test above shows nothing.
func TestBarePgxLosesAServerToAFailedCopy(t *testing.T) {
	t.Parallel()
	r := place.New(place.TransactionRaw, "1.24", "17").Start(t, oneServer)
	mustExec(t, connect(t, r.DB.URL), "create table copied (id int primary key, v text)")
	pool := newPool(t, r.URL, maxConns(1), func(cfg *pgxpool.Config) { cfg.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec })
	for range 20 { // how far the COPY is when the server refuses it is a matter of luck
		if err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error { return copyInto(t.Context(), tx, duplicates()) }); err == nil {
			t.Fatal("the copy did not fail")
		}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		t.Cleanup(cancel)
		other, err := pgx.Connect(ctx, r.URL)
		if err == nil {
			_, err = other.Exec(ctx, "select 7", pgx.QueryExecModeSimpleProtocol)
			_ = other.Close(ctx)
		}
		if err != nil {
			t.Log(err)
			return
		}
	}
	t.Error("somebody else gets the server all the same")
}
