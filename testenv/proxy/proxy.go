// Package proxy puts a TCP proxy in front of a PostgreSQL or PgBouncer. It counts protocol messages and round trips,
// and breaks connections where a test says: at a message, after a number of bytes, or by silence.
//
// It reads the protocol without TLS. A connection that negotiates TLS is passed on uncounted.
package proxy

import (
	"context"
	"fmt"
	"net"
	"net/url"
	"slices"
	"sync"
	"time"

	"github.com/bounceproof/bounceproof/testenv/postgres"
)

// Side is who sends: the frontend is the client, the backend the server.
type Side int

// The sides.
const (
	Frontend Side = iota
	Backend
)

func (s Side) String() string {
	if s == Backend {
		return "backend"
	}
	return "frontend"
}

// Proxy forwards connections to a server. It is safe for concurrent use.
type Proxy struct {
	listener net.Listener
	closing  chan struct{}
	working  sync.WaitGroup

	mu     sync.Mutex // guards what follows and the counters of every connection
	target string
	conns  []*conn
	cuts   []*Cut
	delay  time.Duration
	hole   chan struct{} // not nil in a black hole, closed by Heal
	down   bool          // new connections are closed at once
}

// Start starts a proxy on a port of the loopback address. target is a host and port, or the URL of a database. The proxy
// ends with the test.
func Start(tb postgres.TB, target string) *Proxy {
	tb.Helper()
	l, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatalf("proxy: %v", err)
		return nil
	}
	p := &Proxy{listener: l, target: hostOf(target), closing: make(chan struct{})}
	p.working.Go(p.accept)
	tb.Cleanup(p.close)
	return p
}

// hostOf returns the host and port of a target.
func hostOf(target string) string {
	if u, err := url.Parse(target); err == nil && u.Host != "" {
		return u.Host
	}
	return target
}

// Redirect sends new connections to another target, as a failover does with the clients' address, and cuts those that are open.
func (p *Proxy) Redirect(target string) {
	p.mu.Lock()
	p.target = hostOf(target)
	p.mu.Unlock()
	p.CutAll()
}

func (p *Proxy) close() {
	close(p.closing)
	_ = p.listener.Close()
	p.CutAll()
	p.working.Wait()
}

// Addr returns the host and port to connect to.
func (p *Proxy) Addr() string { return p.listener.Addr().String() }

// URL returns a database URL with the host and port replaced by the proxy's.
func (p *Proxy) URL(database string) string {
	u, err := url.Parse(database)
	if err != nil {
		panic(fmt.Sprintf("proxy: %q is no URL", database))
	}
	u.Host = p.Addr()
	return u.String()
}

func (p *Proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return // closed
		}
		p.working.Go(func() { p.serve(client) })
	}
}

func (p *Proxy) serve(client net.Conn) {
	p.mu.Lock()
	refuse := p.down
	p.mu.Unlock()
	if refuse {
		_ = client.Close()
		return
	}
	p.passHole()
	p.mu.Lock()
	target := p.target
	p.mu.Unlock()
	server, err := (&net.Dialer{Timeout: 10 * time.Second}).DialContext(context.Background(), "tcp", target)
	if err != nil {
		_ = client.Close()
		return
	}
	c := &conn{proxy: p, client: client, server: server, done: make(chan struct{}), counts: newCounts()}
	p.mu.Lock()
	p.conns = append(p.conns, c)
	p.mu.Unlock()
	select {
	case <-p.closing:
		c.cut()
	default:
	}
	c.run()
}

// BlackHole stops all forwarding, on connections that exist and on new ones, without closing any: what a lost route looks
// like to a program, except that this machine's kernel still acknowledges. Heal ends it, and what was held back
// goes on.
func (p *Proxy) BlackHole() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.hole == nil {
		p.hole = make(chan struct{})
	}
}

// Delay makes everything wait so long before it is forwarded, in each direction. What arrives in one piece waits once.
// 0 ends it.
func (p *Proxy) Delay(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.delay = d
}

// Refuse closes new connections at once, as if the server were down. Existing ones go on.
func (p *Proxy) Refuse() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.down = true
}

// Heal ends BlackHole, Delay and Refuse, and withdraws cuts that have not happened.
func (p *Proxy) Heal() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.hole != nil {
		close(p.hole)
		p.hole = nil
	}
	p.delay, p.down, p.cuts = 0, false, nil
}

// passHole waits until there is no black hole. It reports whether the proxy still works.
func (p *Proxy) passHole() bool {
	for {
		p.mu.Lock()
		hole := p.hole
		p.mu.Unlock()
		if hole == nil {
			return true
		}
		select {
		case <-hole:
		case <-p.closing:
			return false
		}
	}
}

// CutAll cuts every open connection now.
func (p *Proxy) CutAll() {
	p.mu.Lock()
	conns := slices.Clone(p.conns)
	p.mu.Unlock()
	for _, c := range conns {
		c.cut()
	}
}

// Open returns the number of connections that are open now.
func (p *Proxy) Open() int {
	p.mu.Lock()
	conns := slices.Clone(p.conns)
	p.mu.Unlock()
	n := 0
	for _, c := range conns {
		select {
		case <-c.done:
		default:
			n++
		}
	}
	return n
}
