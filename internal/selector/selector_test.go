package selector_test

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/internal/logrec"
	"github.com/bounceproof/bounceproof/internal/selector"
)

// reports is what a selector has logged, and the changes that it has reported.
type reports struct {
	logrec.Recorder
	mu      sync.Mutex // guards what follows
	changes []selector.Change
}

func (r *reports) warnings() int { return len(r.At(slog.LevelWarn)) }

func (r *reports) infos() int { return len(r.At(slog.LevelInfo)) }

func newSelector(config selector.Config) (*selector.Selector, *reports) {
	r := &reports{}
	config.Logger = r.Logger()
	config.OnChange = func(c selector.Change) {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.changes = append(r.changes, c)
	}
	return selector.New(config), r
}

// evidence26000 is the verdict on a statement that got lost.
func evidence26000(t *testing.T) fallback.Verdict {
	t.Helper()
	v := fallback.Classify(server("26000", `prepared statement "`+ours+`" does not exist`, "FetchPreparedStatement"), named(session))
	if !v.Evidence {
		t.Fatal("want evidence")
	}
	return v
}

func TestSelectorPolicies(t *testing.T) {
	t.Parallel()
	odyssey := fallback.Topology{Pooler: fallback.PoolerOdyssey, Mode: fallback.ModeSession, Tracks: true}
	tests := []struct {
		policy  selector.Policy
		initial fallback.Strategy
		due     bool
		by      map[*fallback.Topology]fallback.Strategy
	}{
		{selector.Auto, fallback.Undecided, true, map[*fallback.Topology]fallback.Strategy{
			&direct: fallback.Named, &session: fallback.Named, &tracking: fallback.Named, &odyssey: fallback.Named, &raw: fallback.Unprepared, &statement: fallback.Unprepared,
		}},
		{selector.On, fallback.Named, true, map[*fallback.Topology]fallback.Strategy{
			&direct: fallback.Named, &session: fallback.Named, &tracking: fallback.Named, &odyssey: fallback.Named, &raw: fallback.Named, &statement: fallback.Named,
		}},
		{selector.Off, fallback.Unprepared, false, map[*fallback.Topology]fallback.Strategy{
			&direct: fallback.Unprepared, &session: fallback.Unprepared, &tracking: fallback.Unprepared, &odyssey: fallback.Unprepared, &raw: fallback.Unprepared, &statement: fallback.Unprepared,
		}},
		{selector.Shared, fallback.Undecided, true, map[*fallback.Topology]fallback.Strategy{
			&direct: fallback.Named, &session: fallback.Named, &tracking: fallback.Named, &odyssey: fallback.Named, &raw: fallback.Shared, &statement: fallback.Shared,
		}},
	}
	for _, tt := range tests {
		for top, want := range tt.by {
			s, said := newSelector(selector.Config{Policy: tt.policy})
			if s.Strategy() != tt.initial || s.ShouldProbe() != tt.due {
				t.Errorf("%v starts at %v", tt.policy, s.Strategy())
			}
			d := s.Probed(t.Context(), *top)
			if d.Strategy != want || d != s.Decision() || d.Pooled != top.Pooled() {
				t.Errorf("%v behind %v: got %v, want %v", tt.policy, top, d.Strategy, want)
			}
			warns := 0
			if want == fallback.Unprepared && tt.policy == selector.Auto {
				warns = 1
			}
			if said.warnings() != warns || (tt.policy == selector.Off || tt.policy == selector.On) && said.All() != "" {
				t.Errorf("%v behind %v: want %d warnings, got\n%s", tt.policy, top, warns, said.All())
			}
		}
	}
}

func TestSelectorGoesDownOnceWhoeverElseComesWithTheSameNews(t *testing.T) {
	t.Parallel()
	s, said := newSelector(selector.Config{})
	ran := s.Probed(t.Context(), session)
	v := evidence26000(t)
	var changed atomic.Int32
	var wg sync.WaitGroup
	for range 64 {
		wg.Go(func() {
			if s.Strategy() != fallback.Named && s.Strategy() != fallback.Unprepared {
				t.Error("in between")
			}
			if s.Observe(context.Background(), ran, v) {
				changed.Add(1)
			}
		})
	}
	wg.Wait()
	if changed.Load() != 1 || s.Strategy() != fallback.Unprepared || said.warnings() != 1 || len(said.changes) != 2 {
		t.Fatalf("%d changes, strategy %v, log\n%s", changed.Load(), s.Strategy(), said.All())
	}
	c := said.changes[1]
	if c.From != fallback.Named || c.To != fallback.Unprepared || c.Verdict.Reason != fallback.ReasonPreparedLost || c.Number != 3 {
		t.Errorf("got %+v", c)
	}
	for _, want := range []string{"26000", ours, "session-like", "max_prepared_statements", "shared", "off", "next_probe=30s", "from=named", "to=unprepared"} {
		if !strings.Contains(said.All(), want) {
			t.Errorf("the warning does not say %q:\n%s", want, said.All())
		}
	}
}

