package fallback_test

import (
	"bytes"
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
)

// journal is a log and the changes that were reported.
type journal struct {
	mu      sync.Mutex
	text    bytes.Buffer
	changes []fallback.Change
}

func (j *journal) Write(b []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.text.Write(b)
}

func (j *journal) String() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.text.String()
}

func (j *journal) count(level string) int { return strings.Count(j.String(), "level="+level) }

func newLatch(config fallback.LatchConfig) (*fallback.Latch, *journal) {
	j := &journal{}
	config.Logger = slog.New(slog.NewTextHandler(j, &slog.HandlerOptions{Level: slog.LevelDebug}))
	config.OnChange = func(c fallback.Change) {
		j.mu.Lock()
		defer j.mu.Unlock()
		j.changes = append(j.changes, c)
	}
	return fallback.NewLatch(config), j
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

func TestLatchElectsOneCallerAtTheStart(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l, _ := newLatch(fallback.LatchConfig{})
		if l.Strategy() != fallback.Undecided || !l.Decision().Pooled {
			t.Fatalf("a new latch stands at %+v", l.Decision())
		}
		var elected atomic.Int32
		var wg sync.WaitGroup
		for range 64 {
			wg.Go(func() {
				if l.Due() {
					elected.Add(1)
				}
			})
		}
		wg.Wait()
		if elected.Load() != 1 {
			t.Fatalf("%d callers elected", elected.Load())
		}
		time.Sleep(14 * time.Second)
		if l.Due() {
			t.Error("a second caller was elected while the first may still be probing")
		}
		time.Sleep(2 * time.Second)
		if !l.Due() {
			t.Error("nobody is elected after the first did not come back")
		}
	})
}

func TestLatchPolicies(t *testing.T) {
	t.Parallel()
	odyssey := fallback.Topology{Pooler: fallback.PoolerOdyssey, Mode: fallback.ModeSession, Tracks: true}
	tests := []struct {
		policy  fallback.Policy
		initial fallback.Strategy
		due     bool
		by      map[*fallback.Topology]fallback.Strategy
	}{
		{fallback.PolicyAuto, fallback.Undecided, true, map[*fallback.Topology]fallback.Strategy{
			&direct: fallback.Named, &session: fallback.Named, &tracking: fallback.Named, &odyssey: fallback.Named, &raw: fallback.Unprepared, &statement: fallback.Unprepared,
		}},
		{fallback.PolicyOn, fallback.Named, true, map[*fallback.Topology]fallback.Strategy{
			&direct: fallback.Named, &session: fallback.Named, &tracking: fallback.Named, &odyssey: fallback.Named, &raw: fallback.Named, &statement: fallback.Named,
		}},
		{fallback.PolicyOff, fallback.Unprepared, false, map[*fallback.Topology]fallback.Strategy{
			&direct: fallback.Unprepared, &session: fallback.Unprepared, &tracking: fallback.Unprepared, &odyssey: fallback.Unprepared, &raw: fallback.Unprepared, &statement: fallback.Unprepared,
		}},
		{fallback.PolicyShared, fallback.Undecided, true, map[*fallback.Topology]fallback.Strategy{
			&direct: fallback.Named, &session: fallback.Named, &tracking: fallback.Named, &odyssey: fallback.Named, &raw: fallback.Shared, &statement: fallback.Shared,
		}},
	}
	for _, tt := range tests {
		for top, want := range tt.by {
			l, j := newLatch(fallback.LatchConfig{Policy: tt.policy})
			if l.Strategy() != tt.initial || l.Due() != tt.due {
				t.Errorf("%v starts at %v", tt.policy, l.Strategy())
			}
			d := l.Settle(t.Context(), *top)
			if d.Strategy != want || d != l.Decision() || d.Pooled != top.Pooled() {
				t.Errorf("%v behind %v: got %v, want %v", tt.policy, top, d.Strategy, want)
			}
			warns := 0
			if want == fallback.Unprepared && tt.policy == fallback.PolicyAuto {
				warns = 1
			}
			if j.count("WARN") != warns || (tt.policy == fallback.PolicyOff || tt.policy == fallback.PolicyOn) && j.String() != "" {
				t.Errorf("%v behind %v: want %d warnings, got\n%s", tt.policy, top, warns, j)
			}
		}
	}
}

