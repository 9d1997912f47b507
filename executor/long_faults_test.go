package executor_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/internal/await"
	"github.com/bounceproof/bounceproof/prepare"
	"github.com/bounceproof/bounceproof/testenv/place"
)

// longOf is a batch of n statements, all stable, of as many texts; with at, item n/2 is that instead.
func longOf(n int, at string) *pgx.Batch {
	b := &pgx.Batch{}
	for i := range n {
		if text := sum(i); i != n/2 || at == "" {
			b.Queue(text, prepare.Stable, i)
		} else {
			b.Queue(at, prepare.Stable)
		}
	}
	return b
}

// readLong reads what longOf asks, and returns how many items had their own value, and the error of the next.
func readLong(br pgx.BatchResults, n int) (int, error) {
	for i := range n {
		var got int
		if err := br.QueryRow().Scan(&got); err != nil {
			return i, err
		}
		if got != 2*i {
			return i, fmt.Errorf("item %d has %d", i, got)
		}
	}
	return n, nil
}

// An error in the middle of a long batch: what is in front of it has its values, it has the error, and the connection goes on.
func TestAnErrorInTheMiddleOfALongBatch(t *testing.T) {
	t.Parallel()
	for _, p := range place.OneOfEachKind() {
		r := p.Start(t)
		admin := connect(t, r.DB.URL)
		mustExec(t, admin, "create table written (n int4)")
		pool := newPool(t, r.URL, maxConns(1))
		ex := newExecutor(t, pool, executor.Config{})
		const fails = "select 1/(count(*)::int4 - count(*)::int4)"
		for _, n := range []int{3, 300, 2000} {
			var connection *pgconn.PgConn
			for round := range 3 {
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				br := ex.SendBatch(ctx, longOf(n, fails))
				got, err := readLong(br, n)
				if code(err) != "22012" || got != n/2 {
					t.Errorf("%v, %d, round %d: %d items, then %v", p, n, round, got, err)
				}
				if _, err := br.Exec(); code(err) != "22012" {
					t.Errorf("%v, %d, round %d: the next item: %v", p, n, round, err)
				}
				if err := br.Close(); code(err) != "22012" {
					t.Errorf("%v, %d, round %d: Close: %v", p, n, round, err)
				}
				br = ex.SendBatch(ctx, longOf(n, ""))
				if got, err := readLong(br, n); err != nil || got != n || br.Close() != nil {
					t.Errorf("%v, %d, round %d: the next batch: %d items, %v", p, n, round, got, err)
				}
				err = ex.InTx(ctx, pgx.TxOptions{}, func(_ context.Context, tx executor.Tx) error {
					for i := range n {
						if err := tx.Queue(fmt.Sprintf("insert into written values ($1 + %d)", i), prepare.Stable, i); err != nil {
							return err
						}
						if i == n/2 {
							if err := tx.Queue(fails, prepare.Stable); err != nil {
								return err
							}
						}
					}
					return nil
				})
				if rows := one(t, admin, "select count(*) from written"); code(err) != "22012" || rows != "0" {
					t.Errorf("%v, %d, round %d: queue: %s rows, %v", p, n, round, rows, err)
				}
				err = pool.AcquireFunc(ctx, func(c *pgxpool.Conn) error {
					if round > 0 && connection != c.Conn().PgConn() {
						t.Errorf("%v, %d, round %d: another connection", p, n, round)
					}
					connection = c.Conn().PgConn()
					return nil
				})
				if err != nil {
					t.Error(err)
				}
				cancel()
			}
		}
	}
}

