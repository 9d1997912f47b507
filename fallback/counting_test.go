package fallback_test

import (
	"context"
	"encoding/binary"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/fallback"
)

// wireCount is what went over all connections of one dialer. It is taken from the bytes, not from what the code believes to send.
type wireCount struct {
	mu sync.Mutex
	wireCounts
}

type wireCounts struct {
	connections int
	open        int
	syncs       int // Sync messages sent; each is answered by one ReadyForQuery
	simple      int // Query messages sent
	terminates  int
	turnarounds int // times a connection began to read after having written, its startup left out
}

func (c *wireCount) add(f func(*wireCount)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f(c)
}

func (c *wireCount) get() wireCounts {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.wireCounts
}

// countedConn reads along with what a client sends.
type countedConn struct {
	net.Conn
	count   *wireCount
	mu      sync.Mutex
	pending []byte
	started bool // the startup message has gone by
	wrote   bool // extended messages were written since the last read
	closed  bool
}

func (c *countedConn) Write(b []byte) (int, error) {
	c.mu.Lock()
	c.pending = append(c.pending, b...)
	for {
		head := 0
		if c.started {
			head = 1
		}
		if len(c.pending) < head+4 {
			break
		}
		size := head + int(binary.BigEndian.Uint32(c.pending[head:]))
		if len(c.pending) < size {
			break
		}
		if c.started {
			switch c.pending[0] {
			case 'S':
				c.count.add(func(w *wireCount) { w.syncs++ })
				c.wrote = true
			case 'Q':
				c.count.add(func(w *wireCount) { w.simple++ })
				c.wrote = true
			case 'X':
				c.count.add(func(w *wireCount) { w.terminates++ })
			}
		}
		c.started = true
		c.pending = c.pending[size:]
	}
	c.mu.Unlock()
	return c.Conn.Write(b)
}

func (c *countedConn) Read(b []byte) (int, error) {
	c.mu.Lock()
	if c.wrote {
		c.wrote = false
		c.count.add(func(w *wireCount) { w.turnarounds++ })
	}
	c.mu.Unlock()
	return c.Conn.Read(b)
}

func (c *countedConn) Close() error {
	c.mu.Lock()
	if !c.closed {
		c.closed = true
		c.count.add(func(w *wireCount) { w.open-- })
	}
	c.mu.Unlock()
	return c.Conn.Close()
}

// counted returns a dial function for url and the count of what goes over its connections.
func counted(t *testing.T, url string) (func(context.Context) (*pgconn.PgConn, error), *wireCount) {
	t.Helper()
	count := &wireCount{}
	return fallback.Dialer(func(context.Context) (*pgconn.Config, error) {
		config, err := pgconn.ParseConfig(url)
		if err != nil {
			return nil, err
		}
		config.RuntimeParams["application_name"] = probeApplication
		config.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
			conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
			if err != nil {
				return nil, err
			}
			count.add(func(w *wireCount) { w.connections++; w.open++ })
			return &countedConn{Conn: conn, count: count}, nil
		}
		return config, nil
	}), count
}

const probeApplication = "bounceproof probe under test"

// eventually polls until done returns true; it fails the test after ten seconds.
func eventually(t *testing.T, what string, done func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); ; {
		if done() {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("still not so after 10 s: %s", what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}
