package executor_test

import (
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/prepare"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

func TestAnEndedTransactionTakesNothingIntoItsQueue(t *testing.T) {
	t.Parallel()
	db := postgres.Start(t, postgres.Options{}).NewDatabase(t)
	ex := newExecutor(t, newPool(t, db.URL), executor.Config{})
	for _, nested := range []bool{false, true} {
		outer, err := ex.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		ended := outer
		if nested {
			if ended, err = outer.Begin(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		if err := ended.(executor.Tx).Queue("select 1", prepare.Stable); err != nil {
			t.Fatalf("nested %v: an open transaction's queue: %v", nested, err)
		}
		if err := ended.Commit(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := ended.(executor.Tx).Queue("select 1", prepare.Stable); !errors.Is(err, pgx.ErrTxClosed) {
			t.Errorf("nested %v: an ended transaction's queue: %v", nested, err)
		}
		_ = outer.Rollback(t.Context())
	}
}
