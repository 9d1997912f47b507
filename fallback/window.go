package fallback

import (
	"context"
	"sync/atomic"
)

const (
	windowSize = 1000 // executions
	windowMost = 100  // misses in one window
)

// window counts the executions of shared statements and their misses: executions in the upper half, misses in the lower.
type window struct {
	counts atomic.Uint64
	last   atomic.Uint32 // misses of the window before; 0 = none yet
}

// Count tells the latch how an execution went that ran [Shared]: whether the name was missing on the server. It reports whether the latch
// gave up on shared statements: more than a tenth of a thousand executions missed, and not markedly fewer than in the thousand before.
// The second condition lets a new pool warm up: twenty servers times two hundred statements miss four thousand times by right, at a
// falling rate, while a pooler that resets its servers, or a neighbour that does, makes them miss at a steady one.
//
// It costs one atomic addition, and does nothing for decisions of another strategy.
func (l *Latch) Count(ctx context.Context, ran *Decision, missed bool) bool {
	w := ran.window
	if w == nil {
		return false
	}
	add := uint64(1) << 32
	if missed {
		add++
	}
	counts := w.counts.Add(add)
	if counts>>32 != windowSize {
		return false
	}
	// Exactly one execution is the thousandth. Those counted between the two lines go to the next window.
	w.counts.Add(-counts)
	misses := uint32(counts) // at most windowSize
	last := w.last.Swap(misses)
	if misses <= windowMost || last == 0 || misses < last-last/10 {
		return false
	}
	return l.Trip(ctx, ran, Verdict{Reason: ReasonPreparedLost, Executed: No, Connection: Alive, Evidence: true})
}
