package selector

import (
	"context"
	"log/slog"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/bounceproof/bounceproof/fallback"
)

// DefaultReprobeAfter is the wait before the first renewed probe.
const DefaultReprobeAfter = 30 * time.Second

const (
	maxReprobeAfter = 10 * time.Minute
	// probeLease is how long an elected caller may keep the others from probing. A probe takes two seconds and the time to connect.
	probeLease = 15 * time.Second
	// probeRetry is the wait after a probe that found nothing out, or left open what it was for; doubled with each further one.
	probeRetry = time.Second
	// forgetAfter is how long named statements must have worked before a new failure counts as the first.
	forgetAfter = 6 * maxReprobeAfter
)

// Decision is what a [Selector] stands at: how to run stable statements, and why. It is immutable; do not change what it points to.
type Decision struct {
	// Strategy is how to run stable statements now.
	Strategy fallback.Strategy
	// Pooled says that rows have to be described with each execution. False only after a probe proved a direct connection.
	Pooled bool
	// Topology is what the last probe, or an error since, says is there.
	Topology fallback.Topology
	// Number counts the decisions of a selector, from 1.
	Number int64

	window *window // misses of shared names; nil for the other strategies
}

// Change is a selector's move from one strategy to another.
type Change struct {
	// From and To are the strategies. They differ.
	From, To fallback.Strategy
	// Topology is what the new strategy is for.
	Topology fallback.Topology
	// Verdict is the evidence that caused the change; its Reason is ReasonNone when a probe did.
	Verdict fallback.Verdict
	// Number is that of the new [Decision]: callbacks of several changes may arrive out of order.
	Number int64
}

// Config configures a [Selector]. The zero value works.
type Config struct {
	// Policy is what the user wants. The zero value is [Auto].
	Policy Policy
	// Logger receives one WARN for each change away from named statements and one INFO for each way back. Nil is slog.Default().
	Logger *slog.Logger
	// ReprobeAfter is the wait before the first renewed probe; it doubles with each further one up to ten minutes (or stays, if it is
	// longer than that), and is forgotten after an hour of named statements that work. Zero means 30 seconds, negative never.
	ReprobeAfter time.Duration
	// OnChange is called after each change, on the goroutine that caused it, without a lock held. Nil is allowed.
	OnChange func(Change)
}

// Selector holds how a whole pool runs its stable statements. It starts [fallback.Undecided] (or decided by [On] and [Off]), is settled by
// a probe, goes down on evidence, and comes back when a later probe finds that named statements work again. It owns no goroutine and no
// timer: [Selector.ShouldProbe] elects the caller who is to probe.
//
// All methods are safe for concurrent use.
type Selector struct {
	config Config
	start  time.Time

	current atomic.Pointer[Decision]
	probeAt atomic.Int64 // nanoseconds since start at which the next caller is to probe; 0 = not at all

	mu          sync.Mutex           // guards what follows, and changes of current
	reprobeWait time.Duration        // until the next renewed probe
	retryWait   time.Duration        // until the next attempt after a probe that failed, or left something open
	namedSince  time.Duration        // since start: when named statements were last taken up
	holdUntil   time.Duration        // since start: until then a topology like one of failedAs does not bring named statements back
	failedAs    [2]fallback.Topology // what was taken to be there when they failed, and what was known then
	warned      bool                 // about a probe that fails
}

// New returns a selector. Without a probe it is undecided, and the first call of ShouldProbe is told to probe.
func New(config Config) *Selector {
	if config.Logger == nil {
		config.Logger = slog.Default()
	}
	if config.ReprobeAfter == 0 {
		config.ReprobeAfter = DefaultReprobeAfter
	}
	s := &Selector{config: config, start: time.Now(), reprobeWait: config.ReprobeAfter, retryWait: probeRetry}
	first := &Decision{Strategy: config.Policy.Strategy(fallback.Topology{}), Pooled: true, Number: 1}
	s.current.Store(first)
	if config.Policy != Off {
		s.probeAt.Store(1)
	}
	return s
}

