package executor_test

import (
	"context"
	"flag"
	"net"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/executor"
)

// mutation changes one byte of what a server sends, counted from the moment it is armed over all connections, or drops it, or doubles it.
type mutation struct {
	mu   sync.Mutex
	on   bool
	left int
	mask byte
	how  byte
	hit  bool
}

func (m *mutation) arm() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.on = true
}

func (m *mutation) apply(p []byte) []byte {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.on || m.hit || m.left >= len(p) {
		if m.on {
			m.left -= len(p)
		}
		return p
	}
	m.hit = true
	switch at := m.left; m.how % 3 {
	case 0:
		p[at] ^= m.mask
	case 1:
		p = append(p[:at], p[at+1:]...)
	default:
		p = append(p[:at+1], p[at:]...)
	}
	return p
}

// mutatedConn is a connection with a mutation in what is read. pgconn reads on several goroutines where a connection ends.
type mutatedConn struct {
	net.Conn
	m    *mutation
	turn chan struct{} // of capacity 1: in virtual time a mutex would not do
	rest []byte
}

func (c *mutatedConn) Read(p []byte) (int, error) {
	c.turn <- struct{}{}
	defer func() { <-c.turn }()
	for len(c.rest) == 0 {
		buf := make([]byte, 4096)
		n, err := c.Conn.Read(buf)
		if err != nil {
			return 0, err
		}
		c.rest = c.m.apply(buf[:n])
	}
	n := copy(p, c.rest)
	c.rest = c.rest[n:]
	return n, nil
}

// FuzzHostileWire changes a byte in the answers to each kind of request, on each strategy: the call ends, at the latest with its context, nothing panics,
// and the pool is usable afterwards. What a value says is the server's to say. The seeds run as a test.
func FuzzHostileWire(f *testing.F) {
	for i := range 400 {
		f.Add(byte(i), byte(i/len(scenes)), uint16(i*37%300), byte(1<<(i%7)), byte(i/3))
	}
	hits := 0
	f.Cleanup(func() {
		if flag.Lookup("test.fuzz").Value.String() == "" && hits < 200 { // the control
			f.Errorf("%d answers were changed", hits)
		}
	})
	f.Fuzz(func(t *testing.T, scene, kind byte, offset uint16, mask, how byte) {
		sc, req := scenes[int(scene)%len(scenes)], requests[int(kind)%len(requests)]
		if req.name == "copy" {
			t.Skip("pgx waits for a mutex there, in which virtual time does not go on")
		}
		synctest.Test(t, func(t *testing.T) {
			m := &mutation{left: int(offset), mask: mask, how: how}
			s, end := newScripted(t, sc.o, executor.Config{PreparedStatements: sc.policy}, func(cfg *pgxpool.Config) {
				cfg.MaxConns = 2
				dial := cfg.ConnConfig.DialFunc
				cfg.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
					conn, err := dial(ctx, network, addr)
					if err != nil {
						return nil, err
					}
					return &mutatedConn{Conn: conn, m: m, turn: make(chan struct{}, 1)}, nil
				}
			})
			defer end()
			m.arm()
			ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
			defer cancel()
			start := time.Now()
			_ = req.run(ctx, s, 7)
			if took := time.Since(start); took > 2*time.Minute {
				t.Errorf("%s, %s: %v", sc.name, req.name, took)
			}
			m.mu.Lock()
			if m.hit {
				hits++
			}
			m.hit = true // no more
			m.mu.Unlock()
			after, cancelAfter := context.WithTimeout(t.Context(), 10*time.Minute)
			defer cancelAfter()
			err := s.sane(after)
			for range 3 { // what was learnt wrong is learnt again after its first refusal
				if err == nil {
					break
				}
				err = s.sane(after)
			}
			if err != nil {
				t.Errorf("%s, %s: %v", sc.name, req.name, err)
			}
		})
	})
}
