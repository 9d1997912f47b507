package executor_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/testenv/place"
)

// columnsOf returns the names of the columns of a result.
func columnsOf(rows pgx.Rows, err error) (string, error) {
	if err != nil {
		return "", err
	}
	var names []string
	for _, f := range rows.FieldDescriptions() {
		names = append(names, f.Name)
	}
	rows.Close()
	return strings.Join(names, " "), rows.Err()
}

// What a caller asks for by its mode, pgx gives also inside a transaction after a migration. The modes that describe or know no types never fail
// there; a description that is kept may.
func TestAnExplicitModeCountsInATransactionAfterAMigration(t *testing.T) {
	t.Parallel()
	for _, p := range place.OneOfEachKind() {
		r := p.Start(t, fewServers)
		for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
			t.Run(fmt.Sprintf("%v/%v", p, mode), func(t *testing.T) {
				direct, url := newDatabase(t, r)
				admin := freshTable(t, direct)
				ex := newExecutor(t, newPool(t, url, maxConns(1)), executor.Config{})
				inTx := func() (one, batched string) {
					t.Helper()
					tx, err := ex.Begin(t.Context())
					if err != nil {
						t.Fatal(err)
					}
					defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
					if _, err := tx.Exec(t.Context(), "select 1"); err != nil {
						t.Fatal(err)
					}
					if one, err = columnsOf(tx.Query(t.Context(), migratedQuery, mode, 1)); err != nil {
						t.Fatal(err)
					}
					if mode != pgx.QueryExecModeDescribeExec {
						return one, one
					}
					b := &pgx.Batch{}
					b.Queue(migratedQuery+" -- in a batch", mode, 1)
					br := tx.SendBatch(t.Context(), b)
					if batched, err = columnsOf(br.Query()); err != nil {
						t.Fatal("batch:", err)
					}
					_ = br.Close()
					return one, batched
				}
				want := "id a b"
				for i := range 3 {
					learns := ex.Stats().Learns
					if one, batched := inTx(); one != want || batched != want {
						t.Fatalf("%q and %q, want %q", one, batched, want)
					}
					if n := ex.Stats().Learns - learns; mode == pgx.QueryExecModeDescribeExec && n < 2 {
						t.Errorf("%d descriptions, want one for each statement", n)
					}
					mustExec(t, admin, fmt.Sprintf("alter table t add c%d int", i))
					want += fmt.Sprintf(" c%d", i)
				}
			})
		}
	}
}
