package selector_test

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/internal/selector"
)

func TestSelectorSharedFallsFurtherOnlyOnItsOwnEvidence(t *testing.T) {
	t.Parallel()
	s, said := newSelector(selector.Config{Policy: selector.Shared})
	s.Observe(t.Context(), s.Probed(t.Context(), session), evidence26000(t))
	if s.Strategy() != fallback.Shared || said.warnings() != 1 {
		t.Fatalf("at %v\n%s", s.Strategy(), said.All())
	}
	shared := named(raw)
	shared.Strategy = fallback.Shared
	exists := fallback.Classify(server("42P05", `prepared statement "`+ours+`" already exists`, "StorePreparedStatement"), shared)
	if !s.Observe(t.Context(), s.Decision(), exists) || s.Strategy() != fallback.Unprepared {
		t.Fatalf("at %v", s.Strategy())
	}
	s, _ = newSelector(selector.Config{Policy: selector.Shared})
	ran := s.Probed(t.Context(), tracking)
	s.Observe(t.Context(), ran, fallback.Classify(bouncer("prepared statement did not exist"), named(tracking)))
	if s.Strategy() != fallback.Unprepared {
		t.Errorf("shared names behind a tracking pooler are fatal, and yet %v", s.Strategy())
	}
}

func TestCountToleratesWarmingUpAndNotAPoolerThatForgets(t *testing.T) {
	t.Parallel()
	// A new pool: 20 servers and 200 statements, drawn evenly.
	s, _ := newSelector(selector.Config{Policy: selector.Shared})
	d := s.Probed(t.Context(), raw)
	known := map[int]bool{}
	random := uint32(1)
	for range 20000 {
		random = random*1664525 + 1013904223
		key := int(random>>8) % 4000
		missed := !known[key]
		known[key] = true
		if s.CountShared(t.Context(), d, missed) {
			t.Fatalf("gave up while %d of 4000 names were known", len(known))
		}
	}
	// Then somebody resets the servers all the time.
	n := 0
	for ; n < 3000 && !s.CountShared(t.Context(), d, n%5 == 0); n++ {
	}
	if s.Strategy() != fallback.Unprepared || n > 3000 {
		t.Fatalf("at %v after %d", s.Strategy(), n)
	}
	if !s.ShouldProbe() && s.CountShared(t.Context(), s.Decision(), true) {
		t.Error("an unprepared decision counts")
	}
	// A tenth of misses is tolerated for ever.
	s, _ = newSelector(selector.Config{Policy: selector.Shared})
	d = s.Probed(t.Context(), raw)
	for i := range 10000 {
		if s.CountShared(t.Context(), d, i%10 == 0) {
			t.Fatal("gave up at exactly a tenth")
		}
	}
}

func TestCountFromManyGoroutinesGivesUpOnce(t *testing.T) {
	t.Parallel()
	s, said := newSelector(selector.Config{Policy: selector.Shared})
	d := s.Probed(t.Context(), raw)
	var gaveUp atomic.Int32
	var wg sync.WaitGroup
	for range 64 {
		wg.Go(func() {
			for range 200 {
				if s.CountShared(context.Background(), d, true) {
					gaveUp.Add(1)
				}
			}
		})
	}
	wg.Wait()
	if gaveUp.Load() != 1 || said.warnings() != 1 {
		t.Fatalf("gave up %d times\n%s", gaveUp.Load(), said.All())
	}
}