func TestLatchGoesDownOnceWhoeverElseComesWithTheSameNews(t *testing.T) {
	t.Parallel()
	l, j := newLatch(fallback.LatchConfig{})
	ran := l.Settle(t.Context(), session)
	v := evidence26000(t)
	var changed atomic.Int32
	var wg sync.WaitGroup
	for range 64 {
		wg.Go(func() {
			if l.Strategy() != fallback.Named && l.Strategy() != fallback.Unprepared {
				t.Error("in between")
			}
			if l.Trip(context.Background(), ran, v) {
				changed.Add(1)
			}
		})
	}
	wg.Wait()
	if changed.Load() != 1 || l.Strategy() != fallback.Unprepared || j.count("WARN") != 1 || len(j.changes) != 2 {
		t.Fatalf("%d changes, strategy %v, log\n%s", changed.Load(), l.Strategy(), j)
	}
	c := j.changes[1]
	if c.From != fallback.Named || c.To != fallback.Unprepared || c.Verdict.Reason != fallback.ReasonPreparedLost || c.Number != 3 {
		t.Errorf("got %+v", c)
	}
	for _, want := range []string{"26000", ours, "session-like", "max_prepared_statements", "shared", "off", "next_probe=30s", "from=named", "to=unprepared"} {
		if !strings.Contains(j.String(), want) {
			t.Errorf("the warning does not say %q:\n%s", want, j)
		}
	}
}

func TestLatchLogsNeitherSQLNorValues(t *testing.T) {
	t.Parallel()
	l, j := newLatch(fallback.LatchConfig{})
	ran := l.Settle(t.Context(), session)
	e := server("26000", `prepared statement "`+ours+`" does not exist, secret`, "FetchPreparedStatement")
	e.Detail, e.Hint, e.InternalQuery = "secret", "secret", ""
	v := fallback.Classify(e, named(session))
	if !l.Trip(t.Context(), ran, v) || strings.Contains(j.String(), "secret") {
		t.Fatalf("log:\n%s", j)
	}
}

func TestLatchIgnoresEvidenceOfThePast(t *testing.T) {
	t.Parallel()
	l, j := newLatch(fallback.LatchConfig{})
	old := l.Settle(t.Context(), session)
	l.Settle(t.Context(), tracking)
	if l.Trip(t.Context(), old, evidence26000(t)) || l.Strategy() != fallback.Named || j.count("WARN") != 0 {
		t.Fatalf("a straggler changed it to %v", l.Strategy())
	}
	if l.Trip(t.Context(), l.Decision(), fallback.Verdict{Reason: fallback.ReasonStalePlan}) {
		t.Fatal("no evidence, and yet it moved")
	}
}

// A day behind a pooler that stays as it is, and one day learns to track.
func TestLatchProbesAgainAtGrowingIntervalsAndComesBack(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l, j := newLatch(fallback.LatchConfig{})
		begin := time.Now()
		var at []time.Duration
		top := raw
		for time.Since(begin) < 24*time.Hour && l.Strategy() != fallback.Named {
			if l.Due() {
				at = append(at, time.Since(begin))
				if time.Since(begin) > 3*time.Hour {
					top = tracking
				}
				l.Settle(t.Context(), top)
			}
			time.Sleep(time.Second)
		}
		want := []time.Duration{0, 30 * time.Second, 90 * time.Second, 210 * time.Second, 450 * time.Second, 930 * time.Second, 1530 * time.Second, 2130 * time.Second}
		for i, w := range want {
			if at[i] < w || at[i] > w+2*time.Second {
				t.Fatalf("probed at %v, want about %v", at[:len(want)], want)
			}
		}
		if l.Strategy() != fallback.Named || j.count("WARN") != 1 || j.count("INFO") != 1 {
			t.Fatalf("want one warning and one word of the way back, got\n%s", j)
		}
		if l.Due() {
			t.Error("still probing")
		}
	})
}

