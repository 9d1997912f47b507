package backoff_test

import (
	"context"
	"errors"
	"math"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/bounceproof/bounceproof/internal/backoff"
)

func TestBoundDoublesUpToMax(t *testing.T) {
	t.Parallel()
	p := backoff.Policy{Base: 100 * time.Millisecond, Max: time.Second}
	want := []time.Duration{100, 100, 200, 400, 800, 1000, 1000}
	for attempt, ms := range want {
		if got := p.Bound(attempt); got != ms*time.Millisecond {
			t.Errorf("Bound(%d) = %v, want %v", attempt, got, ms*time.Millisecond)
		}
	}
	if got := p.Bound(math.MaxInt); got != time.Second {
		t.Errorf("Bound(huge) = %v, want the maximum", got)
	}
}

func TestZeroPolicyDoesNotWait(t *testing.T) {
	t.Parallel()
	if got := (backoff.Policy{}).Delay(7); got != 0 {
		t.Fatalf("Delay = %v, want 0", got)
	}
	if got := (backoff.Policy{Base: time.Second}).Bound(9); got != time.Second {
		t.Fatalf("Bound without Max = %v, want Base", got)
	}
}

func TestDelayStaysWithinItsBoundAndNeverOverflows(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		p := backoff.Policy{
			Base: time.Duration(rapid.Int64Range(1, math.MaxInt64).Draw(t, "base")),
			Max:  time.Duration(rapid.Int64Range(0, math.MaxInt64).Draw(t, "max")),
		}
		attempt := rapid.IntRange(-1, 200).Draw(t, "attempt")
		if d := p.Delay(attempt); d <= 0 || d > p.Bound(attempt) || p.Bound(attempt) > max(p.Base, p.Max) {
			t.Fatalf("Delay(%d) = %v, bound %v of %+v", attempt, d, p.Bound(attempt), p)
		}
	})
}

// Full jitter is what keeps a fleet from arriving together: the lower half of the range must be used as much as the
// upper one.
func TestDelayUsesItsWholeRange(t *testing.T) {
	t.Parallel()
	p := backoff.Policy{Base: time.Second}
	var low int
	const draws = 2000
	for range draws {
		if p.Delay(1) <= time.Second/2 {
			low++
		}
	}
	if low < draws*4/10 || low > draws*6/10 {
		t.Fatalf("%d of %d delays in the lower half", low, draws)
	}
}

func TestSpreadStaysWithinItsFraction(t *testing.T) {
	t.Parallel()
	for range 1000 {
		if d := backoff.Spread(time.Second, 0.2); d < 800*time.Millisecond || d > 1200*time.Millisecond {
			t.Fatalf("Spread = %v", d)
		}
	}
	if d := backoff.Spread(time.Second, 0); d != time.Second {
		t.Fatalf("Spread by nothing = %v", d)
	}
	if d := backoff.Spread(time.Second, 5); d < 0 || d > 2*time.Second {
		t.Fatalf("Spread clamps its fraction, got %v", d)
	}
}

func TestWaitSleepsAndIsInterrupted(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		if err := backoff.Wait(t.Context(), time.Minute); err != nil || time.Since(start) != time.Minute {
			t.Fatalf("Wait = %v after %v", err, time.Since(start))
		}
		stop := errors.New("stop")
		ctx, cancel := context.WithCancelCause(t.Context())
		time.AfterFunc(time.Second, func() { cancel(stop) })
		start = time.Now()
		if err := backoff.Wait(ctx, time.Minute); !errors.Is(err, stop) || time.Since(start) != time.Second {
			t.Fatalf("Wait = %v after %v, want the cause after 1s", err, time.Since(start))
		}
		if err := backoff.Wait(ctx, 0); !errors.Is(err, stop) {
			t.Fatalf("Wait for nothing = %v, want the cause", err)
		}
	})
}