func TestSelectorLogsNeitherSQLNorValues(t *testing.T) {
	t.Parallel()
	s, said := newSelector(selector.Config{})
	ran := s.Probed(t.Context(), session)
	e := server("26000", `prepared statement "`+ours+`" does not exist, secret`, "FetchPreparedStatement")
	e.Detail, e.Hint, e.InternalQuery = "secret", "secret", ""
	v := fallback.Classify(e, named(session))
	if !s.Observe(t.Context(), ran, v) || strings.Contains(said.All(), "secret") {
		t.Fatalf("log:\n%s", said.All())
	}
}

func TestSelectorIgnoresEvidenceOfThePast(t *testing.T) {
	t.Parallel()
	s, said := newSelector(selector.Config{})
	old := s.Probed(t.Context(), session)
	s.Probed(t.Context(), tracking)
	if s.Observe(t.Context(), old, evidence26000(t)) || s.Strategy() != fallback.Named || said.warnings() != 0 {
		t.Fatalf("a straggler changed it to %v", s.Strategy())
	}
	if s.Observe(t.Context(), s.Decision(), fallback.Verdict{Reason: fallback.ReasonStalePlan}) {
		t.Fatal("no evidence, and yet it moved")
	}
}

// A pooler that looks right to every probe and loses every statement: the selector goes up and down ever more rarely.
func TestSelectorDoesNotFlap(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s, said := newSelector(selector.Config{})
		v := evidence26000(t)
		begin := time.Now()
		for time.Since(begin) < time.Hour {
			d := s.Decision()
			if s.ShouldProbe() {
				d = s.Probed(t.Context(), session)
			}
			if d.Strategy == fallback.Named {
				s.Observe(t.Context(), d, v)
			}
			if time.Since(begin)%(10*time.Second) == 0 {
				s.Probed(t.Context(), session) // somebody asks for the topology out of turn
			}
			time.Sleep(time.Second)
		}
		// 0:00 0:30 1:30 3:30 7:30 15:30 25:30 35:30 45:30 55:30
		if said.warnings() != 10 || said.infos() != 9 {
			t.Fatalf("%d warnings, %d ways back in an hour:\n%s", said.warnings(), said.infos(), said.All())
		}
		// Then it works for more than an hour, and fails once: that is a new story, and begins with 30 seconds.
		for s.Strategy() != fallback.Named {
			if s.ShouldProbe() {
				s.Probed(t.Context(), session)
			}
			time.Sleep(time.Second)
		}
		time.Sleep(61 * time.Minute)
		if !s.Observe(t.Context(), s.Decision(), v) {
			t.Fatal("not tripped")
		}
		time.Sleep(29 * time.Second)
		if s.ShouldProbe() {
			t.Error("due too early")
		}
		time.Sleep(2 * time.Second)
		if !s.ShouldProbe() {
			t.Error("the wait was not forgotten")
		}
	})
}

func TestSelectorLearnsStatementMode(t *testing.T) {
	t.Parallel()
	begin := named(session)
	begin.Phase = fallback.PhaseBegin
	v := fallback.Classify(bouncer("transaction blocks not allowed in statement pooling mode"), begin)
	for _, tt := range []struct {
		top  fallback.Topology
		want fallback.Strategy
	}{{session, fallback.Unprepared}, {tracking, fallback.Named}, {fallback.Topology{}, fallback.Undecided}} {
		s, said := newSelector(selector.Config{})
		ran := s.Decision()
		if tt.top.Known() {
			ran = s.Probed(t.Context(), tt.top)
		}
		if !s.Observe(t.Context(), ran, v) {
			t.Fatalf("%v: nothing learnt", tt.top)
		}
		d := s.Decision()
		if d.Topology.Mode != fallback.ModeStatement || d.Strategy != tt.want || said.warnings() > 1 {
			t.Errorf("%v: now %v, %v\n%s", tt.top, d.Topology, d.Strategy, said.All())
		}
		// Where nobody has looked yet nothing is known of names, and nothing is said of them: a probe tells.
		if known := tt.top.Known(); d.Topology.Known() != known || !known && (said.warnings() > 0 || !s.ShouldProbe()) {
			t.Errorf("%v: now known %t\n%s", tt.top, d.Topology.Known(), said.All())
		}
		if s.Observe(t.Context(), d, v) {
			t.Error("learnt twice")
		}
		if len(tt.top.Evidence) != 0 {
			t.Error("the given topology was changed")
		}
	}
}

