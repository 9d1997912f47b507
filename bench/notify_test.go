package bench

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/notify"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

const notifySchema = `
create table news (id bigint generated always as identity primary key, payload text not null, at timestamptz not null default clock_timestamp());
create table news_with_trigger (like news including all);
create function announce() returns trigger language plpgsql as $$ begin perform pg_notify('news', new.id::text); return null; end $$;
create trigger announce after insert on news_with_trigger for each row execute function announce();`

// notifyServer starts a durable server of the version in BENCH_POSTGRES, 17 by default.
func notifyServer(b *testing.B) *postgres.Database {
	b.Helper()
	version := os.Getenv("BENCH_POSTGRES")
	if version == "" {
		version = "17"
	}
	s := postgres.Start(b, postgres.Options{Version: version, Durable: true})
	db := s.NewDatabase(b)
	if _, err := pool(b, db.URL, 1).Exec(b.Context(), notifySchema); err != nil {
		b.Fatal(err)
	}
	fmt.Fprintf(os.Stderr, "PostgreSQL %s (%s), fsync on\n", s.FullVersion(), s.Runtime())
	return db
}

// BenchmarkNotify publishes one row of 160 bytes a transaction and announces it: not at all (twice, to show the noise), by a Sender, in
// the transaction, or by a trigger. Commits wait for the disk. Idle listeners listen on a channel of their own.
func BenchmarkNotify(b *testing.B) {
	db := notifyServer(b)
	for _, listeners := range []int{0, 100} {
		for _, publishers := range []int{1, 4, 32} {
			b.Run(fmt.Sprintf("publishers=%d/listeners=%d", publishers, listeners), func(b *testing.B) {
				for range listeners {
					idleListener(b, db.URL)
				}
				p := pool(b, db.URL, publishers)
				sender, err := notify.NewSender(p, notify.SenderConfig{Logger: quiet})
				if err != nil {
					b.Fatal(err)
				}
				payload := strings.Repeat("x", 160)
				insert := func(sql string, after func() error) func(context.Context) error {
					return func(ctx context.Context) error {
						if _, err := p.Exec(ctx, sql, payload); err != nil {
							return err
						}
						return after()
					}
				}
				nothing := func() error { return nil }
				const plain = `insert into news (payload) values ($1)`
				coalesced := insert(plain, func() error { return sender.Notify("news", "") })
				ratios(b, publishers, []arm{
					{"none", insert(plain, nothing)},
					{"coalesced", coalesced},
					{"every", insert(`with e as (insert into news (payload) values ($1) returning id) select pg_notify('news', id::text) from e`, nothing)},
					{"trigger", insert(`insert into news_with_trigger (payload) values ($1)`, nothing)},
					{"none-again", insert(plain, nothing)},
				}, [][2]string{{"coalesced", "none"}, {"coalesced", "every"}, {"coalesced", "trigger"}, {"every", "none"}, {"none-again", "none"}})
				if err := sender.Close(b.Context()); err != nil {
					b.Fatal(err)
				}
			})
		}
	}
}

func idleListener(b *testing.B, url string) {
	b.Helper()
	conn, err := pgconn.Connect(b.Context(), url)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = conn.Close(context.Background()) })
	if _, err := conn.Exec(b.Context(), "listen elsewhere").ReadAll(); err != nil {
		b.Fatal(err)
	}
}

const (
	slice  = 300 * time.Millisecond // of one arm in one round
	settle = 50 * time.Millisecond  // before each, in which listeners read what the arm before has sent
)

// rate runs an arm for a slice and returns its operations a second.
func rate(b *testing.B, a arm, clients int) float64 {
	b.Helper()
	var n atomic.Int64
	var wg sync.WaitGroup
	start := time.Now()
	for range clients {
		wg.Go(func() {
			for time.Since(start) < slice {
				if err := a.op(b.Context()); err != nil {
					b.Errorf("%s: %v", a.name, err)
					return
				}
				n.Add(1)
			}
		})
	}
	wg.Wait()
	if b.Failed() {
		b.FailNow()
	}
	return float64(n.Load()) / time.Since(start).Seconds()
}

// ratios is paired for any pairs of arms, not only for those with the last one, and for arms of very different speed: a slice of an arm
// lasts as long as that of any other.
func ratios(b *testing.B, clients int, arms []arm, pairs [][2]string) {
	b.Helper()
	for _, a := range arms {
		rate(b, a, clients)
	}
	rates := make(map[string][]float64)
	for b.Loop() {
		for _, i := range rand.Perm(len(arms)) { // no arm always inherits what the same other one left behind
			time.Sleep(settle)
			rates[arms[i].name] = append(rates[arms[i].name], rate(b, arms[i], clients))
		}
	}
	line := fmt.Sprintf("%s: %d rounds of %v:", b.Name(), len(rates[arms[0].name]), slice)
	for _, a := range arms {
		line += fmt.Sprintf(" %s %.0f/s;", a.name, median(slices.Clone(rates[a.name])))
	}
	for _, pair := range pairs {
		r := make([]float64, len(rates[pair[0]]))
		for i := range r {
			r[i] = rates[pair[0]][i] / rates[pair[1]][i]
		}
		slices.Sort(r)
		line += fmt.Sprintf(" %s/%s %.3f (quartiles %.3f to %.3f);", pair[0], pair[1], median(r), r[len(r)/4], r[len(r)*3/4])
		b.ReportMetric(median(r), pair[0]+"/"+pair[1])
	}
	fmt.Fprintln(os.Stderr, line)
}

