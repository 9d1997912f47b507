package fallback

import (
	"context"
	"log/slog"
	"math"
	"sync"
	"sync/atomic"
	"time"
)

const (
	defaultReprobeAfter = 30 * time.Second
	maxReprobeAfter     = 10 * time.Minute
	// probeLease is how long an elected caller may keep the others from probing. A probe takes two seconds and the time to connect.
	probeLease = 15 * time.Second
	// probeRetry is the wait after a probe that found nothing out, doubled with each further one.
	probeRetry = time.Second
	// calm is how long named statements must have worked before a new failure counts as the first.
	calm = 6 * maxReprobeAfter
)

// Decision is what a [Latch] stands at: how to run stable statements, and why. It is immutable; do not change what it points to.
type Decision struct {
	// Strategy is how to run stable statements now.
	Strategy Strategy
	// Pooled says that rows have to be described with each execution. False only after a probe proved a direct connection.
	Pooled bool
	// Topology is what the last probe, or an error since, says is there.
	Topology Topology
	// Number counts the decisions of a latch, from 1.
	Number uint64

	window *window // misses of Shared; nil for the other strategies
}

// Change is a latch's move from one strategy to another.
type Change struct {
	// From and To are the strategies. They differ.
	From, To Strategy
	// Topology is what the new strategy is for.
	Topology Topology
	// Verdict is the evidence that caused the change; its Reason is ReasonNone when a probe did.
	Verdict Verdict
	// Number is that of the new [Decision]: callbacks of several changes may arrive out of order.
	Number uint64
}

// LatchConfig configures a [Latch]. The zero value works.
type LatchConfig struct {
	// Policy is what the user wants. The zero value is [PolicyAuto].
	Policy Policy
	// Logger receives one WARN for each change away from named statements and one INFO for each way back. Nil is slog.Default().
	Logger *slog.Logger
	// ReprobeAfter is the wait before the first renewed probe; it doubles with each further one up to ten minutes (or stays, if it is
	// longer than that), and is forgotten after an hour of named statements that work. Zero means 30 seconds, negative never.
	ReprobeAfter time.Duration
	// OnChange is called after each change, on the goroutine that caused it, without a lock held. Nil is allowed.
	OnChange func(Change)
}

// Latch holds how a whole pool runs its stable statements. It starts [Undecided] (or decided by [PolicyOn] and [PolicyOff]), is settled by
// a probe, goes down on evidence, and comes back when a later probe finds that named statements work again. It owns no goroutine and no
// timer: [Latch.Due] elects the caller who is to probe.
//
// All methods are safe for concurrent use.
type Latch struct {
	config LatchConfig
	start  time.Time

	now atomic.Pointer[Decision]
	due atomic.Int64 // nanoseconds since start at which the next caller is to probe; 0 = not at all

	mu       sync.Mutex    // guards what follows, and changes of now
	wait     time.Duration // until the next renewed probe
	retry    time.Duration // until the next attempt after a failed probe
	restored time.Duration // since start: when named statements were last taken up
	held     time.Duration // since start: until then a topology like failed does not bring named statements back
	failed   Topology
	warned   bool // about a probe that fails
}

// NewLatch returns a latch. Without a probe it is undecided, and the first call of Due is told to probe.
func NewLatch(config LatchConfig) *Latch {
	if config.Logger == nil {
		config.Logger = slog.Default()
	}
	if config.ReprobeAfter == 0 {
		config.ReprobeAfter = defaultReprobeAfter
	}
	l := &Latch{config: config, start: time.Now(), wait: config.ReprobeAfter, retry: probeRetry}
	first := &Decision{Strategy: config.Policy.strategy(Topology{}), Pooled: true, Number: 1}
	l.now.Store(first)
	if config.Policy != PolicyOff {
		l.due.Store(1)
	}
	return l
}

// Decision returns what to do now: one atomic load, no allocation. Take it once at the beginning of an execution and hand the same one to
// [Latch.Trip], so that evidence against a decision of the past does not count against the present one.
func (l *Latch) Decision() *Decision { return l.now.Load() }

// Strategy is Decision().Strategy.
func (l *Latch) Strategy() Strategy { return l.now.Load().Strategy }

