package executor_test

import (
	"context"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/prepare"
	"github.com/bounceproof/bounceproof/testenv/place"
)

// A batch is one transaction that a lost statement takes back as a whole, unless something in it has committed on the way: a COMMIT that
// does not look like one, or a procedure that commits. Then it must not be sent again.
func TestBatchWithACommitInsideIsNotSentAgain(t *testing.T) {
	t.Parallel()
	s := place.New(place.Direct, "", "15").Start(t)
	admin := connect(t, s.DB.URL)
	mustExec(t, admin, "create table runs (n int); create procedure committing() language plpgsql as 'begin commit; end'")
	for _, ending := range []string{
		"select 1", "commit", "end", "/* not first */ commit", "-- nor here\ncommit", "call committing()", "do $$ begin commit; end $$", "vacuum runs",
		"create index concurrently on runs (n)",
	} {
		pool := newPool(t, s.URL, maxConns(1))
		ex := newExecutor(t, pool, executor.Config{})
		const insert, lost = "insert into runs values ($1)", "select $1::int4"
		for range 2 {
			if _, err := ex.Exec(t.Context(), lost, prepare.Stable, 1); err != nil {
				t.Fatal(err)
			}
		}
		mustExec(t, admin, "truncate runs")
		if _, err := ex.Exec(t.Context(), insert, prepare.Stable, 0); err != nil {
			t.Fatal(err)
		}
		if _, err := pool.Exec(t.Context(), "deallocate "+prepare.Name(lost, []uint32{23}, "")); err != nil {
			t.Fatal(err)
		}
		var b pgx.Batch
		b.Queue(insert, prepare.Stable, 1)
		b.Queue(ending)
		b.Queue(lost, prepare.Stable, 1)
		err := ex.SendBatch(t.Context(), &b).Close()
		n := one(t, admin, "select count(*) from runs where n = 1")
		if n != "1" && (n != "0" || err == nil) {
			t.Errorf("%q in a batch: the insert stands %s times, %v", ending, n, err)
		}
		// Only what is sure to be taken back is sent again.
		if retries := ex.Stats().Retries; (retries == 1) != (ending == "select 1") {
			t.Errorf("%q in a batch: %d retries, %v", ending, retries, err)
		}

		if ending == "commit" || ending == "end" || strings.HasSuffix(ending, " commit") || strings.HasSuffix(ending, "\ncommit") {
			pool.Close()
			continue // nobody queues that
		}
		mustExec(t, admin, "truncate runs")
		if _, err := pool.Exec(t.Context(), "deallocate all"); err != nil {
			t.Fatal(err)
		}
		err = ex.InTx(t.Context(), pgx.TxOptions{}, func(_ context.Context, tx executor.Tx) error {
			tx.Queue(insert, prepare.Stable, 1)
			tx.Queue(ending)
			tx.Queue(lost, prepare.Stable, 1)
			return nil
		})
		n = one(t, admin, "select count(*) from runs where n = 1")
		if (err == nil) != (n == "1") || n != "0" && n != "1" {
			t.Errorf("%q in a queue: the insert stands %s times, %v", ending, n, err)
		}
		pool.Close()
	}
}
