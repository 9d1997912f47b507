package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/outbox"
	"github.com/bounceproof/bounceproof/testenv/postgres"
	"github.com/bounceproof/bounceproof/testenv/proxy"
)

// The server refuses whatever is recorded of failed events in one lane. The others go on, that one's handler is not called without end, and
// it goes on when the reason is gone.
func TestALaneThatIsRefusedDoesNotHoldUpTheOthers(t *testing.T) {
	t.Parallel()
	for name, tx := range map[string]bool{"handler": false, "handler with a transaction": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := setup(t, outbox.Config{Lanes: 4})
			for _, q := range []string{
				`create function refuse() returns trigger language plpgsql as $$ begin raise exception 'refused' using errcode = '54000'; end $$`,
				`create trigger refuse before insert on outbox.failed for each row when (new.lane = 0) execute function refuse()`,
			} {
				if _, err := db.conn.Exec(t.Context(), q); err != nil {
					t.Fatal(err)
				}
			}
			rec := newRecorder()
			var refused, others atomic.Int64
			one := func(ctx context.Context, d outbox.Delivery) error {
				if d.Lane == 0 {
					refused.Add(1)
				}
				if d.Attempt == 1 && strings.HasSuffix(d.Key, "0") {
					return errors.New("fails once")
				}
				if d.Lane != 0 {
					others.Add(1)
				}
				return rec.handle(ctx, d)
			}
			var h outbox.Handler = outbox.HandlerFunc(one)
			if tx {
				h = outbox.TxHandlerFunc(func(ctx context.Context, _ pgx.Tx, d outbox.Delivery) error { return one(ctx, d) })
			}
			start(t, db.proc.subscribe(t, "s", outbox.SubscriptionConfig{}), h, quick)
			publish := func() {
				for i := range 16 { // each lane gets failing ones
					for lane := range 4 {
						db.proc.publish(t, outbox.Event{Type: "t", Key: keyOfLane(lane, 4, i)})
					}
				}
			}
			publish()
			eventually(t, "the other lanes deliver", func() bool { return others.Load() >= 48 })
			eventually(t, "lane 0 was tried", func() bool { return refused.Load() > 0 })
			before := refused.Load()
			for round := int64(2); round <= 4; round++ {
				publish()
				eventually(t, "the other lanes go on", func() bool { return others.Load() >= 48*round })
			}
			if n := refused.Load() - before; n > 16*20 {
				t.Errorf("the refused lane's handler was called %d times meanwhile", n)
			}
			if _, err := db.conn.Exec(t.Context(), "drop trigger refuse on outbox.failed"); err != nil {
				t.Fatal(err)
			}
			eventually(t, "lane 0 goes on", func() bool {
				return db.count(t, "select count(*) from outbox.event") == int64(len(rec.distinct()))
			})
			eventually(t, "nothing waits", func() bool { return db.count(t, "select count(*) from outbox.failed") == 0 })
		})
	}
}

// keyOfLane returns the nth key of a lane, which ends with the last digit of n.
func keyOfLane(lane, lanes, n int) string {
	for i := 0; ; i++ {
		if key := fmt.Sprintf("%d.%d", i, n%10); outbox.LaneOf(key, lanes) == lane {
			return key
		}
	}
}

// Pages that take longer than a lease are read in smaller parts, and not again and again as they were.
func TestARoundThatTakesTooLongIsMadeSmaller(t *testing.T) {
	t.Parallel()
	db := setup(t, outbox.Config{Lanes: 4})
	db.proc.publish(t, events(200, unkeyed)...)
	slow := newProcess(t, db.url, outbox.Config{})
	slow.store.RewritePage(func(sql string) string {
		const column = "select e.seq, e.type, e.key, e.payload,"
		if !strings.Contains(sql, column) {
			t.Fatalf("the page statement has no %s", column)
		}
		return strings.Replace(sql, column, "select e.seq, e.type, e.key, (select e.payload from pg_sleep(0.015)) as payload,", 1)
	})
	rec := newRecorder()
	cfg := quick
	cfg.LeaseDuration, cfg.PageSize = time.Second, 100 // 200 events take three seconds
	start(t, slow.subscribe(t, "s", outbox.SubscriptionConfig{}), outbox.HandlerFunc(rec.handle), cfg)
	eventually(t, "all", func() bool { return len(rec.distinct()) == 200 })
}

