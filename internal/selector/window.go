package selector

import (
	"context"
	"sync/atomic"

	"github.com/bounceproof/bounceproof/fallback"
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

// CountShared tells the selector how an execution went that ran [fallback.Shared]: whether the name was missing on the server. It reports whether the selector
// gave up on shared statements: more than a tenth of a thousand executions missed, and not markedly fewer than in the thousand before.
// The second condition lets a new pool warm up: twenty servers times two hundred statements miss four thousand times by right, at a
// falling rate, while a pooler that resets its servers, or a neighbour that does, makes them miss at a steady one.
//
// It costs one atomic addition, and does nothing for decisions of another strategy.
func (s *Selector) CountShared(ctx context.Context, ran *Decision, missed bool) bool {
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
	return s.Observe(ctx, ran, fallback.Verdict{Reason: fallback.ReasonPreparedLost, Executed: fallback.No, Connection: fallback.Alive, Evidence: true})
}
