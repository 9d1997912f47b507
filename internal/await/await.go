// Package await lets tests wait for what others do in their own time: servers, other goroutines.
package await

import (
	"testing"
	"time"
)

// Deadline is how long a condition may take. It is far more than anything takes, so that only a fault runs into it and
// not a busy machine.
const Deadline = 30 * time.Second

// True returns when cond does, which it is asked every few milliseconds, on the goroutine of the caller, which must be
// the test's. The test fails, and ends, when cond is false for longer than [Deadline]; what says in a few words what was
// waited for.
func True(t testing.TB, what string, cond func() bool) {
	t.Helper()
	Within(t, Deadline, what, cond)
}

// Within is [True] with another limit.
func Within(t testing.TB, limit time.Duration, what string, cond func() bool) {
	t.Helper()
	for start := time.Now(); !cond(); time.Sleep(5 * time.Millisecond) {
		if time.Since(start) > limit {
			t.Fatalf("not within %v: %s", limit, what)
		}
	}
}