// A pooler that looks right to every probe and loses every statement: the latch goes up and down ever more rarely.
func TestLatchDoesNotFlap(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l, j := newLatch(fallback.LatchConfig{})
		v := evidence26000(t)
		begin := time.Now()
		for time.Since(begin) < time.Hour {
			d := l.Decision()
			if l.Due() {
				d = l.Settle(t.Context(), session)
			}
			if d.Strategy == fallback.Named {
				l.Trip(t.Context(), d, v)
			}
			if time.Since(begin)%(10*time.Second) == 0 {
				l.Settle(t.Context(), session) // somebody asks for the topology out of turn
			}
			time.Sleep(time.Second)
		}
		// 0:00 0:30 1:30 3:30 7:30 15:30 25:30 35:30 45:30 55:30
		if j.count("WARN") != 10 || j.count("INFO") != 9 {
			t.Fatalf("%d warnings, %d ways back in an hour:\n%s", j.count("WARN"), j.count("INFO"), j)
		}
		// Then it works for more than an hour, and fails once: that is a new story, and begins with 30 seconds.
		for l.Strategy() != fallback.Named {
			if l.Due() {
				l.Settle(t.Context(), session)
			}
			time.Sleep(time.Second)
		}
		time.Sleep(61 * time.Minute)
		if !l.Trip(t.Context(), l.Decision(), v) {
			t.Fatal("not tripped")
		}
		time.Sleep(29 * time.Second)
		if l.Due() {
			t.Error("due too early")
		}
		time.Sleep(2 * time.Second)
		if !l.Due() {
			t.Error("the wait was not forgotten")
		}
	})
}

func TestLatchOutOfTurnProbeThatFoundSomethingElseCounts(t *testing.T) {
	t.Parallel()
	l, _ := newLatch(fallback.LatchConfig{})
	l.Trip(t.Context(), l.Settle(t.Context(), session), evidence26000(t))
	if d := l.Settle(t.Context(), session); d.Strategy != fallback.Unprepared {
		t.Errorf("what has just failed came back as %v", d.Strategy)
	}
	if d := l.Settle(t.Context(), tracking); d.Strategy != fallback.Named {
		t.Errorf("a pooler that tracks now is still %v", d.Strategy)
	}
}

func TestLatchNeverProbesAgainWhenToldSo(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l, j := newLatch(fallback.LatchConfig{ReprobeAfter: -1})
		if !l.Due() {
			t.Fatal("the first probe is due all the same")
		}
		l.Trip(t.Context(), l.Settle(t.Context(), session), evidence26000(t))
		time.Sleep(240 * time.Hour)
		if l.Due() || l.Settle(t.Context(), session).Strategy != fallback.Unprepared || strings.Contains(j.String(), "next_probe") {
			t.Errorf("log:\n%s", j)
		}
	})
}

func TestLatchAfterAProbeThatFoundNothingOut(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l, j := newLatch(fallback.LatchConfig{})
		cancelled, cancel := context.WithCancel(t.Context())
		cancel()
		l.Due()
		l.Fail(cancelled, context.Canceled)
		if j.count("WARN") != 0 {
			t.Errorf("a caller that went away is nobody's fault:\n%s", j)
		}
		begin := time.Now()
		var at []time.Duration
		for time.Since(begin) < time.Minute {
			if l.Due() {
				at = append(at, time.Since(begin))
				l.Fail(t.Context(), errors.New("no route to host"))
			}
			time.Sleep(100 * time.Millisecond)
		}
		if len(at) != 5 || at[0] != time.Second || l.Strategy() != fallback.Undecided { // 1 3 7 15 31
			t.Errorf("tried again at %v", at)
		}
		if j.count("WARN") != 1 || !strings.Contains(j.String(), "no route") {
			t.Errorf("want one warning, got\n%s", j)
		}
		l.Settle(t.Context(), direct)
		if l.Strategy() != fallback.Named || l.Decision().Pooled {
			t.Errorf("stands at %+v", l.Decision())
		}
	})
}

