package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/outbox"
	"github.com/bounceproof/bounceproof/testenv/postgres"
	"github.com/bounceproof/bounceproof/testenv/proxy"
)

// promotions is how many failovers the test makes. OUTBOX_PROMOTIONS overrides it.
func promotions(t *testing.T) int {
	t.Helper()
	if v := os.Getenv("OUTBOX_PROMOTIONS"); v != "" {
		n, err := strconv.Atoi(v)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	if testing.Short() {
		return 1
	}
	return 3
}

// An asynchronous failover loses the last transactions, and hands out their numbers and the ids of their ticks again. What the new primary
// holds is delivered all the same.
func TestAFailoverLosesNothingThatTheNewPrimaryHolds(t *testing.T) {
	versions := postgres.Versions()
	for i := range promotions(t) {
		version := versions[i%len(versions)]
		t.Run(fmt.Sprintf("%d on %s", i, version), func(t *testing.T) { failover(t, version, i) })
	}
}

// got remembers deliveries by what cannot be issued again: the payload.
type got struct {
	mu   sync.Mutex
	seen map[string]int
	n    atomic.Int64
}

func (g *got) handle(_ context.Context, d outbox.Delivery) error {
	if (d.Seq+int64(d.Attempt))%13 == 0 {
		return errors.New("fails now and then")
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.seen[string(d.Payload)]++
	g.n.Add(1)
	return nil
}

func (g *got) handleTx(ctx context.Context, tx pgx.Tx, d outbox.Delivery) error {
	if (d.Seq+int64(d.Attempt))%13 == 0 {
		return errors.New("fails now and then")
	}
	_, err := tx.Exec(ctx, "insert into effect (payload) values ($1)", string(d.Payload))
	return err
}

func failover(t *testing.T, version string, run int) {
	primary := postgres.Start(t, postgres.Options{Version: version, Dedicated: true})
	name := "postgres"
	wire, clients := proxy.Start(t, primary.URL(name)), proxy.Start(t, primary.URL(name))
	url := clients.URL(primary.URL(name))
	conn, err := pgxpool.New(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(conn.Close)
	db := &database{url: url, conn: conn, proc: newProcess(t, url, outbox.Config{Lanes: 8})}
	if err := db.proc.store.Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Exec(t.Context(), "create table effect (payload text)"); err != nil {
		t.Fatal(err)
	}
	plain, inTx := "plain", "in tx"
	g := &got{seen: make(map[string]int)}
	for range 2 {
		p := newProcess(t, url, outbox.Config{})
		cfg := outbox.DispatcherConfig{
			LeaseDuration: 2 * time.Second, PollInterval: 20 * time.Millisecond, PageSize: 10,
			MinBackoff: time.Millisecond, MaxBackoff: 50 * time.Millisecond, MaxAttempts: -1,
		}
		start(t, p.subscribe(t, plain, outbox.SubscriptionConfig{}), outbox.HandlerFunc(g.handle), cfg)
		start(t, p.subscribe(t, inTx, outbox.SubscriptionConfig{}), outbox.TxHandlerFunc(g.handleTx), cfg)
	}
	standby := primary.NewStandby(t, wire.Addr(), nil)
	primary.AwaitStreaming(t, standby)

	// Publishers that nothing stops, with sparse events besides, so that lanes pass over empty batches.
	stop := make(chan struct{})
	var publishers sync.WaitGroup
	var published, serial atomic.Int64
	for i := range 4 {
		publishers.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-stop:
					return
				case <-time.After(time.Duration(2+3*i) * time.Millisecond):
				}
				e := outbox.Event{Type: "t", Payload: fmt.Appendf(nil, "e%d", serial.Add(1))}
				if n%2 == 0 {
					e.Key = fmt.Sprintf("k%d", n%7)
				}
				ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 5*time.Second)
				err := db.proc.ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
					return db.proc.store.Publish(ctx, tx, e)
				})
				cancel()
				if err == nil {
					published.Add(1)
				}
			}
		})
	}
	more := func(n int64) {
		until := published.Load() + n
		eventually(t, "events are published", func() bool { return published.Load() >= until })
	}
	more(int64(40 + 17*run%60))
	wire.BlackHole()
	delivered := g.n.Load()
	more(int64(30 + 29*run%90)) // these are lost, and what was done with them
	eventually(t, "some of them are delivered", func() bool { return g.n.Load() >= delivered+10 })
	lostTip := db.count(t, "select max(seq) from outbox.event")
	standby.Promote(t)
	clients.Redirect(standby.URL(name))
	primary.Kill(t) // it would wait for the standby to have all
	if db.conn, err = pgxpool.New(t.Context(), standby.URL(name)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(db.conn.Close)
	more(60)
	close(stop)
	publishers.Wait()

	behind := func(sub string) int64 {
		st, err := db.proc.store.Status(t.Context())
		if err != nil {
			return -1 // connections that are broken
		}
		for _, s := range st.Subscriptions {
			if s.Name == sub {
				return s.Pending + s.Retrying + s.Parked + s.Dead
			}
		}
		return -1
	}
	for _, sub := range []string{plain, inTx} {
		eventually(t, sub+": nothing is pending", func() bool { return behind(sub) == 0 })
	}
	held := make(map[string]bool)
	rows, err := db.conn.Query(t.Context(), "select convert_from(payload, 'UTF8') from outbox.event")
	if err != nil {
		t.Fatal(err)
	}
	var payload string
	if _, err := pgx.ForEachRow(rows, []any{&payload}, func() error { held[payload] = true; return nil }); err != nil {
		t.Fatal(err)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	var lost []string
	gone := 0
	for p := range held {
		if g.seen[p] == 0 {
			lost = append(lost, p)
		}
	}
	for p := range g.seen {
		if !held[p] {
			gone++
		}
	}
	if len(lost) > 0 {
		t.Errorf("%d of %d events of the new primary were not delivered: %.20q", len(lost), len(held), lost)
	}
	if n := db.count(t, `select count(*) from outbox.event e
		where (select count(*) from effect f where f.payload = convert_from(e.payload, 'UTF8')) <> 1`); n > 0 {
		t.Errorf("%d of %d events of the new primary did not have their effect once", n, len(held))
	}
	if gone == 0 {
		t.Errorf("the failover lost no event that was delivered: this proves nothing")
	}
	t.Logf("%d events on the new primary, %d delivered ones gone with the old one, whose numbers went to %d", len(held), gone, lostTip)
}
