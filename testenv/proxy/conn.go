package proxy

import (
	"encoding/binary"
	"io"
	"net"
	"sync"
	"time"
)

// conn is one connection through the proxy.
type conn struct {
	proxy          *Proxy
	client, server net.Conn
	cutOnce        sync.Once
	done           chan struct{} // closed when both directions have ended

	// Guarded by proxy.mu.
	counts  Counts
	ready   bool // the first ReadyForQuery has come
	opaque  bool // TLS or the like: nothing is parsed
	sslAsks int  // one-byte answers the backend owes
	// Requests that wait for an answer. Several at once are one round trip.
	awaiting int // ReadyForQuery messages to come
	flushed  bool
}

// run forwards both directions until both have ended.
func (c *conn) run() {
	var both sync.WaitGroup
	both.Go(func() { c.pump(Frontend, c.client, c.server) })
	both.Go(func() { c.pump(Backend, c.server, c.client) })
	both.Wait()
	_ = c.client.Close()
	_ = c.server.Close()
	close(c.done)
}

// pump forwards what one side sends.
func (c *conn) pump(side Side, from, to net.Conn) {
	s := scanner{conn: c, side: side, startup: side == Frontend}
	buf := make([]byte, 64<<10)
	kept := 0 // bytes at the start of buf that are the begin of a header
	for {
		n, err := from.Read(buf[kept:])
		if n > 0 {
			if !c.wait() {
				break
			}
			whole := kept + n
			forward, cut := s.scan(buf[:whole])
			if _, werr := to.Write(buf[:forward]); werr != nil && err == nil {
				err = werr
			}
			if cut {
				c.cut()
				return
			}
			kept = copy(buf, buf[forward:whole])
		}
		if err != nil {
			break
		}
	}
	// The end of a stream is held back by a black hole as well.
	c.proxy.passHole()
	closeWrite(to)
}

// wait holds a piece back for as long as the proxy's faults ask. It reports whether to forward it then.
func (c *conn) wait() bool {
	c.proxy.mu.Lock()
	d := c.proxy.delay
	c.proxy.mu.Unlock()
	if d > 0 {
		timer := time.NewTimer(d)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-c.proxy.closing:
			return false
		}
	}
	return c.proxy.passHole()
}

// cut breaks the connection. The client sees it closed at once. The server first gets what was forwarded: closing a socket
// with unread input would reset the connection and throw away what the server has not read yet.
func (c *conn) cut() {
	c.cutOnce.Do(func() {
		_ = c.client.Close()
		closeWrite(c.server)
		_ = c.server.SetReadDeadline(time.Now().Add(5 * time.Second))
		go func() {
			_, _ = io.Copy(io.Discard, c.server)
			_ = c.server.Close()
		}()
	})
}

func closeWrite(c net.Conn) {
	if t, ok := c.(*net.TCPConn); ok {
		_ = t.CloseWrite()
	}
}

// scanner follows one direction of the protocol, message by message.
type scanner struct {
	conn    *conn
	side    Side
	startup bool // the next message has no type byte
	kind    byte // of the message whose body goes through
	body    int  // bytes of it that are still to come
	counted bool
	after   []*Cut // happen after it
}

const (
	headerLen    = 5 // type and length
	untypedLen   = 8 // length and request code
	requestSSL   = 80877103
	requestGSS   = 80877104
	untypedEmpty = 4 // bytes the length counts of itself
)

// scan looks at what has come and returns how much of it to forward, and whether the connection is to be cut then.
// Bytes that are not to be forwarded yet are the begin of a header: scan wants them again.
func (s *scanner) scan(b []byte) (forward int, cut bool) {
	p := s.conn.proxy
	p.mu.Lock()
	defer p.mu.Unlock()
	pos := 0
	for pos < len(b) && !cut {
		if s.conn.opaque {
			return len(b), false
		}
		if s.body > 0 {
			n := min(s.body, len(b)-pos)
			if s.counted {
				n, cut = p.bytesLocked(s.side, n)
				*s.conn.counts.bytes(s.side) += n
			}
			s.body -= n
			pos += n
			if s.body == 0 && !cut {
				cut = s.endLocked()
			}
			continue
		}
		size, ok := s.beginLocked(b[pos:])
		if !ok {
			break // the header is not complete
		}
		if s.counted {
			if cut, s.after = p.beginLocked(s.side, s.kind); cut {
				return pos, true
			}
			s.accountLocked()
		}
		s.body = size
	}
	return pos, cut
}

// beginLocked reads a header and returns the length of the message, header included.
func (s *scanner) beginLocked(b []byte) (size int, ok bool) {
	c := s.conn
	switch {
	case s.side == Backend && c.sslAsks > 0:
		// The answer to a request for encryption is one byte; S and G mean that it follows.
		c.sslAsks--
		c.opaque = b[0] != 'N'
		s.kind, s.counted = 0, false
		return 1, true
	case s.startup:
		if len(b) < untypedLen {
			return 0, false
		}
		size = int(binary.BigEndian.Uint32(b))
		switch binary.BigEndian.Uint32(b[untypedEmpty:]) {
		case requestSSL, requestGSS:
			c.sslAsks++
		default:
			s.startup = false
		}
		s.kind, s.counted = 0, false
		return max(size, untypedLen), true
	}
	if len(b) < headerLen {
		return 0, false
	}
	s.kind, s.counted = b[0], c.ready
	return max(1+int(binary.BigEndian.Uint32(b[1:])), headerLen), true
}

// endLocked is called when the last byte of a message goes through.
func (s *scanner) endLocked() bool {
	if !s.counted {
		if s.side == Backend && s.kind == 'Z' {
			s.conn.ready = true
		}
		return false
	}
	for _, c := range s.after {
		s.conn.proxy.fireLocked(c)
	}
	return len(s.after) > 0
}

// accountLocked counts a message, before it is forwarded, so that whoever has got the answer finds it counted.
func (s *scanner) accountLocked() {
	c := s.conn
	if s.side == Frontend {
		c.counts.Frontend[s.kind]++
		switch s.kind {
		case 'Q', 'S', 'F': // Query, Sync, FunctionCall
			c.turnLocked()
			c.counts.Syncs++
			c.awaiting++
		case 'H': // Flush
			c.turnLocked()
			c.flushed = true
		}
		return
	}
	c.counts.Backend[s.kind]++
	if s.kind == 'Z' { // ReadyForQuery
		c.awaiting = max(c.awaiting-1, 0)
	}
	c.flushed = false
}

// turnLocked counts a round trip if the client was not waiting for an answer already.
func (c *conn) turnLocked() {
	if c.awaiting == 0 && !c.flushed {
		c.counts.RoundTrips++
	}
}
