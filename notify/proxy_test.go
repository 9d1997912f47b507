package notify_test

import (
	"net"
	"net/url"
	"sync"
	"sync/atomic"
	"testing"
)

// tcpProxy stands between a client and a server and can swallow what passes, as a firewall that forgot a connection
// does: both ends stay open and hear nothing any more.
type tcpProxy struct {
	listener net.Listener
	target   string
	wg       sync.WaitGroup

	mu    sync.Mutex
	conns []*proxied
}

type proxied struct {
	client, server net.Conn
	hole           atomic.Bool
}

// newProxy returns a proxy before the server of rawURL, and the URL that leads through it.
func newProxy(t *testing.T, rawURL string) (*tcpProxy, string) {
	t.Helper()
	u, err := url.Parse(rawURL)
	if err != nil {
		t.Fatal(err)
	}
	var lc net.ListenConfig
	l, err := lc.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &tcpProxy{listener: l, target: u.Host}
	p.wg.Go(p.accept)
	t.Cleanup(func() {
		_ = l.Close()
		p.mu.Lock()
		for _, c := range p.conns {
			_ = c.client.Close()
			_ = c.server.Close()
		}
		p.mu.Unlock()
		p.wg.Wait()
	})
	u.Host = l.Addr().String()
	return p, u.String()
}

func (p *tcpProxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		var d net.Dialer
		server, err := d.Dial("tcp", p.target)
		if err != nil {
			_ = client.Close()
			continue
		}
		c := &proxied{client: client, server: server}
		p.mu.Lock()
		p.conns = append(p.conns, c)
		p.mu.Unlock()
		p.wg.Go(func() { c.pump(client, server) })
		p.wg.Go(func() { c.pump(server, client) })
	}
}

func (c *proxied) pump(from, to net.Conn) {
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		if c.hole.Load() {
			if err != nil {
				return // not even the end gets through
			}
			continue
		}
		if n > 0 {
			if _, err := to.Write(buf[:n]); err != nil {
				_ = from.Close()
				return
			}
		}
		if err != nil {
			_ = to.Close()
			return
		}
	}
}

// swallow black-holes all connections there are; new ones pass.
func (p *tcpProxy) swallow() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.conns {
		c.hole.Store(true)
	}
}
