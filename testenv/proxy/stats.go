package proxy

import "maps"

// Counts holds what one connection, or all of them, have exchanged since the connection was set up or Reset was called.
// The start-up exchange up to the first ReadyForQuery is not counted.
type Counts struct {
	// RoundTrips is how often the client sent a request while none was unanswered. Requests that follow before the
	// answer to an earlier one has come belong to the same round trip. A request is a Query, Sync, Flush or function
	// call; COPY data is part of its query, since clients such as pgconn do not wait before they send it.
	RoundTrips int
	// Syncs is the number of requests that ReadyForQuery answers: Sync, Query and function call messages.
	Syncs int
	// Frontend and Backend count messages by type byte, and Bytes the bytes, headers included.
	Frontend, Backend           map[byte]int
	FrontendBytes, BackendBytes int
}

func (c *Counts) add(o *Counts) {
	c.RoundTrips += o.RoundTrips
	c.Syncs += o.Syncs
	c.FrontendBytes += o.FrontendBytes
	c.BackendBytes += o.BackendBytes
	for k, n := range o.Frontend {
		c.Frontend[k] += n
	}
	for k, n := range o.Backend {
		c.Backend[k] += n
	}
}

func (c *Counts) bytes(side Side) *int {
	if side == Backend {
		return &c.BackendBytes
	}
	return &c.FrontendBytes
}

func newCounts() Counts {
	return Counts{Frontend: map[byte]int{}, Backend: map[byte]int{}}
}

// Counts returns the sum over all connections, also closed ones. When the client has read the end of an answer,
// everything up to there is counted.
func (p *Proxy) Counts() Counts {
	p.mu.Lock()
	defer p.mu.Unlock()
	sum := newCounts()
	for _, c := range p.conns {
		sum.add(&c.counts)
	}
	return sum
}

// RoundTrips is Counts().RoundTrips.
func (p *Proxy) RoundTrips() int { return p.Counts().RoundTrips }

// Connections returns the counts of every connection, also closed ones, in the order they came.
func (p *Proxy) Connections() []Counts {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := make([]Counts, len(p.conns))
	for i, c := range p.conns {
		all[i] = c.counts
		all[i].Frontend, all[i].Backend = maps.Clone(c.counts.Frontend), maps.Clone(c.counts.Backend)
	}
	return all
}

// Reset sets all counters to zero.
func (p *Proxy) Reset() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.conns {
		c.counts = newCounts()
	}
}