// A context that ends in the middle of a long batch or queue: the connection is closed, nothing is written, and the pool goes on.
func TestALongBatchThatIsCancelled(t *testing.T) {
	t.Parallel()
	for _, p := range place.OneOfEachKind() {
		r := p.Start(t)
		admin := connect(t, r.DB.URL)
		mustExec(t, admin, "create table written (n int4)")
		pool := newPool(t, r.URL, maxConns(1))
		ex := newExecutor(t, pool, executor.Config{})
		const waits = "select 1 from pg_sleep(60)"
		const n = 600
		for round := range 2 {
			for name, run := range map[string]func(context.Context) error{
				"batch": func(ctx context.Context) error {
					br := ex.SendBatch(ctx, longOf(n, waits))
					_, err := readLong(br, n)
					return errors.Join(err, br.Close())
				},
				"batch, closed only": func(ctx context.Context) error { return ex.SendBatch(ctx, longOf(n, waits)).Close() },
				"queue": func(ctx context.Context) error {
					return ex.InTx(ctx, pgx.TxOptions{}, func(_ context.Context, tx executor.Tx) error {
						for i := range n {
							if err := tx.Queue(fmt.Sprintf("insert into written values ($1 + %d)", i), prepare.Stable, i); err != nil {
								return err
							}
						}
						return tx.Queue(waits, prepare.Stable)
					})
				},
			} {
				ctx, cancel := context.WithCancel(t.Context())
				done := make(chan error, 1)
				go func() { done <- run(ctx) }()
				await.True(t, "the sleep to begin", func() bool {
					return one(t, admin, "select count(*) from pg_stat_activity where wait_event = 'PgSleep' and datname = current_database()") == "1"
				})
				cancel()
				select {
				case err := <-done:
					if !errors.Is(err, context.Canceled) {
						t.Errorf("%v, %s, round %d: %v", p, name, round, err)
					}
				case <-time.After(time.Minute):
					t.Fatalf("%v, %s, round %d: still running", p, name, round)
				}
				mustExec(t, admin, "select pg_terminate_backend(pid) from pg_stat_activity where wait_event = 'PgSleep' and datname = current_database()")
				if rows := one(t, admin, "select count(*) from written"); rows != "0" {
					t.Errorf("%v, %s, round %d: %s rows", p, name, round, rows)
				}
				ctx, cancel = context.WithTimeout(t.Context(), time.Minute)
				br := ex.SendBatch(ctx, longOf(n, ""))
				if got, err := readLong(br, n); err != nil || br.Close() != nil {
					t.Errorf("%v, %s, round %d: the next batch: %d items, %v", p, name, round, got, err)
				}
				cancel()
			}
		}
	}
}

// A pooler that stops tracking statements loses all names at once, in the middle of a long batch and a long queue too: both are sent again, without
// names, and no item runs twice.
func TestALongBatchWhosePoolerStopsTracking(t *testing.T) {
	t.Parallel()
	for _, p := range trackingVersions() {
		for _, kind := range []string{"batch", "queue"} {
			r := p.Start(t)
			admin := connect(t, r.DB.URL)
			mustExec(t, admin, "create table written (n int4)")
			ex := newExecutor(t, newPool(t, r.URL, maxConns(1)), executor.Config{})
			const n = 150
			send := func() error {
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				if kind == "batch" {
					br := ex.SendBatch(ctx, longOf(n, ""))
					_, err := readLong(br, n)
					return errors.Join(err, br.Close())
				}
				return ex.InTx(ctx, pgx.TxOptions{}, func(_ context.Context, tx executor.Tx) error {
					for i := range n {
						if err := tx.Queue(fmt.Sprintf("insert into written values ($1 + %d)", i), prepare.Stable, i); err != nil {
							return err
						}
					}
					return nil
				})
			}
			// Names are learnt some at a time: at first a part of the items goes by name, then all.
			for round := range 12 {
				if err := send(); err != nil {
					t.Fatalf("%v, %s, round %d: %v", p, kind, round, err)
				}
				if round != 3 && round != 11 {
					continue
				}
				named := ex.Stats().Named
				r.Bouncer.Set(t, "max_prepared_statements", "0")
				before := ex.Stats()
				if err := send(); err != nil {
					t.Errorf("%v, %s, after %d by name: %v", p, kind, named, err)
				}
				if after := ex.Stats(); after.Downgrades != before.Downgrades+1 || after.Retries != before.Retries+1 || after.Named != before.Named {
					t.Errorf("%v, %s: %+v, before %+v", p, kind, after, before)
				}
				r.Bouncer.Set(t, "max_prepared_statements", "200")
				if round == 3 {
					ex = newExecutor(t, newPool(t, r.URL, maxConns(1)), executor.Config{})
				}
			}
			if want := fmt.Sprint(14 * n); kind == "queue" && one(t, admin, "select count(*) from written") != want {
				t.Errorf("%v: %s rows, want %s", p, one(t, admin, "select count(*) from written"), want)
			}
		}
	}
}

// The control for large batches: who writes all of it before it reads hangs, for the server does not read while it cannot write.
func TestAClientThatDoesNotReadWhileItWritesHangs(t *testing.T) {
	t.Parallel()
	for _, p := range place.OneOfEachKind() {
		if err := writeWithoutReading(t, p.Start(t).URL); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%v: 64 MB were written without reading: %v", p, err)
		}
	}
}

func writeWithoutReading(t *testing.T, url string) error {
	t.Helper()
	c, err := pgconn.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	h, err := c.Hijack()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Conn.Close()
	large := bytes.Repeat([]byte("x"), 1<<20)
	f := pgproto3.NewFrontend(h.Conn, h.Conn)
	f.SendParse(&pgproto3.Parse{Query: "select $1::text"})
	for range 64 {
		f.SendBind(&pgproto3.Bind{Parameters: [][]byte{large}})
		f.SendExecute(&pgproto3.Execute{})
	}
	f.SendSync(&pgproto3.Sync{})
	if err := h.Conn.SetWriteDeadline(time.Now().Add(3 * time.Second)); err != nil {
		t.Fatal(err)
	}
	return f.Flush()
}
