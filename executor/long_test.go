package executor_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/prepare"
	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
	"github.com/bounceproof/bounceproof/testenv/place"
)

// trackingVersions returns the places behind a PgBouncer that tracks statements.
func trackingVersions() []place.Place {
	return []place.Place{place.New(place.TransactionTracked, "1.24", "17"), place.New(place.TransactionTracked, "1.26", "18")}
}

func sum(k int) string { return fmt.Sprintf("select $1::int4 + %d as sum", k) }

// PgBouncer answers Close itself, and Parse too where its server has the statement, and puts that into the middle of an answer that it has not
// received as a whole. Each item has the right value all the same.
func TestALongBatchOfNewTextsBehindATrackingPooler(t *testing.T) {
	t.Parallel()
	for _, p := range trackingVersions() {
		for _, tracked := range []int{200, 5000} {
			r := p.Start(t, func(o *pgbouncer.Options) { o.MaxPreparedStatements = tracked })
			ex := newExecutor(t, newPool(t, r.URL, maxConns(1)), executor.Config{})
			for _, n := range []int{1, 18, 64, 201, 3000} {
				// The second round finds some names known to the connection, others to the server alone, and some to neither.
				for round := range 2 {
					var b pgx.Batch
					for i := range n {
						b.Queue(sum(i), prepare.Stable, i)
					}
					ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
					br := ex.SendBatch(ctx, &b)
					for i := range n {
						var got int
						if err := br.QueryRow().Scan(&got); err != nil || got != 2*i {
							t.Errorf("%v, %d tracked: item %d of %d, round %d: %d, %v", p, tracked, i, n, round, got, err)
							break
						}
					}
					if err := br.Close(); err != nil {
						t.Errorf("%v, %d tracked: %d items, round %d: %v", p, tracked, n, round, err)
					}
					cancel()
				}
				if n == 201 {
					ex.Pool().Reset() // what follows meets a server that has the names, and a connection that has not
				}
			}
		}
	}
}

// The control of the test above: Close and Parse in front of each item break the answer.
func TestCloseAmongOtherAnswersBreaksPgBouncer(t *testing.T) {
	t.Parallel()
	for _, p := range trackingVersions() {
		const n = 3000
		if err := closeAmongAnswers(t, p.Start(t).URL, n); err == nil {
			t.Errorf("%v answers %d times Close, Parse and Execute in a row as it should: is what avoids that still needed?", p, n)
		}
	}
}

func closeAmongAnswers(t *testing.T, url string, n int) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	pipe := connect(t, url).PgConn().StartPipeline(ctx)
	for i := range n {
		name := fmt.Sprint("s", i)
		pipe.SendDeallocate(name)
		pipe.SendPrepare(name, sum(i), nil)
		pipe.SendQueryPrepared(name, [][]byte{[]byte("1")}, nil, nil)
	}
	err := pipe.Sync()
	for err == nil {
		var res any
		if res, err = pipe.GetResults(); res == nil {
			break
		}
		if rr, ok := res.(*pgconn.ResultReader); ok && err == nil {
			_, err = rr.Close()
		}
	}
	return errors.Join(err, pipe.Close())
}