// Due reports whether the caller should probe, and then call [Latch.Settle] or [Latch.Fail]. It answers true to one caller only; should
// that one never come back, to another one 15 seconds later. While nothing is due it is one atomic load, and no clock is read unless a
// probe is planned.
func (l *Latch) Due() bool {
	due := l.due.Load()
	if due == 0 {
		return false
	}
	now := l.clock()
	if int64(now) < due {
		return false
	}
	return l.due.CompareAndSwap(due, int64(now+probeLease))
}

// Settle takes the result of a probe and returns the decision that follows from it. Anybody may call it at any time.
func (l *Latch) Settle(ctx context.Context, t Topology) *Decision {
	l.mu.Lock()
	before := l.now.Load()
	to := l.config.Policy.strategy(t)
	if l.clock() < l.held && t.Mode == l.failed.Mode && t.Tracks == l.failed.Tracks {
		to = before.Strategy // it looked like this when it failed; whoever probes out of turn does not shorten the wait
	}
	after := l.publish(to, t)
	l.retry, l.warned = probeRetry, false
	switch {
	case l.config.Policy == PolicyOn || l.config.Policy == PolicyOff, to == Named:
		l.due.Store(0)
		if before.Strategy != Named {
			l.restored = l.clock()
		}
	case l.clock() >= l.held:
		l.plan()
	}
	next := l.next()
	l.mu.Unlock()
	l.report(ctx, before, after, Verdict{}, next)
	return after
}

// Fail takes the error of a probe that found nothing out. The decision stays, and a later call of Due asks again: after a second, then
// two, up to ReprobeAfter's limit.
func (l *Latch) Fail(ctx context.Context, err error) {
	l.mu.Lock()
	if l.config.Policy != PolicyOff {
		l.due.Store(int64(l.clock() + l.retry))
	}
	l.retry = min(2*l.retry, maxReprobeAfter)
	warn := !l.warned && ctx.Err() == nil && l.now.Load().Strategy == Undecided
	l.warned = l.warned || warn
	l.mu.Unlock()
	level := slog.LevelDebug
	if warn {
		level = slog.LevelWarn
	}
	l.config.Logger.LogAttrs(ctx, level, "bounceproof: cannot tell whether prepared statements work here, running without them",
		slog.Any("error", err))
}

// Trip takes a verdict with evidence and reports whether it changed the decision. ran is the decision under which the failed statement
// ran: if it is not the present one, the evidence is old news. A verdict without evidence, and any under [PolicyOn] and [PolicyOff],
// changes no strategy.
func (l *Latch) Trip(ctx context.Context, ran *Decision, v Verdict) bool {
	if !v.Evidence || l.now.Load() != ran {
		return false
	}
	l.mu.Lock()
	if l.now.Load() != ran {
		l.mu.Unlock()
		return false
	}
	to, t, soon := l.fall(ran, v)
	if to == ran.Strategy && t.Mode == ran.Topology.Mode {
		l.mu.Unlock()
		return false
	}
	after := l.publish(to, t)
	switch {
	case l.config.Policy == PolicyOff:
	case soon:
		l.due.Store(int64(l.clock()))
	case to == Unprepared || to == Shared:
		if ran.Strategy == Named && l.clock()-l.restored >= calm {
			l.wait = l.config.ReprobeAfter
		}
		l.plan()
		l.held, l.failed = time.Duration(l.due.Load()), ran.Topology
		if l.config.ReprobeAfter < 0 {
			l.held = math.MaxInt64
		}
	}
	next := l.next()
	l.mu.Unlock()
	l.report(ctx, ran, after, v, next)
	return true
}

// fall decides where evidence leads from a decision, and whether the topology has to be looked at again at once.
func (l *Latch) fall(ran *Decision, v Verdict) (to Strategy, t Topology, soon bool) {
	to, t = ran.Strategy, ran.Topology
	if v.PoolerMade && t.Mode == ModeDirect {
		// The address means something else than it did: assume the worst until a probe has looked.
		t = Topology{Pooler: PoolerOther, Evidence: []string{"a pooler answered on what was a direct connection"}}
		return l.config.Policy.strategy(t), t, true
	}
	if v.Reason == ReasonStatementMode {
		t.Mode = ModeStatement
		t.Evidence = append(t.Evidence[:len(t.Evidence):len(t.Evidence)], "it refused a transaction")
		if !t.Known() {
			t.Pooler = PoolerOther
		}
		return l.config.Policy.strategy(t), t, false
	}
	if l.config.Policy != PolicyAuto && l.config.Policy != PolicyShared || to != Named && to != Shared {
		return to, t, false
	}
	if l.config.Policy == PolicyShared && to == Named && !t.Tracks && !v.PoolerMade {
		return Shared, t, false
	}
	return Unprepared, t, false
}

