package proxy

import "slices"

// Cut is a planned break of one connection: the first on which its condition comes true. Messages count from the
// moment the cut was planned, over all connections, beginning with a connection's first query: the exchange that
// sets a connection up is not counted and never cut.
type Cut struct {
	proxy  *Proxy
	side   Side
	kind   byte // 0 is any
	before bool
	bytes  bool

	left  int // guarded by proxy.mu, like fired
	fired bool
	done  chan struct{}
}

// CutBefore cuts a connection in place of forwarding the nth message of a type from a side; type 0 is any, n counts
// from 1. What came before is forwarded.
func (p *Proxy) CutBefore(side Side, kind byte, n int) *Cut {
	return p.plan(&Cut{side: side, kind: kind, before: true, left: n})
}

// CutAfter cuts a connection when the nth message of a type from a side has been forwarded to its last byte; type 0 is
// any, n counts from 1. A server still gets and executes what was forwarded; no answer comes back.
func (p *Proxy) CutAfter(side Side, kind byte, n int) *Cut {
	return p.plan(&Cut{side: side, kind: kind, left: n})
}

// CutAfterBytes cuts a connection when n bytes from a side have been forwarded, which may be within a message.
func (p *Proxy) CutAfterBytes(side Side, n int) *Cut {
	return p.plan(&Cut{side: side, bytes: true, left: n})
}

func (p *Proxy) plan(c *Cut) *Cut {
	if c.left < 1 {
		panic("proxy: a cut counts from 1")
	}
	c.proxy, c.done = p, make(chan struct{})
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cuts = append(p.cuts, c)
	return c
}

// Fired reports whether the cut has happened. A loop over every boundary of an operation ends when it has not.
func (c *Cut) Fired() bool {
	c.proxy.mu.Lock()
	defer c.proxy.mu.Unlock()
	return c.fired
}

// Done is closed when the cut has happened.
func (c *Cut) Done() <-chan struct{} { return c.done }

// Cancel withdraws the cut if it has not happened.
func (c *Cut) Cancel() {
	c.proxy.mu.Lock()
	defer c.proxy.mu.Unlock()
	c.proxy.dropLocked(c)
}

func (p *Proxy) dropLocked(gone *Cut) {
	p.cuts = slices.DeleteFunc(p.cuts, func(c *Cut) bool { return c == gone })
}

func (p *Proxy) fireLocked(c *Cut) {
	c.fired = true
	close(c.done)
	p.dropLocked(c)
}

// beginLocked counts a message that begins. It reports whether a connection is to be cut in place of it, and otherwise
// which cuts happen after it.
func (p *Proxy) beginLocked(side Side, kind byte) (cut bool, after []*Cut) {
	for _, c := range slices.Clone(p.cuts) {
		if c.bytes || c.side != side || c.kind != 0 && c.kind != kind {
			continue
		}
		switch c.left--; {
		case c.left > 0:
		case c.before:
			p.fireLocked(c)
			cut = true
		default:
			p.dropLocked(c) // this message's, and no other connection's
			after = append(after, c)
		}
	}
	return cut, after
}

// bytesLocked returns how many of n bytes may still be forwarded, and whether the connection is cut after them.
func (p *Proxy) bytesLocked(side Side, n int) (int, bool) {
	fired := false
	for _, c := range slices.Clone(p.cuts) {
		if !c.bytes || c.side != side {
			continue
		}
		if c.left > n {
			c.left -= n
			continue
		}
		n, fired = c.left, true
		p.fireLocked(c)
	}
	return n, fired
}
