package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/outbox"
	"github.com/bounceproof/bounceproof/prepare"
)

const (
	demoPublishers  = 8
	demoDispatchers = 2
	demoKeys        = 50
	demoAccounts    = 2 * demoKeys // the first half publishes with a key, the second without

	// maxErrors is how many failed transactions end a run: more of them say nothing new.
	maxErrors = 20
	// patience is how long a run waits for a delivery while none comes.
	patience = 10 * time.Second
)

// demoSchema is the business that the demo is about: accounts that are moved money on, one event for each movement.
const demoSchema = `
create schema shop;
create table shop.account (id integer primary key, balance bigint not null default 0, version bigint not null default 0);
insert into shop.account (id) select generate_series(0, $accounts - 1)`

const sqlMove = `update shop.account set balance = balance + $2, version = version + 1 where id = $1 returning version`

// movement is an event's payload. Versions of one account are the order in which its transactions committed, because each
// holds the account's row until it does.
type movement struct {
	Account int   `json:"account"`
	Version int64 `json:"version"`
	Amount  int64 `json:"amount"`
}

// delivered is an event as a handler got it.
type delivered struct {
	seq     int64
	key     string
	attempt int
	movement
}

// load is one run of the main job over one connection string.
type load struct {
	url    string
	policy executor.PreparedStatements
	events int
	logger *slog.Logger
	// found is called with what the executor found out about the connection, before anything is published.
	found func(fallback.Topology)

	published, delivered atomic.Int64 // read by whoever shows the progress
}

// outcome is what a run did.
type outcome struct {
	topology   fallback.Topology
	committed  int
	publishing time.Duration // from the first transaction to the last commit
	delivering time.Duration // from the first transaction to the last delivery
	deliveries []delivered   // in the order of the calls
	failures   int           // transactions, handler calls and dispatchers that failed
	firstErr   error
	stats      executor.Stats         // of the work alone
	total      executor.Stats         // and since the executor was made
	dispatch   outbox.DispatcherStats // all dispatchers together
}

// run does the job: publishers and dispatchers at the same time, until everything is delivered. An error means that it could
// not be done; failures of single transactions are in the outcome.
func (l *load) run(ctx context.Context) (_ *outcome, err error) {
	pool, err := l.pool(ctx)
	if err != nil {
		return nil, err
	}
	defer pool.Close()
	ex, err := executor.New(pool, executor.Config{PreparedStatements: l.policy, Logger: l.logger})
	if err != nil {
		return nil, err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		err = errors.Join(err, ex.Close(ctx))
	}()
	out := new(outcome)
	if out.topology, err = ex.Topology(ctx); err != nil {
		return nil, fmt.Errorf("topology: %w", err)
	}
	l.found(out.topology)
	store, err := outbox.New(ex, outbox.Config{Logger: l.logger})
	if err != nil {
		return nil, err
	}
	if err := store.Migrate(ctx); err != nil {
		return nil, err
	}
	sub, err := store.Subscribe(ctx, "demo", outbox.SubscriptionConfig{})
	if err != nil {
		return nil, err
	}
	before := ex.Stats()
	if err := l.work(ctx, ex, store, sub, out); err != nil {
		return nil, err
	}
	if err := ex.Sender().Flush(ctx); err != nil {
		return nil, err
	}
	out.total = ex.Stats()
	out.stats = difference(out.total, before)
	return out, nil
}

// pool has a connection for everybody who works at the same time, and one for the notifications.
func (l *load) pool(ctx context.Context) (*pgxpool.Pool, error) {
	cfg, err := pgxpool.ParseConfig(l.url)
	if err != nil {
		return nil, err
	}
	cfg.MaxConns = demoPublishers + demoDispatchers + 1
	return pgxpool.NewWithConfig(ctx, cfg)
}

