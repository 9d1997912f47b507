package selector_test

import (
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/internal/selector"
)

// A pooler of which the first looks do not show whether it tracks: advice comes with the proof, and once.
func TestSelectorAdvisesOnlyWhatIsProven(t *testing.T) {
	t.Parallel()
	for _, policy := range []selector.Policy{selector.Auto, selector.Shared} {
		synctest.Test(t, func(t *testing.T) {
			s, said := newSelector(selector.Config{Policy: policy})
			if d := s.Probed(t.Context(), notSeen); d.Strategy != fallback.Unprepared {
				t.Errorf("%v: %v where it was not seen", policy, d.Strategy)
			}
			if said.warnings() != 1 || strings.Contains(said.All(), "remedy") {
				t.Errorf("want one warning and no advice, got\n%s", said.All())
			}
			time.Sleep(2 * time.Second)
			if !s.ShouldProbe() {
				t.Error("not looked at again soon")
			}
			s.Probed(t.Context(), notSeen)
			time.Sleep(3 * time.Second)
			if !s.ShouldProbe() || said.warnings() != 1 {
				t.Errorf("want another look, and no other warning\n%s", said.All())
			}
			s.Probed(t.Context(), raw)
			if policy == selector.Shared {
				if s.Strategy() != fallback.Shared || said.warnings() != 1 || said.infos() != 1 {
					t.Errorf("%v\n%s", s.Strategy(), said.All())
				}
				return
			}
			s.Probed(t.Context(), raw)
			if w := said.At(slog.LevelWarn); len(w) != 2 || !strings.Contains(w[1], "remedy=set max_prepared_statements") || len(said.changes) != 1 {
				t.Errorf("want the advice, once, and no change; got %d changes\n%s", len(said.changes), said.All())
			}
			if s.ShouldProbe() {
				t.Error("a proven topology is looked at again as soon as an open one")
			}
		})
	}
}

// A look that could not be finished counts for what it saw.
func TestSelectorLooksAgainSoonAfterAPartOfALook(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s, said := newSelector(selector.Config{})
		part := session
		part.Partial = true
		if d := s.Probed(t.Context(), part); d.Strategy != fallback.Named || said.warnings() != 0 {
			t.Errorf("%v\n%s", d.Strategy, said.All())
		}
		looks := 0
		for begin := time.Now(); time.Since(begin) < time.Hour; time.Sleep(time.Second) {
			if s.ShouldProbe() {
				looks++
				s.Probed(t.Context(), part)
			}
		}
		if looks < 8 || looks > 20 {
			t.Errorf("looked %d times in an hour", looks)
		}
		s.Probed(t.Context(), session)
		time.Sleep(time.Hour)
		if s.ShouldProbe() {
			t.Error("a finished look is repeated")
		}
	})
}

// A name that the pooler made proves that it tracks, whatever it was taken for and whatever the policy is.
func TestSelectorLearnsFromALostNameThatThePoolerTracks(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		policy selector.Policy
		to     fallback.Strategy
	}{{selector.Auto, fallback.Unprepared}, {selector.Shared, fallback.Unprepared}, {selector.On, fallback.Named}} {
		for _, top := range []fallback.Topology{session, raw} {
			s, said := newSelector(selector.Config{Policy: tt.policy})
			ran := s.Probed(t.Context(), top)
			if ran.Strategy == fallback.Unprepared {
				continue // nothing to lose
			}
			c := named(top)
			c.Strategy = ran.Strategy
			v := fallback.Classify(server("26000", `prepared statement "PGBOUNCER_2" does not exist`, "FetchPreparedStatement"), c)
			s.Observe(t.Context(), ran, v)
			d := s.Decision()
			if d.Strategy != tt.to || d.Topology.Tracking() != fallback.TrackingYes || d.Topology.Pooler != fallback.PoolerPgBouncer {
				t.Errorf("%v: %v, %v", tt.policy, d.Strategy, d.Topology)
			}
			if strings.Contains(said.All(), "set max_prepared_statements") {
				t.Errorf("advised what is set:\n%s", said.All())
			}
			// Whoever looks out of turn sees what it is, and that does not bring names back that have just failed.
			if again := s.Probed(t.Context(), tracking); again.Strategy != tt.to {
				t.Errorf("%v: back to %v at once", tt.policy, again.Strategy)
			}
		}
	}
}

// The advice never names what the policy is already.
func TestSelectorDoesNotAdviseThePolicyThatIsSet(t *testing.T) {
	t.Parallel()
	s, said := newSelector(selector.Config{Policy: selector.Shared})
	s.Probed(t.Context(), raw)
	for range 4 {
		for range 1000 {
			s.CountShared(t.Context(), s.Decision(), true)
		}
	}
	if said.warnings() != 1 || strings.Contains(said.All(), "to shared") && !strings.Contains(said.All(), "to=") {
		t.Errorf("log:\n%s", said.All())
	}
	for _, w := range said.At(slog.LevelWarn) {
		if _, advice, ok := strings.Cut(w, "remedy="); !ok || strings.Contains(advice, "to shared") {
			t.Errorf("advice %q", advice)
		}
	}
}
