package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/outbox"
)

// kinds are handlers of all kinds that call f for each event, and the interface that is called.
func kinds(f outbox.HandlerFunc) map[string]outbox.Handler {
	all := func(ctx context.Context, ds []outbox.Delivery) error {
		for _, d := range ds {
			if err := f(ctx, d); err != nil {
				return err
			}
		}
		return nil
	}
	return map[string]outbox.Handler{
		"Handler":        f,
		"BatchHandler":   outbox.BatchHandlerFunc(all),
		"TxHandler":      outbox.TxHandlerFunc(func(ctx context.Context, _ pgx.Tx, d outbox.Delivery) error { return f(ctx, d) }),
		"BatchTxHandler": outbox.BatchTxHandlerFunc(func(ctx context.Context, _ pgx.Tx, ds []outbox.Delivery) error { return all(ctx, ds) }),
	}
}

// With a single slot, one that leaks stops everything.
func TestAHandlerThatEndsItsGoroutineFailsLikeOneThatPanics(t *testing.T) {
	t.Parallel()
	for name := range kinds(nil) {
		for _, suspect := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/suspect=%v", name, suspect), func(t *testing.T) {
				t.Parallel()
				db := setup(t, outbox.Config{Lanes: 1})
				sub := db.proc.subscribe(t, "s", outbox.SubscriptionConfig{})
				if suspect { // as if two owners had died with the lane
					if _, err := db.conn.Exec(t.Context(), "update outbox.lease set crashes = 2"); err != nil {
						t.Fatal(err)
					}
				}
				rec := newRecorder()
				var ended atomic.Int64
				h := kinds(func(ctx context.Context, d outbox.Delivery) error {
					if string(d.Payload) == "5" {
						ended.Add(1)
						runtime.Goexit()
					}
					return rec.handle(ctx, d)
				})[name]
				cfg := quick
				cfg.Concurrency, cfg.MaxAttempts = 1, 3
				d := start(t, sub, h, cfg)
				db.proc.publish(t, events(20, func(i int) string { return fmt.Sprint(i % 4) })...)
				eventually(t, "dead", func() bool { return d.Stats().Dead == 1 })
				delivered := func(n int) bool { // a transaction that ended with the handler may have shown some before
					rec.mu.Lock()
					defer rec.mu.Unlock()
					return len(rec.seen) == n
				}
				eventually(t, "all but those behind it", func() bool { return delivered(16) })
				db.proc.publish(t, slices.Repeat([]outbox.Event{{Type: "later"}}, 10)...)
				eventually(t, "the next page, through the only slot", func() bool { return delivered(26) })
				q := "select count(*) from outbox.failed where state = 'dead' and attempt = 3 and last_error like '%Goexit%'"
				if n := db.count(t, q); n != 1 || ended.Load() < 3 {
					t.Errorf("%d dead events with their error after %d calls", n, ended.Load())
				}
				d.stop(t)
			})
		}
	}
}

// all implements every interface, and records which method was called.
type all struct {
	mu     sync.Mutex
	called map[string]int
}

func (a *all) note(name string, n int) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.called[name] += n
	return nil
}
func (a *all) Handle(context.Context, outbox.Delivery) error { return a.note("Handle", 1) }

type batch struct{ *all }

func (b batch) HandleBatch(_ context.Context, ds []outbox.Delivery) error {
	return b.note("HandleBatch", len(ds))
}

type tx struct{ batch }

func (h tx) HandleTx(_ context.Context, tx pgx.Tx, _ outbox.Delivery) error {
	if tx == nil {
		return errors.New("no transaction")
	}
	return h.note("HandleTx", 1)
}

type batchTx struct{ tx }

func (h batchTx) HandleBatchTx(_ context.Context, tx pgx.Tx, ds []outbox.Delivery) error {
	if tx == nil {
		return errors.New("no transaction")
	}
	return h.note("HandleBatchTx", len(ds))
}

func TestTheMostSpecificMethodOfAHandlerIsCalled(t *testing.T) {
	t.Parallel()
	for want, wrap := range map[string]func(*all) outbox.Handler{
		"Handle":        func(a *all) outbox.Handler { return a },
		"HandleBatch":   func(a *all) outbox.Handler { return batch{a} },
		"HandleTx":      func(a *all) outbox.Handler { return tx{batch{a}} },
		"HandleBatchTx": func(a *all) outbox.Handler { return batchTx{tx{batch{a}}} },
	} {
		t.Run(want, func(t *testing.T) {
			t.Parallel()
			db := setup(t, outbox.Config{Lanes: 1})
			a := &all{called: make(map[string]int)}
			start(t, db.proc.subscribe(t, "s", outbox.SubscriptionConfig{}), wrap(a), quick)
			db.proc.publish(t, events(9, unkeyed)...)
			eventually(t, "nine events", func() bool {
				a.mu.Lock()
				defer a.mu.Unlock()
				return a.called[want] == 9
			})
			if len(a.called) != 1 {
				t.Errorf("called %v", a.called)
			}
		})
	}
	for name, h := range kinds(func(context.Context, outbox.Delivery) error { return nil }) {
		if err := h.Handle(t.Context(), outbox.Delivery{}); (err != nil) != strings.Contains(name, "Tx") {
			t.Errorf("%s without a dispatcher: %v", name, err)
		}
	}
}

type contextKey struct{}

