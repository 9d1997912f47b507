package bench

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/notify"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

const (
	idleFor = 60 * time.Second // six Heartbeats
	busyFor = 10 * time.Second
)

// BenchmarkListeners is what listeners cost the server: processor time of all backends of the database, by the kernel's count of nanoseconds,
// while nothing is published, and at a hundred calls of Sender.Notify a second. Each listener has a connection of its own, as if it were
// a process; their statements share a pool. Run it with -benchtime 1x on Linux; BENCH_POSTGRES is the version, 17 by default.
func BenchmarkListeners(b *testing.B) {
	for _, n := range []int{10, 100, 1000} {
		b.Run(fmt.Sprint("listeners=", n), func(b *testing.B) {
			version := os.Getenv("BENCH_POSTGRES")
			if version == "" {
				version = "17"
			}
			s := postgres.Start(b, postgres.Options{Version: version, Durable: true, Settings: map[string]string{"max_connections": "1200"}})
			db := s.NewDatabase(b)
			p := &statements{Pool: pool(b, db.URL, 8)}
			hearAll(b, p, n)
			for b.Loop() {
				p.notes.Store(0)
				p.others.Store(0)
				idle := serverTime(b, db.Name, idleFor, func() { time.Sleep(idleFor) })
				notes, others := p.notes.Load(), p.others.Load()
				sender, err := notify.NewSender(p.Pool, notify.SenderConfig{Logger: quiet})
				if err != nil {
					b.Fatal(err)
				}
				busy := serverTime(b, db.Name, busyFor, func() {
					for next, start := time.Now(), time.Now(); time.Since(start) < busyFor; {
						next = next.Add(10 * time.Millisecond)
						time.Sleep(time.Until(next))
						if err := sender.Notify("news", ""); err != nil {
							b.Error(err)
						}
					}
				})
				if err := sender.Close(b.Context()); err != nil {
					b.Fatal(err)
				}
				b.ReportMetric(idle, "idle-ms/s")
				b.ReportMetric(busy, "busy-ms/s")
				fmt.Fprintf(os.Stderr, "PostgreSQL %s, %d listeners: idle %.2f ms/s, with %d notes and %d other statements a minute; "+
					"at 100/s %.1f ms/s, %d statements in %v\n", s.FullVersion(), n, idle, notes, others, busy, sender.Stats().Statements, busyFor)
			}
		})
	}
}

// statements counts those that heartbeats send.
type statements struct {
	*pgxpool.Pool
	notes, others atomic.Int64
}

func (s *statements) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	if strings.Contains(sql, "pg_notify(") {
		s.notes.Add(1)
	} else {
		s.others.Add(1)
	}
	return s.Pool.Exec(ctx, sql, args...)
}

// hearAll runs n listeners until the end and returns when all are proven. Few start at a time: proving them all at once is not what is measured.
func hearAll(b *testing.B, p notify.Pool, n int) {
	b.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	b.Cleanup(func() { cancel(); wg.Wait() })
	var all []*notify.Listener
	proven := func(ls []*notify.Listener) (n int) {
		for _, l := range ls {
			if l.Healthy() {
				n++
			}
		}
		return n
	}
	for len(all) < n {
		l, err := notify.NewListener(p, notify.ListenerConfig{Logger: quiet, PollInterval: -1, ProvenPollInterval: -1})
		if err != nil {
			b.Fatal(err)
		}
		l.Handle("news", notify.HandlerFunc(func(context.Context, notify.Event) {}))
		all = append(all, l)
		wg.Go(func() { _ = l.Run(ctx) })
		if len(all)%5 == 0 {
			for start := time.Now(); proven(all[len(all)-5:]) < 5 && time.Since(start) < 5*time.Second; time.Sleep(time.Millisecond) {
			}
		}
	}
	time.Sleep(20 * time.Second)
	if healthy := proven(all); healthy < n {
		fmt.Fprintf(os.Stderr, "only %d of %d listeners are proven\n", healthy, n)
	}
}

// serverTime returns how many milliseconds a second the backends of a database compute while f runs.
func serverTime(b *testing.B, name string, lasts time.Duration, f func()) float64 {
	b.Helper()
	before := computed(b, name)
	f()
	var sum uint64
	for pid, ns := range computed(b, name) {
		sum += ns - before[pid]
	}
	return float64(sum) / 1e6 / lasts.Seconds()
}

// computed returns the nanoseconds that each backend of a database has computed (proc_pid_schedstat, the first number).
func computed(b *testing.B, name string) map[string]uint64 {
	b.Helper()
	found := make(map[string]uint64)
	lines, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		b.Fatal(err)
	}
	for _, line := range lines {
		title, err := os.ReadFile(line)
		if err != nil || !strings.HasPrefix(string(title), "postgres: ") || !strings.Contains(string(title), " "+name+" ") {
			continue
		}
		text, err := os.ReadFile(filepath.Join(filepath.Dir(line), "schedstat"))
		if err != nil {
			continue
		}
		first, _, _ := strings.Cut(string(text), " ")
		ns, err := strconv.ParseUint(first, 10, 64)
		if err != nil {
			b.Skipf("this system does not count: %v", err)
		}
		found[filepath.Dir(line)] = ns
	}
	if len(found) == 0 {
		b.Skip("the backends of the server cannot be seen from here")
	}
	return found
}