// publish makes a decision the present one. The caller holds mu.
func (l *Latch) publish(s Strategy, t Topology) *Decision {
	before := l.now.Load()
	d := &Decision{Strategy: s, Pooled: t.Pooled(), Topology: t, Number: before.Number + 1}
	if s == Shared {
		// A probe that confirms what was decided takes nothing back of what was counted.
		if d.window = before.window; d.window == nil {
			d.window = new(window)
		}
	}
	l.now.Store(d)
	return d
}

// plan sets the time of the next renewed probe. The caller holds mu.
func (l *Latch) plan() {
	if l.config.ReprobeAfter < 0 {
		l.due.Store(0)
		return
	}
	l.due.Store(int64(l.clock() + l.wait))
	if l.wait < maxReprobeAfter {
		l.wait = min(2*l.wait, maxReprobeAfter)
	}
}

// clock is the time since just before the latch was made: never 0, which stands for "not at all" in due.
func (l *Latch) clock() time.Duration { return time.Since(l.start) + 1 }

// next is how long it is until the next renewed probe; negative if there will be none.
func (l *Latch) next() time.Duration {
	due := time.Duration(l.due.Load())
	if due == 0 {
		return -1
	}
	return max(0, due-l.clock())
}

// report logs a change and calls OnChange.
func (l *Latch) report(ctx context.Context, before, after *Decision, v Verdict, next time.Duration) {
	if before.Strategy == after.Strategy {
		return
	}
	level, message := slog.LevelWarn, "bounceproof: prepared statements are not used any more, running without them"
	switch {
	case after.Strategy == Named && before.Strategy == Undecided:
		level, message = slog.LevelDebug, "bounceproof: prepared statements are in use"
	case after.Strategy == Named:
		level, message = slog.LevelInfo, "bounceproof: prepared statements are back in use"
	case after.Strategy == Shared && v.Reason == ReasonNone:
		level, message = slog.LevelInfo, "bounceproof: prepared statements are shared between server connections"
	case after.Strategy == Shared:
		message = "bounceproof: prepared statements are shared between server connections from now on"
	case before.Strategy == Undecided:
		message = "bounceproof: prepared statements cannot be used here, running without them"
	}
	attrs := []slog.Attr{
		slog.String("from", before.Strategy.String()),
		slog.String("to", after.Strategy.String()),
		slog.Any("topology", after.Topology),
	}
	if level == slog.LevelWarn {
		if v.Reason != ReasonNone {
			attrs = append(attrs, slog.Any("cause", v))
		}
		attrs = append(attrs, slog.String("remedy", remedy(after, v)))
		if next >= 0 {
			attrs = append(attrs, slog.Duration("next_probe", next.Round(time.Second)))
		}
	}
	l.config.Logger.LogAttrs(ctx, level, message, attrs...)
	if l.config.OnChange != nil {
		l.config.OnChange(Change{
			From: before.Strategy, To: after.Strategy, Topology: after.Topology, Verdict: v, Number: after.Number,
		})
	}
}

// remedy says what a person can do about a change away from named statements.
func remedy(d *Decision, v Verdict) string {
	switch {
	case v.Reason == ReasonPreparedLost && d.Topology.Mode == ModeDirect:
		return "find what runs DISCARD ALL or DEALLOCATE on the pool's connections, or set prepared statements to off to silence this"
	case v.Evidence && d.Topology.Tracks:
		return "upgrade PgBouncer to 1.22 or newer and find the client that runs DEALLOCATE or DISCARD ALL," +
			" or set prepared statements to off to silence this"
	default:
		return "set max_prepared_statements above 0 in PgBouncer (1.21 or newer; upgrade an older one)," +
			" or set prepared statements to shared, or to off to silence this"
	}
}
