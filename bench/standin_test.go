package bench

import (
	"context"
	"errors"
	"testing"

	"github.com/georgysavva/scany/v2/pgxscan"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/prepare"
	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

// TestLibrariesTakeAnExecutor runs scany and River behind a pooler that forwards names. scany takes an
// interface, River a *pgxpool.Pool by name, which the executor gives it, and any pgx.Tx.
func TestLibrariesTakeAnExecutor(t *testing.T) {
	s := postgres.Start(t, postgres.Options{Version: "15"})
	db := s.NewDatabase(t)
	bouncer := pgbouncer.Start(t, s, pgbouncer.Options{Version: "1.18", PoolSize: 4})
	ctx := t.Context()
	cfg, err := pgxpool.ParseConfig(bouncer.URL(db.Name))
	if err != nil {
		t.Fatal(err)
	}
	ex, err := executor.NewPool(ctx, cfg, executor.Config{Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ex.Close(context.Background()) }()

	type line struct{ N, Twice int }
	const lines = "select g as n, 2 * g as twice from generate_series(1, $1::int) g"
	for range 10 {
		var got []line
		if err := pgxscan.Select(ctx, ex, &got, lines, prepare.Stable, 3); err != nil || len(got) != 3 || got[2] != (line{3, 6}) {
			t.Fatalf("scany: %v, %v", got, err)
		}
	}
	err = ex.AcquireFunc(ctx, func(c *executor.Conn) error {
		var got line
		return pgxscan.Get(ctx, c, &got, lines, prepare.Stable, 1)
	})
	if err != nil {
		t.Errorf("scany on a Conn: %v", err)
	}

	migrator, err := rivermigrate.New(riverpgxv5.New(pool(t, db.URL, 2)), nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := migrator.Migrate(ctx, rivermigrate.DirectionUp, nil); err != nil {
		t.Fatal(err)
	}
	client, err := river.NewClient(riverpgxv5.New(ex.Pool()), &river.Config{Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	own := errors.New("own")
	for i, want := range []error{nil, own, nil} {
		err := ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
			if _, err := client.InsertTx(ctx, tx, riverArgs{N: i}, nil); err != nil {
				return err
			}
			return want
		})
		if !errors.Is(err, want) {
			t.Errorf("InsertTx: %v", err)
		}
	}
	var jobs int
	if err := ex.QueryRow(ctx, "select count(*) from river_job").Scan(&jobs); err != nil || jobs != 2 {
		t.Errorf("%d jobs of transactions that committed, %v", jobs, err)
	}
}