// The outer one logs and turns panics into errors of its own, the inner one refuses one event and gives the handler a value.
func TestMiddlewareStandsAroundHandlersOfAllKinds(t *testing.T) {
	t.Parallel()
	for name := range kinds(nil) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := setup(t, outbox.Config{Lanes: 1})
			sub := db.proc.subscribe(t, "s", outbox.SubscriptionConfig{})
			rec := newRecorder()
			h := kinds(func(ctx context.Context, d outbox.Delivery) error {
				if ctx.Value(contextKey{}) != "inner" {
					return errors.New("the context is not the middleware's")
				}
				if string(d.Payload) == "panics" {
					panic("as it is told")
				}
				return rec.handle(ctx, d)
			})[name]
			refused := errors.New("refused")
			var mu sync.Mutex
			log := make(map[int64][]string)
			cfg := quick
			cfg.MaxAttempts = 2
			cfg.Middleware = []outbox.Middleware{
				func(ctx context.Context, ds []outbox.Delivery, next func(context.Context) error) (err error) {
					defer func() {
						if p := recover(); p != nil {
							err = fmt.Errorf("recovered: %v", p)
						}
						mu.Lock()
						defer mu.Unlock()
						for _, d := range ds {
							log[d.Seq] = append(log[d.Seq], fmt.Sprint(len(ds), " ", err))
						}
					}()
					return next(context.WithValue(ctx, contextKey{}, "outer"))
				},
				func(ctx context.Context, ds []outbox.Delivery, next func(context.Context) error) error {
					if ctx.Value(contextKey{}) != "outer" {
						return errors.New("the context is not the outer middleware's")
					}
					if slices.ContainsFunc(ds, func(d outbox.Delivery) bool { return string(d.Payload) == "refused" }) {
						return refused
					}
					return next(context.WithValue(ctx, contextKey{}, "inner"))
				},
			}
			d := start(t, sub, h, cfg)
			cfg.Middleware[1] = nil // the dispatcher has its own
			db.proc.publish(t, outbox.Event{Type: "t", Payload: []byte("fine")}, outbox.Event{Type: "t", Payload: []byte("panics")},
				outbox.Event{Type: "t", Payload: []byte("refused")}, outbox.Event{Type: "t", Payload: []byte("fine too")})
			eventually(t, "two are dead", func() bool { return d.Stats().Dead == 2 })
			eventually(t, "two were delivered", func() bool {
				rec.mu.Lock()
				defer rec.mu.Unlock()
				return len(rec.seen) == 2
			})
			d.stop(t)
			mu.Lock()
			defer mu.Unlock()
			errs := map[string]int64{"recovered: as it is told": 2, "refused": 3}
			for text, seq := range errs {
				if n := db.count(t, "select count(*) from outbox.failed where seq = $1 and state = 'dead' and last_error = $2", seq, text); n != 1 {
					t.Errorf("event %d has not died of %q: %q", seq, text, log[seq])
				}
				if !slices.Contains(log[seq], "1 "+text) {
					t.Errorf("the log of event %d: %q", seq, log[seq])
				}
			}
			for _, seq := range []int64{1, 4} {
				if !slices.Contains(log[seq], "1 <nil>") {
					t.Errorf("the log of event %d: %q", seq, log[seq])
				}
			}
			together := slices.ContainsFunc(log[1], func(s string) bool { return strings.HasPrefix(s, "4 ") })
			if together != strings.Contains(name, "Batch") {
				t.Errorf("all four together: %v: %q", together, log[1])
			}
		})
	}
}

func TestMisusePanicsAndNamesTheFunction(t *testing.T) {
	t.Parallel()
	db := setup(t, outbox.Config{})
	sub := db.proc.subscribe(t, "s", outbox.SubscriptionConfig{})
	for want, f := range map[string]func(){
		"outbox: New: nil executor":               func() { _, _ = outbox.New(nil, outbox.Config{}) },
		"outbox: NewDispatcher: nil subscription": func() { _, _ = outbox.NewDispatcher(nil, outbox.HandlerFunc(nil), quick) },
		"outbox: NewDispatcher: nil handler":      func() { _, _ = outbox.NewDispatcher(sub, nil, quick) },
	} {
		func() {
			defer func() {
				if p := recover(); p != want {
					t.Errorf("got %v, want %s", p, want)
				}
			}()
			f()
		}()
	}
	for _, events := range [][]outbox.Event{nil, {{Type: "t"}}} {
		if err := db.proc.store.Publish(t.Context(), nil, events...); err == nil || err.Error() != "outbox: publish: nil transaction" {
			t.Errorf("Publish without a transaction: %v", err)
		}
	}
	for _, h := range []outbox.Handler{outbox.HandlerFunc(nil), outbox.BatchHandlerFunc(nil), outbox.TxHandlerFunc(nil), outbox.BatchTxHandlerFunc(nil)} {
		if _, err := outbox.NewDispatcher(sub, h, quick); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("nil %T", h)) {
			t.Errorf("a nil function as handler: %v", err)
		}
	}
	rec := newRecorder()
	d := start(t, sub, outbox.HandlerFunc(rec.handle), quick)
	db.proc.publish(t, outbox.Event{Type: "t"})
	eventually(t, "it runs", func() bool { return rec.n.Load() == 1 })
	if err := d.Run(t.Context()); !errors.Is(err, outbox.ErrRunning) {
		t.Errorf("a second Run: %v", err)
	}
}