func TestLatchLearnsStatementMode(t *testing.T) {
	t.Parallel()
	v := fallback.Classify(bouncer("transaction blocks not allowed in statement pooling mode"), with(named(session), phase(fallback.PhaseBegin)))
	for _, tt := range []struct {
		top  fallback.Topology
		want fallback.Strategy
	}{{session, fallback.Unprepared}, {tracking, fallback.Named}, {fallback.Topology{}, fallback.Unprepared}} {
		l, j := newLatch(fallback.LatchConfig{})
		ran := l.Decision()
		if tt.top.Known() {
			ran = l.Settle(t.Context(), tt.top)
		}
		if !l.Trip(t.Context(), ran, v) {
			t.Fatalf("%v: nothing learnt", tt.top)
		}
		d := l.Decision()
		if d.Topology.Mode != fallback.ModeStatement || d.Strategy != tt.want || !d.Topology.Known() || j.count("WARN") > 1 {
			t.Errorf("%v: now %v, %v\n%s", tt.top, d.Topology, d.Strategy, j)
		}
		if l.Trip(t.Context(), d, v) {
			t.Error("learnt twice")
		}
		if len(tt.top.Evidence) != 0 {
			t.Error("the given topology was changed")
		}
	}
}

// The address pointed at a server and now points at a pooler: rows must be described from the first sign of it.
func TestLatchSeesAPoolerWhereThereWasNone(t *testing.T) {
	t.Parallel()
	l, j := newLatch(fallback.LatchConfig{})
	ran := l.Settle(t.Context(), direct)
	if ran.Pooled || l.Due() {
		t.Fatal("a direct connection is settled")
	}
	v := fallback.Classify(bouncer("query_wait_timeout"), named(direct))
	if !l.Trip(t.Context(), ran, v) {
		t.Fatal("not tripped")
	}
	d := l.Decision()
	if !d.Pooled || d.Strategy != fallback.Unprepared || !l.Due() || j.count("WARN") != 1 {
		t.Fatalf("%+v\n%s", d, j)
	}
	if l.Settle(t.Context(), tracking).Strategy != fallback.Named || j.count("INFO") != 1 {
		t.Errorf("log:\n%s", j)
	}
}

func TestLatchOnAndOffDoNotMove(t *testing.T) {
	t.Parallel()
	for policy, want := range map[fallback.Policy]fallback.Strategy{fallback.PolicyOn: fallback.Named, fallback.PolicyOff: fallback.Unprepared} {
		l, j := newLatch(fallback.LatchConfig{Policy: policy})
		ran := l.Settle(t.Context(), session)
		if l.Trip(t.Context(), ran, evidence26000(t)) || l.Strategy() != want || j.String() != "" || l.Due() {
			t.Errorf("%v moved to %v\n%s", policy, l.Strategy(), j)
		}
		l.Fail(t.Context(), errors.New("x"))
	}
}

func TestLatchSharedFallsFurtherOnlyOnItsOwnEvidence(t *testing.T) {
	t.Parallel()
	l, j := newLatch(fallback.LatchConfig{Policy: fallback.PolicyShared})
	l.Trip(t.Context(), l.Settle(t.Context(), session), evidence26000(t))
	if l.Strategy() != fallback.Shared || j.count("WARN") != 1 {
		t.Fatalf("at %v\n%s", l.Strategy(), j)
	}
	exists := fallback.Classify(server("42P05", `prepared statement "`+ours+`" already exists`, "StorePreparedStatement"), with(named(raw), strategy(fallback.Shared)))
	if !l.Trip(t.Context(), l.Decision(), exists) || l.Strategy() != fallback.Unprepared {
		t.Fatalf("at %v", l.Strategy())
	}
	l, _ = newLatch(fallback.LatchConfig{Policy: fallback.PolicyShared})
	ran := l.Settle(t.Context(), tracking)
	l.Trip(t.Context(), ran, fallback.Classify(bouncer("prepared statement did not exist"), named(tracking)))
	if l.Strategy() != fallback.Unprepared {
		t.Errorf("shared names behind a tracking pooler are fatal, and yet %v", l.Strategy())
	}
}

