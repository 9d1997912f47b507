package selector_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/internal/selector"
)

func TestSelectorElectsOneCallerAtTheStart(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s, _ := newSelector(selector.Config{})
		if s.Strategy() != fallback.Undecided || !s.Decision().Pooled {
			t.Fatalf("a new selector stands at %+v", s.Decision())
		}
		var elected atomic.Int32
		var wg sync.WaitGroup
		for range 64 {
			wg.Go(func() {
				if s.ShouldProbe() {
					elected.Add(1)
				}
			})
		}
		wg.Wait()
		if elected.Load() != 1 {
			t.Fatalf("%d callers elected", elected.Load())
		}
		time.Sleep(14 * time.Second)
		if s.ShouldProbe() {
			t.Error("a second caller was elected while the first may still be probing")
		}
		time.Sleep(2 * time.Second)
		if !s.ShouldProbe() {
			t.Error("nobody is elected after the first did not come back")
		}
	})
}

// A day behind a pooler that stays as it is, and one day learns to track.
func TestSelectorProbesAgainAtGrowingIntervalsAndComesBack(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s, said := newSelector(selector.Config{})
		begin := time.Now()
		var at []time.Duration
		top := raw
		for time.Since(begin) < 24*time.Hour && s.Strategy() != fallback.Named {
			if s.ShouldProbe() {
				at = append(at, time.Since(begin))
				if time.Since(begin) > 3*time.Hour {
					top = tracking
				}
				s.Probed(t.Context(), top)
			}
			time.Sleep(time.Second)
		}
		want := []time.Duration{0, 30 * time.Second, 90 * time.Second, 210 * time.Second, 450 * time.Second, 930 * time.Second, 1530 * time.Second, 2130 * time.Second}
		for i, w := range want {
			if at[i] < w || at[i] > w+2*time.Second {
				t.Fatalf("probed at %v, want about %v", at[:len(want)], want)
			}
		}
		if s.Strategy() != fallback.Named || said.warnings() != 1 || said.infos() != 1 {
			t.Fatalf("want one warning and one word of the way back, got\n%s", said.All())
		}
		if s.ShouldProbe() {
			t.Error("still probing")
		}
	})
}

func TestSelectorOutOfTurnProbeThatFoundSomethingElseCounts(t *testing.T) {
	t.Parallel()
	s, _ := newSelector(selector.Config{})
	s.Observe(t.Context(), s.Probed(t.Context(), session), evidence26000(t))
	if d := s.Probed(t.Context(), session); d.Strategy != fallback.Unprepared {
		t.Errorf("what has just failed came back as %v", d.Strategy)
	}
	if d := s.Probed(t.Context(), tracking); d.Strategy != fallback.Named {
		t.Errorf("a pooler that tracks now is still %v", d.Strategy)
	}
}

func TestSelectorNeverProbesAgainWhenToldSo(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s, said := newSelector(selector.Config{ReprobeAfter: -1})
		if !s.ShouldProbe() {
			t.Fatal("the first probe is due all the same")
		}
		s.Observe(t.Context(), s.Probed(t.Context(), session), evidence26000(t))
		time.Sleep(240 * time.Hour)
		if s.ShouldProbe() || s.Probed(t.Context(), session).Strategy != fallback.Unprepared || strings.Contains(said.All(), "next_probe") {
			t.Errorf("log:\n%s", said.All())
		}
	})
}

func TestSelectorAfterAProbeThatFoundNothingOut(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s, said := newSelector(selector.Config{})
		cancelled, cancel := context.WithCancel(t.Context())
		cancel()
		s.ShouldProbe()
		s.ProbeFailed(cancelled, context.Canceled)
		if said.warnings() != 0 {
			t.Errorf("a caller that went away is nobody's fault:\n%s", said.All())
		}
		begin := time.Now()
		var at []time.Duration
		for time.Since(begin) < time.Minute {
			if s.ShouldProbe() {
				at = append(at, time.Since(begin))
				s.ProbeFailed(t.Context(), errors.New("no route to host"))
			}
			time.Sleep(100 * time.Millisecond)
		}
		if len(at) != 5 || at[0] != time.Second || s.Strategy() != fallback.Undecided { // 1 3 7 15 31
			t.Errorf("tried again at %v", at)
		}
		if said.warnings() != 1 || !strings.Contains(said.All(), "no route") {
			t.Errorf("want one warning, got\n%s", said.All())
		}
		s.Probed(t.Context(), direct)
		if s.Strategy() != fallback.Named || s.Decision().Pooled {
			t.Errorf("stands at %+v", s.Decision())
		}
	})
}
