package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/outbox"
	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

func TestQueuedPublishesOfOneTransactionDoNotDeadlock(t *testing.T) {
	t.Parallel()
	db := setup(t, outbox.Config{})
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			keys := []string{"a", "b", "c", "d"}
			if i%2 == 1 {
				slices.Reverse(keys)
			}
			for range 40 {
				err := db.proc.ex.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
					if _, err := tx.Exec(ctx, "select pg_current_xact_id()"); err != nil {
						return err
					}
					for _, k := range keys {
						if err := db.proc.store.Publish(ctx, tx, outbox.Event{Type: "t", Key: k}); err != nil {
							return err
						}
					}
					return nil
				})
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	if n := db.count(t, "select count(*) from outbox.event"); n != 8*40*4 {
		t.Errorf("%d events", n)
	}
	bad := `select count(*) from (select lag(xid) over (partition by key order by seq) > xid and
		lag(published_at) over (partition by key order by seq) > published_at as bad from outbox.event) x where bad`
	if n := db.count(t, bad); n != 0 {
		t.Errorf("%d events of a key in another order than they were published", n)
	}
}

func TestKeysOfATransactionAreCountedOverItsCalls(t *testing.T) {
	t.Parallel()
	db := setup(t, outbox.Config{})
	err := db.proc.ex.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
		for i := range 300 {
			err := db.proc.store.Publish(ctx, tx, outbox.Event{Type: "t", Key: fmt.Sprint(i)}, outbox.Event{Type: "t", Key: "0"})
			if tooMany, ok := errors.AsType[*outbox.TooManyKeysError](err); ok != (i >= 256) || ok && tooMany.Keys != 257 {
				t.Errorf("key %d: %v", i, err)
			}
			if i == 100 { // sends what is queued, and changes nothing
				if _, err := tx.Exec(ctx, "savepoint s"); err != nil {
					return err
				}
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if n := db.count(t, "select count(*) from outbox.event"); n != 512 {
		t.Errorf("%d events, want those of 256 calls", n)
	}
	runtime.GC() // nothing of the transaction is left; the next one counts from zero
	db.proc.publish(t, events(256, func(i int) string { return fmt.Sprint(i) })...)
}

func TestOrderWithinATransactionIsThatOfTheCalls(t *testing.T) {
	for _, pooled := range []bool{false, true} {
		t.Run(fmt.Sprintf("pooled=%v", pooled), func(t *testing.T) {
			t.Parallel()
			s := postgres.Start(t, postgres.Options{})
			var b *pgbouncer.Bouncer
			if pooled {
				b = pgbouncer.Start(t, s, pgbouncer.Options{})
			}
			db := setupOn(t, s, b, outbox.Config{})
			p := db.proc
			publish := func(ctx context.Context, tx pgx.Tx, name string) {
				t.Helper()
				if err := p.store.Publish(ctx, tx, outbox.Event{Type: name, Key: "k"}); err != nil {
					t.Fatal(err)
				}
			}
			err := p.ex.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
				publish(ctx, tx, "1")
				kept, err := tx.Begin(ctx)
				if err != nil {
					return err
				}
				publish(ctx, kept, "2")
				inner, err := kept.Begin(ctx)
				if err != nil {
					return err
				}
				publish(ctx, inner, "lost")
				if _, err := inner.Exec(ctx, "select 1"); err != nil {
					return err
				}
				if err := inner.Rollback(ctx); err != nil {
					return err
				}
				publish(ctx, kept, "3")
				if err := kept.Commit(ctx); err != nil {
					return err
				}
				publish(ctx, tx, "4")
				for _, q := range []string{"savepoint a", "select 1"} {
					if _, err := tx.Exec(ctx, q); err != nil {
						return err
					}
				}
				publish(ctx, tx, "lost")
				if _, err := tx.Exec(ctx, "rollback to savepoint a"); err != nil {
					return err
				}
				publish(ctx, tx, "5")
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			var got string
			if err := db.conn.QueryRow(t.Context(), "select string_agg(type, ',' order by seq) from outbox.event").Scan(&got); err != nil {
				t.Fatal(err)
			}
			if want := "1,2,3,4,5"; got != want {
				t.Errorf("published %s, want %s", got, strings.ReplaceAll(want, ",", ", "))
			}
		})
	}
}