// Decision returns what to do now: one atomic load, no allocation. Take it once at the beginning of an execution and hand the same one to
// [Selector.Observe], so that evidence against a decision of the past does not count against the present one.
func (s *Selector) Decision() *Decision { return s.current.Load() }

// ShouldProbe reports whether the caller should probe, and then call [Selector.Probed] or [Selector.ProbeFailed]. It answers true to one caller only; should
// that one never come back, to another one 15 seconds later. While nothing is due it is one atomic load, and no clock is read unless a
// probe is planned.
func (s *Selector) ShouldProbe() bool {
	due := s.probeAt.Load()
	if due == 0 {
		return false
	}
	now := s.clock()
	if int64(now) < due {
		return false
	}
	return s.probeAt.CompareAndSwap(due, int64(now+probeLease))
}

// Probed takes the result of a probe and returns the decision that follows from it. Anybody may call it at any time.
func (s *Selector) Probed(ctx context.Context, t fallback.Topology) *Decision {
	s.mu.Lock()
	before := s.current.Load()
	to := s.config.Policy.Strategy(t)
	if s.clock() < s.holdUntil && (alike(t, s.failedAs[0]) || alike(t, s.failedAs[1])) {
		to = before.Strategy // it looked like this when it failed; whoever probes out of turn does not shorten the wait
	}
	after := s.setLocked(to, t)
	s.warned = false
	if !t.Open() {
		s.retryWait = probeRetry
	}
	switch {
	case t.Open() && s.config.Policy != On && s.config.Policy != Off && s.clock() >= s.holdUntil:
		s.retryLocked()
	case s.config.Policy == On || s.config.Policy == Off, to == fallback.Named:
		s.probeAt.Store(0)
		if before.Strategy != fallback.Named {
			s.namedSince = s.clock()
		}
	case s.clock() >= s.holdUntil:
		s.scheduleProbeLocked()
	}
	next := s.untilProbe()
	s.mu.Unlock()
	s.announce(ctx, before, after, fallback.Verdict{}, next)
	return after
}

// ProbeFailed takes the error of a probe that found nothing out. The decision stays, and a later call of ShouldProbe asks again: after a second, then
// two, up to ReprobeAfter's limit.
func (s *Selector) ProbeFailed(ctx context.Context, err error) {
	s.mu.Lock()
	s.retryLocked()
	warn := !s.warned && ctx.Err() == nil && s.current.Load().Strategy == fallback.Undecided
	s.warned = s.warned || warn
	s.mu.Unlock()
	level := slog.LevelDebug
	if warn {
		level = slog.LevelWarn
	}
	s.config.Logger.LogAttrs(ctx, level, "bounceproof: cannot tell whether prepared statements work here, running without them",
		slog.Any("error", err))
}

// Observe takes a verdict with evidence and reports whether it changed the decision. ran is the decision under which the failed statement
// ran: if it is not the present one, the evidence is old news. A verdict without evidence, and any under [On] and [Off],
// changes no strategy.
func (s *Selector) Observe(ctx context.Context, ran *Decision, v fallback.Verdict) bool {
	if !v.Evidence || s.current.Load() != ran {
		return false
	}
	s.mu.Lock()
	if s.current.Load() != ran {
		s.mu.Unlock()
		return false
	}
	to, t, soon := s.downgrade(ran, v)
	if to == ran.Strategy && alike(t, ran.Topology) && t.Forwards == ran.Topology.Forwards {
		s.mu.Unlock()
		return false
	}
	after := s.setLocked(to, t)
	switch {
	case s.config.Policy == Off:
	case soon:
		s.probeAt.Store(int64(s.clock()))
	case to == fallback.Unprepared || to == fallback.Shared:
		if ran.Strategy == fallback.Named && s.clock()-s.namedSince >= forgetAfter {
			s.reprobeWait = s.config.ReprobeAfter
		}
		s.scheduleProbeLocked()
		s.holdUntil, s.failedAs = time.Duration(s.probeAt.Load()), [2]fallback.Topology{ran.Topology, t}
		if s.config.ReprobeAfter < 0 {
			s.holdUntil = math.MaxInt64
		}
		if v.Reason == fallback.ReasonDisorder && ran.Topology.Mode == fallback.ModeDirect {
			// A probe does not see what hides behind the server's process id, and each return to names would cost a caller an error.
			s.holdUntil = math.MaxInt64
			s.probeAt.Store(0)
		}
	}
	next := s.untilProbe()
	s.mu.Unlock()
	s.announce(ctx, ran, after, v, next)
	return true
}

