package executor_test

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/prepare"
)

// manyTexts are texts whose columns change with the table.
func manyTexts() []string {
	var out []string
	for i := range 6 {
		out = append(out, fmt.Sprintf("select * from t where id = $1 and %d = %d", i, i))
	}
	return out
}

// column reads the column a of the only row as text.
func columnA(rows pgx.Rows) (string, error) {
	m, err := pgx.CollectExactlyOneRow(rows, pgx.RowToMap)
	if err != nil {
		return "", err
	}
	return fmt.Sprint(m["a"]), nil
}

// manyAtOnce are the requests that hold several statements, and the transactions that do. Each checks the column a where it reads it.
var manyAtOnce = map[string]func(ctx context.Context, ex *executor.Executor, want string) error{
	"batch, closed": func(ctx context.Context, ex *executor.Executor, _ string) error {
		return ex.SendBatch(ctx, batchOf(manyTexts())).Close()
	},
	"batch": func(ctx context.Context, ex *executor.Executor, want string) error {
		return readBatch(ex.SendBatch(ctx, batchOf(manyTexts())), want)
	},
	"batch in a transaction": func(ctx context.Context, ex *executor.Executor, want string) error {
		return ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
			if _, err := tx.Exec(ctx, "select 1"); err != nil {
				return err
			}
			return readBatch(tx.SendBatch(ctx, batchOf(manyTexts())), want)
		})
	},
	"batch first in a transaction": func(ctx context.Context, ex *executor.Executor, want string) error {
		return ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
			return readBatch(tx.SendBatch(ctx, batchOf(manyTexts())), want)
		})
	},
	"queue": func(ctx context.Context, ex *executor.Executor, _ string) error {
		return ex.InTx(ctx, pgx.TxOptions{}, func(_ context.Context, tx executor.Tx) error { return queueAll(tx) })
	},
	"queue behind a statement": func(ctx context.Context, ex *executor.Executor, _ string) error {
		return ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
			if _, err := tx.Exec(ctx, "select 1"); err != nil {
				return err
			}
			return queueAll(tx)
		})
	},
	"transaction": func(ctx context.Context, ex *executor.Executor, want string) error {
		return ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
			if _, err := tx.Exec(ctx, "select 1"); err != nil {
				return err
			}
			for _, sql := range manyTexts() {
				rows, err := tx.Query(ctx, sql, prepare.Stable, 1)
				if err != nil {
					return err
				}
				if got, err := columnA(rows); err != nil || got != want {
					return fmt.Errorf("%s: %q, %w", sql, got, err)
				}
			}
			return nil
		})
	},
}

func batchOf(sqls []string) *pgx.Batch {
	b := &pgx.Batch{}
	for _, sql := range sqls {
		b.Queue(sql, prepare.Stable, 1)
	}
	return b
}

func readBatch(br pgx.BatchResults, want string) error {
	defer func() { _ = br.Close() }()
	for _, sql := range manyTexts() {
		rows, err := br.Query()
		if err != nil {
			return err
		}
		if got, err := columnA(rows); err != nil || got != want {
			return fmt.Errorf("%s: %q, %w", sql, got, err)
		}
	}
	return br.Close()
}

func queueAll(tx executor.Tx) error {
	for _, sql := range manyTexts() {
		if err := tx.Queue(sql, prepare.Stable, 1); err != nil {
			return err
		}
	}
	return nil
}