// A handler that ends its transaction itself has failed, each time, with a backoff.
func TestAHandlerThatEndsItsTransactionFails(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(context.Context, pgx.Tx) error{
		"commit":   func(ctx context.Context, tx pgx.Tx) error { return tx.Commit(ctx) },
		"rollback": func(ctx context.Context, tx pgx.Tx) error { return tx.Rollback(ctx) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := setup(t, outbox.Config{Lanes: 1})
			sub := db.proc.subscribe(t, "s", outbox.SubscriptionConfig{})
			var calls atomic.Int64
			h := func(ctx context.Context, tx pgx.Tx, _ outbox.Delivery) error {
				calls.Add(1)
				if _, err := tx.Exec(ctx, "select 1"); err != nil {
					return err
				}
				return end(ctx, tx)
			}
			cfg := quick
			cfg.MaxAttempts = 3
			start(t, sub, outbox.TxHandlerFunc(h), cfg)
			db.proc.publish(t, outbox.Event{Type: "t"})
			eventually(t, "it is dead", func() bool { return db.count(t, "select count(*) from outbox.failed where state = 'dead'") == 1 })
			if n := calls.Load(); n != 3 {
				t.Errorf("%d calls, want 3", n)
			}
			list, err := sub.Failed(t.Context(), outbox.StateDead, 0, 1)
			if err != nil || len(list) != 1 || list[0].LastError != outbox.ErrTransactionEnded.Error() {
				t.Errorf("%+v, %v", list, err)
			}
		})
	}
}

// A host vanishes without a word in the middle of its transactions. The lanes of others go on, its own are taken over when its leases have
// run out, and those with an open transaction when the server has ended that.
func TestAVanishedHostHoldsUpItsOpenTransactionsOnly(t *testing.T) {
	t.Parallel()
	db := setupOn(t, postgres.Start(t, postgres.Options{}), nil, outbox.Config{Lanes: 8})
	if _, err := db.conn.Exec(t.Context(), "create table effect (seq bigint primary key)"); err != nil {
		t.Fatal(err)
	}
	wire := proxy.Start(t, db.url)
	host := newProcess(t, wire.URL(db.url), outbox.Config{})
	cfg := quick
	cfg.LeaseDuration = time.Second
	var in sync.WaitGroup
	in.Add(2)
	var entered atomic.Int64
	gone := make(chan struct{})
	t.Cleanup(wire.Heal)
	stuck := func(ctx context.Context, tx pgx.Tx, d outbox.Delivery) error {
		if _, err := tx.Exec(ctx, "insert into effect (seq) values ($1)", d.Seq); err != nil {
			return err
		}
		if entered.Add(1) <= 2 { // these two have written, and hold what they wrote
			in.Done()
			<-gone
		}
		return nil
	}
	sub := host.subscribe(t, "s", outbox.SubscriptionConfig{})
	start(t, sub, outbox.TxHandlerFunc(stuck), cfg)
	eventually(t, "all lanes", func() bool { return db.count(t, "select count(*) from outbox.lease where owner is not null") == 8 })
	for lane := range 2 {
		db.proc.publish(t, outbox.Event{Type: "t", Key: keyOfLane(lane, 8, 0)})
	}
	in.Wait()
	wire.BlackHole()
	close(gone)
	begin := time.Now()
	rec := newRecorder()
	h := func(ctx context.Context, tx pgx.Tx, d outbox.Delivery) error {
		if _, err := tx.Exec(ctx, "insert into effect (seq) values ($1)", d.Seq); err != nil {
			return err
		}
		return rec.handle(ctx, d)
	}
	start(t, db.proc.subscribe(t, "s", outbox.SubscriptionConfig{}), outbox.TxHandlerFunc(h), cfg)
	for lane := 2; lane < 8; lane++ {
		db.proc.publish(t, outbox.Event{Type: "t", Key: keyOfLane(lane, 8, 0)})
	}
	eventually(t, "the other lanes", func() bool { return rec.n.Load() >= 6 })
	others := time.Since(begin)
	eventually(t, "the two, after the server has ended their transactions", func() bool {
		return db.count(t, "select count(*) from effect") == 8
	})
	t.Logf("six lanes after %v, all after %v; a lease lasts %v", others, time.Since(begin), cfg.LeaseDuration)
}
