package executor_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/prepare"
	"github.com/bounceproof/bounceproof/testenv/place"
)

func TestABeginQueryOfTheCallersOwn(t *testing.T) {
	t.Parallel()
	_, ex, c := numbers(t, 1, executor.Config{})
	if _, err := ex.BeginTx(t.Context(), pgx.TxOptions{BeginQuery: "begin transaction nonsense"}); err == nil {
		t.Error("no error, unlike in pgx")
	}
	opts := pgx.TxOptions{BeginQuery: "begin; set local work_mem = '7MB'", CommitQuery: "insert into t values (3); commit"}
	var mem string
	err := ex.InTx(t.Context(), opts, func(ctx context.Context, tx executor.Tx) error {
		if err := tx.Queue(insertNumber, 1); err != nil {
			return err
		}
		return tx.QueryRow(ctx, "show work_mem").Scan(&mem)
	})
	if err != nil || mem != "7MB" || rowsIn(t, c) != 2 {
		t.Errorf("%v, work_mem %s, %d rows; want 7MB and 2", err, mem, rowsIn(t, c))
	}
}

func TestTwoExecutorsShareAPool(t *testing.T) {
	t.Parallel()
	s, ex, _ := numbers(t, 1, executor.Config{})
	pool := ex.Pool()
	off := newExecutor(t, pool, executor.Config{PreparedStatements: executor.Off})
	for range 20 {
		for _, x := range []*executor.Executor{ex, off} {
			if _, err := x.Exec(t.Context(), insertNumber, prepare.Stable, 1); err != nil {
				t.Fatal(s, err)
			}
		}
	}
	if n := ex.Stats().Parses; n != 1 {
		t.Errorf("%d parses, want 1", n)
	}
}

func TestANameThatIsLearntAgainIsNotClosed(t *testing.T) {
	t.Parallel()
	_, ex, _ := numbers(t, 1, executor.Config{StatementCapacity: 2})
	texts := []string{"select 1 + $1::int", "select 2 + $1::int", "select 3 + $1::int"}
	use := func(texts ...string) {
		t.Helper()
		var b pgx.Batch
		for _, text := range texts {
			b.Queue(text, prepare.Stable, 1)
		}
		if err := ex.SendBatch(t.Context(), &b).Close(); err != nil {
			t.Fatal(err)
		}
	}
	for range 3 {
		use(texts[0])
		use(texts[1])
		use(texts[2], texts[0]) // the first evicts, the second is learnt again in the same group
		use(texts[0])
	}
	if st := ex.Stats(); st.Retries != 0 || st.Downgrades != 0 {
		t.Errorf("%+v", st)
	}
}

func TestStatementsThatNeedABlockGetOne(t *testing.T) {
	t.Parallel()
	_, ex, c := numbers(t, 1, executor.Config{})
	for i, text := range []string{"lock table t in share mode", "savepoint a", "declare c cursor for select 1", "set local work_mem = '7MB'"} {
		err := ex.InTx(t.Context(), pgx.TxOptions{}, func(_ context.Context, tx executor.Tx) error {
			return errors.Join(tx.Queue(text, prepare.Stable), tx.Queue(insertNumber, prepare.Stable, i))
		})
		if err != nil || rowsIn(t, c) != i+1 {
			t.Errorf("%s: %v, %d rows", text, err, rowsIn(t, c))
		}
	}
}

func TestDeallocateInATransactionIsNoticed(t *testing.T) {
	t.Parallel()
	_, ex, _ := numbers(t, 1, executor.Config{})
	for range 2 {
		err := ex.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
			if _, err := tx.Exec(ctx, insertNumber, prepare.Stable, 1); err != nil {
				return err
			}
			if _, err := tx.Exec(ctx, "deallocate all"); err != nil {
				return err
			}
			_, err := tx.Exec(ctx, insertNumber, prepare.Stable, 1)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if st := ex.Stats(); st.Retries != 0 || st.Downgrades != 0 {
		t.Errorf("%+v", st)
	}
}

func TestCopyToStdoutIsReadPast(t *testing.T) {
	t.Parallel()
	for _, p := range place.OneOfEachKind() {
		s := p.Start(t)
		ex := newExecutor(t, newPool(t, s.URL, maxConns(1)), executor.Config{})
		for range 2 {
			err := ex.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
				rows, err := tx.Query(ctx, "copy (select 1) to stdout")
				if err != nil {
					return err
				}
				rows.Close()
				if got := rows.CommandTag().String(); got != "COPY 1" {
					return fmt.Errorf("tag %q", got)
				}
				return rows.Err()
			})
			if err != nil {
				t.Errorf("%v: %v", p, err)
			}
		}
	}
}