// The address pointed at a server and now points at a pooler: rows must be described from the first sign of it.
func TestSelectorSeesAPoolerWhereThereWasNone(t *testing.T) {
	t.Parallel()
	s, said := newSelector(selector.Config{})
	ran := s.Probed(t.Context(), direct)
	if ran.Pooled || s.ShouldProbe() {
		t.Fatal("a direct connection is settled")
	}
	v := fallback.Classify(bouncer("query_wait_timeout"), named(direct))
	if !s.Observe(t.Context(), ran, v) {
		t.Fatal("not tripped")
	}
	d := s.Decision()
	if !d.Pooled || d.Strategy != fallback.Unprepared || !s.ShouldProbe() || said.warnings() != 1 {
		t.Fatalf("%+v\n%s", d, said.All())
	}
	if s.Probed(t.Context(), tracking).Strategy != fallback.Named || said.infos() != 1 {
		t.Errorf("log:\n%s", said.All())
	}
}

func TestSelectorOnAndOffDoNotMove(t *testing.T) {
	t.Parallel()
	for policy, want := range map[selector.Policy]fallback.Strategy{selector.On: fallback.Named, selector.Off: fallback.Unprepared} {
		s, said := newSelector(selector.Config{Policy: policy})
		ran := s.Probed(t.Context(), session)
		if s.Observe(t.Context(), ran, evidence26000(t)) || s.Strategy() != want || said.All() != "" || s.ShouldProbe() {
			t.Errorf("%v moved to %v\n%s", policy, s.Strategy(), said.All())
		}
		s.ProbeFailed(t.Context(), errors.New("x"))
	}
}

// Everything at once, for the race detector; each change is reported exactly once.
func TestSelectorUnderLoad(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s, said := newSelector(selector.Config{})
		v := evidence26000(t)
		var wg sync.WaitGroup
		for g := range 64 {
			wg.Go(func() {
				for i := range 200 {
					d := s.Decision()
					if d.Strategy == fallback.Named && (i+g)%5 == 0 {
						s.Observe(context.Background(), d, v)
					}
					if s.ShouldProbe() {
						if i%7 == 0 {
							s.ProbeFailed(context.Background(), errors.New("x"))
						} else {
							s.Probed(context.Background(), []fallback.Topology{session, tracking, raw}[i%3])
						}
					}
					_ = s.Strategy()
					time.Sleep(time.Second)
				}
			})
		}
		wg.Wait()
		numbers := map[int64]bool{}
		for _, c := range said.changes {
			if c.From == c.To || numbers[c.Number] {
				t.Fatalf("change %+v", c)
			}
			numbers[c.Number] = true
		}
		if len(said.changes) < 4 {
			t.Errorf("only %d changes", len(said.changes))
		}
	})
}

func TestSelectorHotPathDoesNotAllocate(t *testing.T) {
	s, _ := newSelector(selector.Config{Policy: selector.Shared})
	d := s.Probed(t.Context(), raw)
	if n := testing.AllocsPerRun(100, func() {
		_ = s.Strategy()
		_ = s.Decision().Pooled
		_ = s.ShouldProbe()
		_ = s.CountShared(context.Background(), d, false)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkSelector(b *testing.B) {
	settled := selector.New(selector.Config{})
	settled.Probed(b.Context(), direct)
	waiting := selector.New(selector.Config{Logger: slog.New(slog.DiscardHandler)})
	waiting.Probed(b.Context(), raw)
	b.Run("Decision", func(b *testing.B) {
		for b.Loop() {
			_ = settled.Decision().Strategy
		}
	})
	b.Run("Due/settled", func(b *testing.B) {
		for b.Loop() {
			_ = settled.ShouldProbe()
		}
	})
	b.Run("Due/waiting", func(b *testing.B) {
		for b.Loop() {
			_ = waiting.ShouldProbe()
		}
	})
}
