package outbox_test

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/outbox"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

func TestPublishCostsNoRoundTripOfItsOwn(t *testing.T) {
	t.Parallel()
	db := setup(t, outbox.Config{WakeUp: outbox.WakeUpPoll})
	p := db.proc
	if _, err := db.conn.Exec(t.Context(), "create table business (id int primary key, n int); insert into business values (1, 0)"); err != nil {
		t.Fatal(err)
	}
	run := func(events int, business bool) int64 {
		before := p.requests.Load()
		err := p.ex.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
			if business {
				if _, err := tx.Exec(ctx, "update business set n = n + 1 where id = $1", 1); err != nil {
					return err
				}
			}
			for range events {
				if err := p.store.Publish(ctx, tx, outbox.Event{Type: "t", Key: "k"}); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		return p.requests.Load() - before
	}
	for range 10 { // learnt and prepared on every connection
		run(1, true)
	}
	for _, c := range []struct {
		events   int
		business bool
		want     int64
	}{{0, false, 0}, {1, false, 1}, {3, false, 1}, {0, true, 2}, {1, true, 2}, {3, true, 2}} {
		if got := run(c.events, c.business); got != c.want {
			t.Errorf("%d events, business %v: %d requests, want %d", c.events, c.business, got, c.want)
		}
	}
}

func TestDeliveryCostsOneRoundTripAPageSet(t *testing.T) {
	t.Parallel()
	db := setup(t, outbox.Config{Lanes: 4, WakeUp: outbox.WakeUpPoll})
	for range 20 {
		db.proc.publish(t, events(100, unkeyed)...)
	}
	p := newProcess(t, db.url, outbox.Config{})
	rec := newRecorder()
	sub := p.subscribe(t, "s", outbox.SubscriptionConfig{})
	before, started := p.requests.Load(), time.Now()
	d := start(t, sub, outbox.HandlerFunc(rec.handle), outbox.DispatcherConfig{PageSize: 50, PollInterval: -1})
	eventually(t, "all", func() bool { return rec.n.Load() == 2000 })
	d.stop(t)
	st := d.Stats()
	// Each page set is at least one page, and its completion rides with the next pages. The rest is learning, starting and leaving, and
	// a heartbeat every two seconds.
	if got, limit := p.requests.Load()-before, st.Pages+40+int64(time.Since(started)/time.Second); got > limit {
		t.Errorf("%d requests for %d pages in %d completions", got, st.Pages, st.CompletionRoundTrips)
	}
	t.Logf("%d requests, %d pages, %d completing round trips, %d ticks for 2,000 events", p.requests.Load()-before, st.Pages, st.CompletionRoundTrips, st.Ticks)
}

// A page reads its own events and nothing else, however large the log is and whatever statistics there are.
func TestAPageIsAnIndexRange(t *testing.T) {
	for _, version := range postgres.Versions() {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			db := setupOn(t, postgres.Start(t, postgres.Options{Version: version}), nil, outbox.Config{Lanes: 2})
			for _, q := range []string{
				// No statistics: the worst case, and the usual one of a log that grows.
				"alter table outbox.event set (autovacuum_enabled = off)",
				`insert into outbox.event select g % 2, nextval('outbox.event_seq'), pg_current_xact_id(), 't', null, '\x00', null, now()
				 from generate_series(1, 100000) g`,
			} {
				if _, err := db.conn.Exec(t.Context(), q); err != nil {
					t.Fatal(err)
				}
			}
			db.proc.subscribe(t, "now", outbox.SubscriptionConfig{Start: outbox.StartNow()}) // makes a tick
			tx, err := db.conn.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
			var base string // when the base tick was made
			if err := tx.QueryRow(t.Context(), "select at::text from outbox.tick where id = 0").Scan(&base); err != nil {
				t.Fatal(err)
			}
			page := db.proc.store.Statement("page")
			control := strings.Replace(page, "and e.seq > greatest(l.pos, b.low)", "and e.seq + 0 > greatest(l.pos, b.low)", 1)
			if control == page {
				t.Fatal("the page statement has no such bound")
			}
			for _, q := range []string{db.proc.store.Statement("plans"), "prepare page as " + page, "prepare control as " + control} {
				if _, err := tx.Exec(t.Context(), q); err != nil {
					t.Fatal(err)
				}
			}
			buffers := func(name string) int {
				var plan []byte
				q := fmt.Sprintf("explain (analyze, buffers, format json) execute %s('{1}', '{0}', '{null}', '{80000}', '{100}', '{%s}', '{null}')", name, base)
				if err := tx.QueryRow(t.Context(), q).Scan(&plan); err != nil {
					t.Fatal(err)
				}
				var out []struct {
					Plan struct {
						Hit  int     `json:"Shared Hit Blocks"`
						Read int     `json:"Shared Read Blocks"`
						Rows float64 `json:"Actual Rows"` // with a fraction from 18 on
					}
				}
				if err := json.Unmarshal(plan, &out); err != nil {
					t.Fatal(err)
				}
				if out[0].Plan.Rows != 100 {
					t.Fatalf("%s read %v rows", name, out[0].Plan.Rows)
				}
				return out[0].Plan.Hit + out[0].Plan.Read
			}
			// 100 events lie on 2 or 3 pages of the table, and the ticks on a few more.
			if n := buffers("page"); n > 40 {
				t.Errorf("a page of 100 events read %d buffers", n)
			} else {
				t.Logf("%d buffers", n)
			}
			if n := buffers("control"); n < 200 {
				t.Errorf("a page whose lower bound is no index condition read only %d buffers: this measures nothing", n)
			}
		})
	}
}