// BenchmarkWakeUp measures from the commit's answer at the publisher to the call of the handler, over the server, at a rate that leaves
// each notification alone and at one that fills every window. Publishing is an open loop.
func BenchmarkWakeUp(b *testing.B) {
	db := notifyServer(b)
	for _, c := range []struct {
		name string
		rate int // a second
	}{{"lone", 20}, {"busy", 500}} {
		b.Run(c.name, func(b *testing.B) {
			p := pool(b, db.URL, 8)
			sender, err := notify.NewSender(p, notify.SenderConfig{Logger: quiet})
			if err != nil {
				b.Fatal(err)
			}
			woken := &wakeUps{committed: make(map[string]time.Time)}
			stop := hear(b, p, woken)
			var wg sync.WaitGroup
			n := 0
			next := time.Now()
			for b.Loop() {
				n++
				id := fmt.Sprint(n)
				next = next.Add(time.Duration(float64(time.Second) / float64(c.rate) * (0.5 + rand.Float64())))
				time.Sleep(time.Until(next))
				wg.Go(func() {
					if _, err := p.Exec(b.Context(), `insert into news (payload) values ($1)`, id); err != nil {
						b.Error(err)
						return
					}
					woken.commit(id)
					if err := sender.Notify("news", id); err != nil {
						b.Error(err)
					}
				})
			}
			wg.Wait()
			if err := sender.Flush(b.Context()); err != nil {
				b.Fatal(err)
			}
			latencies := woken.await(b, n)
			stop()
			slices.Sort(latencies)
			at := func(q float64) float64 {
				return float64(latencies[min(int(q*float64(len(latencies))), len(latencies)-1)].Microseconds()) / 1000
			}
			b.ReportMetric(at(0.5), "p50-ms")
			b.ReportMetric(at(0.99), "p99-ms")
			fmt.Fprintf(os.Stderr, "%s: %d wake-ups at %d/s: p50 %.2f ms, p90 %.2f ms, p99 %.2f ms, slowest %.2f ms; %d statements\n",
				b.Name(), len(latencies), c.rate, at(0.5), at(0.9), at(0.99), at(1), sender.Stats().Statements)
		})
	}
}

// wakeUps takes the times. A handler may be called before the publisher has noted its commit; that counts as no time.
type wakeUps struct {
	mu        sync.Mutex
	committed map[string]time.Time
	took      []time.Duration
}

func (w *wakeUps) commit(id string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.committed[id] = time.Now()
}

func (w *wakeUps) HandleEvent(_ context.Context, e notify.Event) {
	now := time.Now()
	w.mu.Lock()
	defer w.mu.Unlock()
	if at, ok := w.committed[e.Payload]; ok && e.Kind == notify.Notified {
		w.took = append(w.took, now.Sub(at))
		delete(w.committed, e.Payload)
	}
}

func (w *wakeUps) await(b *testing.B, n int) []time.Duration {
	b.Helper()
	for start := time.Now(); ; time.Sleep(time.Millisecond) {
		w.mu.Lock()
		took := slices.Clone(w.took)
		w.mu.Unlock()
		if len(took) == n {
			return took
		}
		if time.Since(start) > 5*time.Second {
			b.Fatalf("%d of %d wake-ups", len(took), n)
		}
	}
}

// hear runs a listener and returns when it is proven.
func hear(b *testing.B, p *pgxpool.Pool, h notify.Handler) (stop func()) {
	b.Helper()
	l, err := notify.NewListener(p, notify.ListenerConfig{Logger: quiet})
	if err != nil {
		b.Fatal(err)
	}
	l.Handle("news", h)
	ctx, cancel := context.WithCancel(b.Context())
	done := make(chan struct{})
	go func() { defer close(done); _ = l.Run(ctx) }()
	for start := time.Now(); !l.Healthy(); time.Sleep(time.Millisecond) {
		if time.Since(start) > 5*time.Second {
			b.Fatalf("listener: %+v", l.Status())
		}
	}
	return func() { cancel(); <-done }
}

// discard takes statements and does nothing.
type discard struct{}

func (discard) Exec(context.Context, string, ...any) (pgconn.CommandTag, error) {
	return pgconn.CommandTag{}, nil
}

// BenchmarkNotifyCall is what Notify costs its caller.
func BenchmarkNotifyCall(b *testing.B) {
	for _, name := range []string{"same", "distinct"} {
		b.Run(name, func(b *testing.B) {
			sender, err := notify.NewSender(discard{}, notify.SenderConfig{Logger: quiet, Options: []any{pgx.QueryExecModeExec}})
			if err != nil {
				b.Fatal(err)
			}
			payloads := make([]string, 512)
			for i := range payloads {
				payloads[i] = fmt.Sprint("users:", i)
				if name == "same" {
					payloads[i] = "users:1"
				}
			}
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				if err := sender.Notify("cache", payloads[i%len(payloads)]); err != nil {
					b.Fatal(err)
				}
			}
			if err := sender.Close(context.Background()); err != nil {
				b.Fatal(err)
			}
		})
	}
}