func (l *load) work(ctx context.Context, ex *executor.Executor, store *outbox.Store, sub *outbox.Subscription, out *outcome) error {
	deliveries := &deliveryLog{progress: &l.delivered, moved: make(chan struct{}, 1)}
	dispatching, stop := context.WithCancel(ctx)
	defer stop()
	var dispatchers errgroup.Group
	var all []*outbox.Dispatcher
	for range demoDispatchers {
		d, err := outbox.NewDispatcher(sub, outbox.HandlerFunc(deliveries.handle), outbox.DispatcherConfig{PageSize: 250})
		if err != nil {
			return err
		}
		all = append(all, d)
		dispatchers.Go(func() error {
			err := d.Run(dispatching)
			stop() // one that ends before it is told to has failed, and the run with it
			return err
		})
	}
	start := time.Now()
	l.publish(ctx, ex, store, out)
	out.publishing = time.Since(start)
	deliveries.await(dispatching, out.committed)
	stop()
	if err := dispatchers.Wait(); err != nil {
		out.fail(fmt.Errorf("dispatcher: %w", err))
	}
	for _, d := range all {
		s := d.Stats()
		out.dispatch.Delivered += s.Delivered
		out.dispatch.Retries += s.Retries
		out.dispatch.Ticks += s.Ticks
	}
	out.failures += int(out.dispatch.Retries)
	out.deliveries, out.delivering = deliveries.all, deliveries.last.Sub(start)
	return ctx.Err()
}

// publish runs the business transactions and returns when the last has ended.
func (l *load) publish(ctx context.Context, ex *executor.Executor, store *outbox.Store, out *outcome) {
	var mu sync.Mutex // guards out
	var next atomic.Int64
	var wg sync.WaitGroup
	for range demoPublishers {
		wg.Go(func() {
			for ctx.Err() == nil {
				n := next.Add(1)
				if n > int64(l.events) {
					return
				}
				err := move(ctx, ex, store, n%2 == 0)
				if err == nil {
					l.published.Add(1)
				}
				mu.Lock()
				if err == nil {
					out.committed++
				} else {
					out.fail(err)
				}
				enough := out.failures >= maxErrors
				mu.Unlock()
				if enough {
					return
				}
			}
		})
	}
	wg.Wait()
}

// move is the business transaction: it moves money on an account and publishes that.
func move(ctx context.Context, ex *executor.Executor, store *outbox.Store, keyed bool) error {
	m := movement{Account: rand.IntN(demoKeys), Amount: rand.Int64N(2001) - 1000}
	if !keyed {
		m.Account += demoKeys
	}
	return ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
		if err := tx.QueryRow(ctx, sqlMove, prepare.Stable, m.Account, m.Amount).Scan(&m.Version); err != nil {
			return err
		}
		payload, err := json.Marshal(m)
		if err != nil {
			return err
		}
		e := outbox.Event{Type: "account.moved", Payload: payload}
		if keyed {
			e.Key = accountKey(m.Account)
		}
		return store.Publish(ctx, tx, e)
	})
}

func accountKey(account int) string { return fmt.Sprintf("account-%d", account) }

// fail counts a failure.
func (o *outcome) fail(err error) {
	o.failures++
	if o.firstErr == nil {
		o.firstErr = err
	}
}

// deliveryLog is the handler: it writes down what it gets.
type deliveryLog struct {
	progress *atomic.Int64
	moved    chan struct{} // capacity 1: something was delivered

	mu   sync.Mutex // guards what follows
	all  []delivered
	last time.Time
}

func (b *deliveryLog) handle(_ context.Context, d outbox.Delivery) error {
	got := delivered{seq: d.Seq, key: d.Key, attempt: d.Attempt}
	if err := json.Unmarshal(d.Payload, &got.movement); err != nil {
		return err
	}
	b.mu.Lock()
	b.all = append(b.all, got)
	b.last = time.Now()
	b.mu.Unlock()
	b.progress.Add(1)
	select {
	case b.moved <- struct{}{}:
	default:
	}
	return nil
}

// await returns when n deliveries came, when none came for a long time, or when ctx is done. What is missing is for the audit
// to say.
func (b *deliveryLog) await(ctx context.Context, n int) {
	stalled := time.NewTimer(patience)
	defer stalled.Stop()
	for b.progress.Load() < int64(n) {
		select {
		case <-b.moved:
			stalled.Reset(patience)
		case <-stalled.C:
			return
		case <-ctx.Done():
			return
		}
	}
}

// difference is what happened between two snapshots.
func difference(after, before executor.Stats) executor.Stats {
	return executor.Stats{
		Named: after.Named - before.Named, Unprepared: after.Unprepared - before.Unprepared,
		Shared: after.Shared - before.Shared, Passed: after.Passed - before.Passed,
		Parses: after.Parses - before.Parses, Learns: after.Learns - before.Learns,
		Retries: after.Retries - before.Retries, Misses: after.Misses - before.Misses,
		Probes: after.Probes - before.Probes, Downgrades: after.Downgrades - before.Downgrades,
		Upgrades: after.Upgrades - before.Upgrades, Notifies: after.Notifies - before.Notifies,
	}
}
