package executor_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/prepare"
	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

func TestSmoke(t *testing.T) {
	s := postgres.Start(t, postgres.Options{})
	db := s.NewDatabase(t)
	urls := map[string]string{"direct": db.URL}
	b := pgbouncer.Start(t, s, pgbouncer.Options{PoolSize: 2})
	urls["pooled"] = b.URL(db.Name)
	for name, url := range urls {
		for _, ps := range []executor.PreparedStatements{executor.Auto, executor.On, executor.Off, executor.Shared} {
			if name == "pooled" && ps == executor.On {
				continue
			}
			t.Run(fmt.Sprint(name, "/", ps), func(t *testing.T) {
				ctx := t.Context()
				pool := newPool(t, url)
				ex := newExecutor(t, pool, executor.Config{PreparedStatements: ps})
				if _, err := ex.Exec(ctx, "drop table if exists t; create table t(id int primary key, v jsonb); insert into t values (1, '{}')"); err != nil {
					t.Fatal(err)
				}
				for i := range 10 {
					var v []byte
					if err := ex.QueryRow(ctx, "select v from t where id=$1", prepare.Stable, 1).Scan(&v); err != nil {
						t.Fatal(i, err)
					}
					if _, err := ex.Exec(ctx, "update t set v=$2 where id=$1", 1, map[string]int{"a": i}); err != nil {
						t.Fatal(err)
					}
					err := ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
						tx.Queue("update t set v=$2 where id=$1", prepare.Stable, 1, map[string]int{"b": i})
						if i%3 == 0 {
							return nil
						}
						var n int
						if err := tx.QueryRow(ctx, "select count(*) from t", prepare.Stable).Scan(&n); err != nil {
							return err
						}
						if i%3 == 1 {
							sp, _ := tx.Begin(ctx)
							if _, err := sp.Exec(ctx, "insert into t values($1,$2)", prepare.Stable, 1, map[string]int{}); err == nil {
								return fmt.Errorf("duplicate accepted")
							}
							return sp.Rollback(ctx)
						}
						return nil
					})
					if err != nil {
						t.Fatal(i, err)
					}
					var b pgx.Batch
					b.Queue("select v from t where id=$1", prepare.Stable, 1)
					b.Queue("select 1")
					b.Queue("update t set v=$2 where id=$1", prepare.Stable, 1, map[string]int{"c": i})
					br := ex.SendBatch(ctx, &b)
					if err := br.QueryRow().Scan(&v); err != nil {
						t.Fatal(err)
					}
					if string(v) != fmt.Sprintf(`{"b": %d}`, i) {
						t.Fatal(string(v))
					}
					if err := br.Close(); err != nil {
						t.Fatal(err)
					}
				}
				if n, err := ex.CopyFrom(ctx, pgx.Identifier{"t"}, []string{"id", "v"}, pgx.CopyFromRows([][]any{{5, map[string]int{"x": 1}}, {6, `{}`}})); n != 2 || err != nil {
					t.Fatal(n, err)
				}
				top, err := ex.Topology(ctx)
				t.Log(top, err, fmt.Sprintf("%+v", ex.Stats()))
			})
		}
	}
}
