package pgscript

import (
	"context"
	"sync"
	"time"
)

// Tripping is a context that ends by itself when it is looked at for the kth time. late is how many more looks it takes until Done says
// what Err says already: the standard library's contexts set Err first, so another goroutine's cancel can show in one and not yet in the
// other.
type Tripping struct {
	context.Context
	done chan struct{}

	mu   sync.Mutex
	k    int
	late int
}

// TripAt returns a context that ends when it is looked at for the kth time. Safe for concurrent use.
func TripAt(ctx context.Context, k, late int) *Tripping {
	return &Tripping{Context: ctx, done: make(chan struct{}), k: k, late: late}
}

func (c *Tripping) look() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.k--
	if c.k == -c.late {
		close(c.done)
	}
	return c.k <= 0
}

// Tripped reports whether it has ended.
func (c *Tripping) Tripped() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.k <= 0
}

// Done is looked at, like Err.
func (c *Tripping) Done() <-chan struct{} {
	c.look()
	return c.done
}

// Err is looked at, like Done.
func (c *Tripping) Err() error {
	if c.look() {
		return context.Canceled
	}
	return nil
}

// Deadline is none.
func (c *Tripping) Deadline() (time.Time, bool) { return time.Time{}, false }
