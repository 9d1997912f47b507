package bench

import (
	"context"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// arm is one way of doing the same work. op does it once, and is called by several goroutines at a time.
type arm struct {
	name string
	op   func(ctx context.Context) error
}

// paired runs the arms in turn, round by round, so that whatever slows the machine slows all of them, and reports each arm's median
// throughput and the median of its rounds' ratios to the last arm, the peer. One round of one arm is ops operations by clients goroutines.
// Quote the ratios; the throughputs belong to the machine.
func paired(b *testing.B, clients, ops int, arms ...arm) {
	b.Helper()
	ctx := b.Context()
	for _, a := range arms { // warm up: statements, connections, caches
		run(b, ctx, a, clients, max(ops/5, clients*20))
	}
	rates := make([][]float64, len(arms))
	costs := make([][]float64, len(arms)) // processor time of this process an operation, in microseconds
	for round := 0; b.Loop(); round++ {
		// The order turns from round to round, so that no arm always runs behind the same other one.
		for k := range arms {
			i := (k + round) % len(arms)
			cpu := cpuTime()
			took := run(b, ctx, arms[i], clients, ops)
			rates[i] = append(rates[i], float64(ops)/took.Seconds())
			costs[i] = append(costs[i], float64((cpuTime()-cpu).Microseconds())/float64(ops))
		}
	}
	peer := len(arms) - 1
	line := fmt.Sprintf("%s: %d clients, %d rounds of %d:", b.Name(), clients, len(rates[0]), ops)
	for i, a := range arms {
		ratios := make([]float64, len(rates[i]))
		for r := range ratios {
			ratios[r] = rates[i][r] / rates[peer][r]
		}
		slices.Sort(ratios)
		line += fmt.Sprintf(" %s %.0f/s and %.1f µs of processor time", a.name, median(slices.Clone(rates[i])), median(costs[i]))
		if i != peer {
			line += fmt.Sprintf(" (ratio %.3f, quartiles %.3f to %.3f);", median(ratios), ratios[len(ratios)/4], ratios[len(ratios)*3/4])
			b.ReportMetric(median(ratios), a.name+"/"+arms[peer].name)
		}
	}
	fmt.Fprintln(os.Stderr, line)
}

// run does ops operations of an arm with so many clients and returns the time it took.
func run(b *testing.B, ctx context.Context, a arm, clients, ops int) time.Duration {
	var left atomic.Int64
	left.Store(int64(ops))
	var wg sync.WaitGroup
	start := time.Now()
	for range clients {
		wg.Go(func() {
			for left.Add(-1) >= 0 {
				if err := a.op(ctx); err != nil {
					b.Errorf("%s: %v", a.name, err)
					return
				}
			}
		})
	}
	wg.Wait()
	if b.Failed() {
		b.FailNow()
	}
	return time.Since(start)
}

// cpuTime is the processor time this process has used.
func cpuTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func median(v []float64) float64 {
	slices.Sort(v)
	return v[len(v)/2]
}

// allocations reports the allocations of one operation of each arm, with one client.
func allocations(b *testing.B, arms ...arm) {
	b.Helper()
	for _, a := range arms {
		n := testing.AllocsPerRun(500, func() {
			if err := a.op(context.Background()); err != nil {
				b.Fatal(err)
			}
		})
		b.ReportMetric(n, a.name+"-allocs/op")
	}
}

// pool opens a pool of so many connections, all of them made.
func pool(b testing.TB, url string, conns int, change ...func(*pgxpool.Config)) *pgxpool.Pool {
	b.Helper()
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		b.Fatal(err)
	}
	cfg.MaxConns = int32(conns)
	for _, f := range change {
		f(cfg)
	}
	p, err := pgxpool.NewWithConfig(b.Context(), cfg)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(p.Close)
	return p
}