func TestCountToleratesWarmingUpAndNotAPoolerThatForgets(t *testing.T) {
	t.Parallel()
	// A new pool: 20 servers and 200 statements, drawn evenly.
	l, _ := newLatch(fallback.LatchConfig{Policy: fallback.PolicyShared})
	d := l.Settle(t.Context(), raw)
	known := map[int]bool{}
	random := uint32(1)
	for range 20000 {
		random = random*1664525 + 1013904223
		key := int(random>>8) % 4000
		missed := !known[key]
		known[key] = true
		if l.Count(t.Context(), d, missed) {
			t.Fatalf("gave up while %d of 4000 names were known", len(known))
		}
	}
	// Then somebody resets the servers all the time.
	n := 0
	for ; n < 3000 && !l.Count(t.Context(), d, n%5 == 0); n++ {
	}
	if l.Strategy() != fallback.Unprepared || n > 3000 {
		t.Fatalf("at %v after %d", l.Strategy(), n)
	}
	if !l.Due() && l.Count(t.Context(), l.Decision(), true) {
		t.Error("an unprepared decision counts")
	}
	// A tenth of misses is tolerated for ever.
	l, _ = newLatch(fallback.LatchConfig{Policy: fallback.PolicyShared})
	d = l.Settle(t.Context(), raw)
	for i := range 10000 {
		if l.Count(t.Context(), d, i%10 == 0) {
			t.Fatal("gave up at exactly a tenth")
		}
	}
}

func TestCountFromManyGoroutinesGivesUpOnce(t *testing.T) {
	t.Parallel()
	l, j := newLatch(fallback.LatchConfig{Policy: fallback.PolicyShared})
	d := l.Settle(t.Context(), raw)
	var gaveUp atomic.Int32
	var wg sync.WaitGroup
	for range 64 {
		wg.Go(func() {
			for range 200 {
				if l.Count(context.Background(), d, true) {
					gaveUp.Add(1)
				}
			}
		})
	}
	wg.Wait()
	if gaveUp.Load() != 1 || j.count("WARN") != 1 {
		t.Fatalf("gave up %d times\n%s", gaveUp.Load(), j)
	}
}

// Everything at once, for the race detector; each change is reported exactly once.
func TestLatchUnderLoad(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l, j := newLatch(fallback.LatchConfig{})
		v := evidence26000(t)
		var wg sync.WaitGroup
		for g := range 64 {
			wg.Go(func() {
				for i := range 200 {
					d := l.Decision()
					if d.Strategy == fallback.Named && (i+g)%5 == 0 {
						l.Trip(context.Background(), d, v)
					}
					if l.Due() {
						if i%7 == 0 {
							l.Fail(context.Background(), errors.New("x"))
						} else {
							l.Settle(context.Background(), []fallback.Topology{session, tracking, raw}[i%3])
						}
					}
					_ = l.Strategy()
					time.Sleep(time.Second)
				}
			})
		}
		wg.Wait()
		numbers := map[uint64]bool{}
		for _, c := range j.changes {
			if c.From == c.To || numbers[c.Number] {
				t.Fatalf("change %+v", c)
			}
			numbers[c.Number] = true
		}
		if len(j.changes) < 4 {
			t.Errorf("only %d changes", len(j.changes))
		}
	})
}

func TestLatchHotPathDoesNotAllocate(t *testing.T) {
	l, _ := newLatch(fallback.LatchConfig{Policy: fallback.PolicyShared})
	d := l.Settle(t.Context(), raw)
	if n := testing.AllocsPerRun(100, func() {
		_ = l.Strategy()
		_ = l.Decision().Pooled
		_ = l.Due()
		_ = l.Count(context.Background(), d, false)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkLatch(b *testing.B) {
	settled := fallback.NewLatch(fallback.LatchConfig{})
	settled.Settle(b.Context(), direct)
	waiting := fallback.NewLatch(fallback.LatchConfig{Logger: slog.New(slog.DiscardHandler)})
	waiting.Settle(b.Context(), raw)
	b.Run("Decision", func(b *testing.B) {
		for b.Loop() {
			_ = settled.Decision().Strategy
		}
	})
	b.Run("Due/settled", func(b *testing.B) {
		for b.Loop() {
			_ = settled.Due()
		}
	})
	b.Run("Due/waiting", func(b *testing.B) {
		for b.Loop() {
			_ = waiting.Due()
		}
	})
}
