package outbox_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/outbox"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

func benchSetup(b *testing.B) (*executor.Executor, *outbox.Store) {
	b.Helper()
	db := postgres.Start(b, postgres.Options{}).NewDatabase(b)
	pool, err := pgxpool.New(b.Context(), db.URL)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(pool.Close)
	ex, err := executor.New(pool, executor.Config{Logger: quiet})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = ex.Close(context.Background()) })
	store, err := outbox.New(ex, outbox.Config{Logger: quiet})
	if err != nil {
		b.Fatal(err)
	}
	if err := store.Migrate(b.Context()); err != nil {
		b.Fatal(err)
	}
	return ex, store
}

var payload160 = make([]byte, 160)

func BenchmarkPublishOneConnection(b *testing.B) {
	ex, store := benchSetup(b)
	for b.Loop() {
		err := ex.InTx(b.Context(), pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
			return store.Publish(ctx, tx, outbox.Event{Type: "order.paid", Payload: payload160})
		})
		if err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "events/s")
}

func BenchmarkPublishParallelKeyed(b *testing.B) {
	ex, store := benchSetup(b)
	var n atomic.Int64
	b.SetParallelism(8)
	b.ResetTimer()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			key := fmt.Sprint(n.Add(1) % 1000)
			err := ex.InTx(b.Context(), pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
				return store.Publish(ctx, tx, outbox.Event{Type: "order.paid", Key: key, Payload: payload160})
			})
			if err != nil {
				b.Fatal(err)
			}
		}
	})
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "events/s")
}

func BenchmarkDeliver(b *testing.B) {
	for _, size := range []int{100, 1000} {
		b.Run(fmt.Sprintf("page=%d", size), func(b *testing.B) {
			ex, store := benchSetup(b)
			sub, err := store.Subscribe(b.Context(), "s", outbox.SubscriptionConfig{})
			if err != nil {
				b.Fatal(err)
			}
			const total = 200_000
			for range total / 1000 {
				err := ex.InTx(b.Context(), pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
					evs := make([]outbox.Event, 1000)
					for i := range evs {
						evs[i] = outbox.Event{Type: "t", Payload: payload160}
						if i%2 == 0 {
							evs[i].Key = fmt.Sprint(i % 200)
						}
					}
					return store.Publish(ctx, tx, evs...)
				})
				if err != nil {
					b.Fatal(err)
				}
			}
			var n atomic.Int64
			done := make(chan struct{})
			h := func(context.Context, outbox.Delivery) error {
				if n.Add(1) == total {
					close(done)
				}
				return nil
			}
			d, err := outbox.NewDispatcher(sub, outbox.HandlerFunc(h), outbox.DispatcherConfig{PageSize: size, Logger: quiet})
			if err != nil {
				b.Fatal(err)
			}
			ctx, cancel := context.WithCancel(b.Context())
			started := time.Now()
			stopped := make(chan error, 1)
			go func() { stopped <- d.Run(ctx) }()
			<-done
			b.ReportMetric(total/time.Since(started).Seconds(), "events/s")
			st := d.Stats()
			b.ReportMetric(float64(st.CompletionRoundTrips), "completions")
			b.ReportMetric(float64(st.Ticks), "ticks")
			b.ReportMetric(float64(st.Pages), "pages")
			cancel()
			if err := <-stopped; err != nil {
				b.Error(err)
			}
		})
	}
}
