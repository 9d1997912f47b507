// Package backoff holds the one way this project waits between attempts: exponential, with full jitter, and
// interruptible.
//
// Full jitter (a delay drawn uniformly between zero and the exponential bound) is chosen over "bound plus or minus a
// little" because its purpose is to spread processes that failed at the same moment, such as every listener of a server
// that restarts: a small jitter moves the burst, full jitter dissolves it.
package backoff

import (
	"context"
	"math/rand/v2"
	"time"
)

// Policy is an exponential backoff. The zero value waits not at all. A Policy is a value without state and safe for
// concurrent use.
type Policy struct {
	Base time.Duration // bound of the first delay
	Max  time.Duration // bound of every delay; 0 means Base
}

// Bound returns the longest delay before the given attempt's successor: Base after attempt 1, twice that after attempt 2
// and so on, up to Max. Attempts below 1 count as 1.
func (p Policy) Bound(attempt int) time.Duration {
	limit := max(p.Base, p.Max)
	bound := p.Base
	for i := 1; i < attempt && bound < limit; i++ {
		if bound > limit/2 {
			return limit // doubling would pass the limit, or overflow
		}
		bound *= 2
	}
	return bound
}

// Delay returns a delay drawn uniformly from (0, Bound(attempt)]. It is 0 only when the bound is.
func (p Policy) Delay(attempt int) time.Duration {
	bound := p.Bound(attempt)
	if bound <= 0 {
		return 0
	}
	return 1 + rand.N(bound)
}

// Spread returns a duration drawn uniformly from [d-d*by, d+d*by], for periodic work that must not fall into step with
// that of other processes. by is clamped to [0, 1].
func Spread(d time.Duration, by float64) time.Duration {
	by = min(max(by, 0), 1)
	width := time.Duration(float64(d) * by)
	if width <= 0 {
		return d
	}
	return d - width + rand.N(2*width+1)
}

// Wait sleeps for d, or until ctx is done, in which case it returns the cause. A d of zero or less returns at once, but
// still reports a ctx that is done.
func Wait(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return context.Cause(ctx)
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
