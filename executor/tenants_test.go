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

// setPaths are the ways in which a transaction comes to a tenant's schema.
var setPaths = map[string]func(ctx context.Context, tx pgx.Tx, schema string) error{
	"set local": func(ctx context.Context, tx pgx.Tx, schema string) error {
		_, err := tx.Exec(ctx, "set local search_path to "+schema)
		return err
	},
	"set_config": func(ctx context.Context, tx pgx.Tx, schema string) error {
		_, err := tx.Exec(ctx, "select set_config('search_path', $1, true)", schema)
		return err
	},
}

// A schema for each tenant, with the same tables and an enum type of its own: the same text means other types. It is run again once for a text,
// and not at all from then on.
func TestASchemaForEachTenantIsLearntByItself(t *testing.T) {
	t.Parallel()
	for _, p := range place.OneOfEachKind() {
		r := p.Start(t, fewServers)
		for name, set := range setPaths {
			t.Run(fmt.Sprintf("%v/%s", p, name), func(t *testing.T) {
				direct, url := newDatabase(t, r)
				admin := connect(t, direct)
				tenants := []string{"tenant_a", "tenant_b", "tenant_c"}
				for _, schema := range tenants {
					mustExec(t, admin, fmt.Sprintf("create schema %[1]s; create type %[1]s.mood as enum ('ok', '%[1]s'); create table %[1]s.t (id int, m %[1]s.mood)", schema))
				}
				ex := newExecutor(t, newPool(t, url, maxConns(2)), executor.Config{})
				work := func(ctx context.Context, tx pgx.Tx, schema string) error {
					if err := set(ctx, tx, schema); err != nil {
						return err
					}
					if _, err := tx.Exec(ctx, "insert into t values ($1, $2)", prepare.Stable, 1, schema); err != nil {
						return err
					}
					var got string
					err := tx.QueryRow(ctx, "select m from t where m = $1 limit 1", prepare.Stable, schema).Scan(&got)
					if err == nil && got != schema {
						err = errors.New("another tenant's row: " + got)
					}
					return err
				}
				for i := range 30 {
					schema := tenants[i%3]
					before := ex.Stats()
					err := ex.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error { return work(ctx, tx, schema) })
					if err != nil {
						t.Fatalf("%d, %s: %v", i, schema, err)
					}
					if n := ex.Stats(); i >= 6 && (n.Retries != before.Retries || n.Learns != before.Learns) {
						t.Errorf("%d, %s: run or learnt again: %+v, then %+v", i, schema, before, n)
					}
				}
				// And where nobody can run it again.
				for i := range 6 {
					if err := pgx.BeginFunc(t.Context(), ex, func(tx pgx.Tx) error { return work(t.Context(), tx, tenants[i%3]) }); err != nil {
						t.Errorf("Begin, %s: %v", tenants[i%3], err)
					}
				}
				for _, schema := range tenants {
					if n := one(t, admin, "select count(*) from "+schema+".t"); n != "12" {
						t.Errorf("%s: %s rows, want 12", schema, n)
					}
				}
			})
		}
	}
}