// downgrade decides where evidence leads from a decision, and whether the topology has to be looked at again at once.
func (s *Selector) downgrade(ran *Decision, v fallback.Verdict) (to fallback.Strategy, t fallback.Topology, soon bool) {
	to, t = ran.Strategy, ran.Topology.After(v)
	if v.PoolerMade && t.Mode == fallback.ModeDirect {
		// The address means something else than it did: assume the worst until a probe has looked.
		t = fallback.Topology{Pooler: fallback.PoolerOther, Evidence: []string{"a pooler answered on what was a direct connection"}}
		return s.config.Policy.Strategy(t), t, true
	}
	if v.Reason == fallback.ReasonStatementMode {
		t.Mode = fallback.ModeStatement
		t.Evidence = append(t.Evidence[:len(t.Evidence):len(t.Evidence)], "it refused a transaction")
		if !t.Known() {
			return to, t, true // nobody has looked yet, so nothing is known about names: a probe tells
		}
		return s.config.Policy.Strategy(t), t, t.Open()
	}
	if s.config.Policy != Auto && s.config.Policy != Shared || to != fallback.Named && to != fallback.Shared {
		return to, t, false
	}
	// Where it was seen to track, and one error says otherwise, a probe tells.
	if s.config.Policy == Shared && to == fallback.Named && t.Forwards && !ran.Topology.Tracks && !v.PoolerMade {
		return fallback.Shared, t, false
	}
	return fallback.Unprepared, t, false
}

// setLocked makes a decision the present one. The caller holds mu.
func (s *Selector) setLocked(strategy fallback.Strategy, t fallback.Topology) *Decision {
	before := s.current.Load()
	d := &Decision{Strategy: strategy, Pooled: t.Pooled(), Topology: t, Number: before.Number + 1}
	if strategy == fallback.Shared {
		// A probe that confirms what was decided takes nothing back of what was counted.
		if d.window = before.window; d.window == nil {
			d.window = new(window)
		}
	}
	s.current.Store(d)
	return d
}

// alike reports whether two topologies say the same of how names can be used.
func alike(a, b fallback.Topology) bool { return a.Mode == b.Mode && a.Tracks == b.Tracks }

// retryLocked sets the time of the next attempt after a probe that failed, or left something open. The caller holds mu.
func (s *Selector) retryLocked() {
	if s.config.Policy != Off {
		s.probeAt.Store(int64(s.clock() + s.retryWait))
	}
	s.retryWait = min(2*s.retryWait, maxReprobeAfter)
}

// scheduleProbeLocked sets the time of the next renewed probe. The caller holds mu.
func (s *Selector) scheduleProbeLocked() {
	if s.config.ReprobeAfter < 0 {
		s.probeAt.Store(0)
		return
	}
	s.probeAt.Store(int64(s.clock() + s.reprobeWait))
	if s.reprobeWait < maxReprobeAfter {
		s.reprobeWait = min(2*s.reprobeWait, maxReprobeAfter)
	}
}

// clock is the time since just before the selector was made: never 0, which stands for "not at all" in probeAt.
func (s *Selector) clock() time.Duration { return time.Since(s.start) + 1 }

// untilProbe is how long it is until the next renewed probe; negative if there will be none.
func (s *Selector) untilProbe() time.Duration {
	due := time.Duration(s.probeAt.Load())
	if due == 0 {
		return -1
	}
	return max(0, due-s.clock())
}
