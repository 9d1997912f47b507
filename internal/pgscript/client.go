package pgscript

import (
	"fmt"
	"net"
	"slices"

	"github.com/jackc/pgx/v5/pgproto3"
)

// client is one connection.
type client struct {
	b      *Backend
	number int // from 1
	conn   net.Conn
	be     *pgproto3.Backend

	server *server            // its own, or the one a pooler has lent
	kept   map[string]*parsed // its names, unless they are a shared server's
	asked  int                // how often it asked for pg_backend_pid()
	busy   bool               // in the middle of a request
	tx     byte
	skip   bool // after an error, up to Sync
	portal *portal
	// effects are the texts that were executed and are not yet permanent; deferred is asked when they become so.
	effects  []string
	deferred []func(Step) *pgproto3.ErrorResponse
	out      []pgproto3.BackendMessage // up to the next Sync
	copying  bool
	writing  chan struct{} // capacity 1, held while something is written: notifications come between answers
	ended    chan struct{} // closed when the connection has
	listener               // guarded by the backend's mu
}

type portal struct {
	p       *parsed
	args    []string
	formats []int16
}

// errEnd ends a connection.
var errEnd = fmt.Errorf("pgscript: end of connection")

func (c *client) serve() {
	msg, err := c.be.ReceiveStartupMessage()
	if err != nil {
		return
	}
	if _, ok := msg.(*pgproto3.StartupMessage); !ok {
		c.b.mu.Lock()
		c.b.cancels++
		c.b.mu.Unlock()
		return // a cancel request, which this backend does not honour
	}
	key := c.begin()
	if login := c.b.o.Script.Login; login != nil {
		if e := login(c.number); e != nil {
			_ = c.write(e)
			return
		}
	}
	for _, m := range []pgproto3.BackendMessage{
		&pgproto3.AuthenticationOk{},
		&pgproto3.ParameterStatus{Name: "server_version", Value: "15.0"},
		&pgproto3.ParameterStatus{Name: "client_encoding", Value: "UTF8"},
		&pgproto3.ParameterStatus{Name: "standard_conforming_strings", Value: "on"},
		&pgproto3.BackendKeyData{ProcessID: key, SecretKey: []byte{1, 2, 3, 4}},
		&pgproto3.ReadyForQuery{TxStatus: 'I'},
	} {
		c.be.Send(m)
	}
	if c.be.Flush() != nil {
		return
	}
	for {
		msg, err := c.be.Receive()
		if err != nil {
			return
		}
		if _, ok := msg.(*pgproto3.Terminate); ok {
			return
		}
		if v := c.reach(FromClient); v == cut || v == stall {
			return
		}
		if c.isStalled() {
			continue
		}
		c.b.record(messageOf(msg))
		if c.handle(msg) != nil {
			return
		}
	}
}

// begin gives a connection what its kind has, and returns the process id for BackendKeyData.
func (c *client) begin() uint32 {
	c.b.mu.Lock()
	defer c.b.mu.Unlock()
	c.b.connects++
	c.b.pids++
	key := c.b.pids
	switch c.b.o.Kind {
	case Direct:
		c.server = &server{pid: key, names: c.kept}
	case Session:
		c.server = c.b.newServerLocked()
		c.kept = c.server.names
		c.b.servers = append(c.b.servers, c.server)
	case Raw, Tracked:
	}
	if f := c.b.o.Script.KeyPID; f != nil {
		return f(c.number)
	}
	return key
}

// leave is the end of a connection. A pooler whose client goes in the middle of a request or a transaction replaces the server connection.
func (c *client) leave() {
	c.b.mu.Lock()
	defer c.b.mu.Unlock()
	if c.busy || c.tx != 'I' {
		if i := slices.Index(c.b.servers, c.server); i >= 0 {
			c.b.servers[i] = c.b.newServerLocked()
		}
	}
}

// record keeps what a client sent.
func (b *Backend) record(m Message) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.sent = append(b.sent, m)
	if m.EndsRequest() {
		b.requests++
	}
}

// reach applies the triggers that a message reaches. After cut and stall the connection has ended.
func (c *client) reach(side Side) verdict {
	v, insert := c.b.at(side)
	for _, m := range insert {
		if c.answer(m) != nil {
			return cut
		}
	}
	switch v {
	case cut:
		_ = c.conn.Close()
	case stall:
		// The client's writes must not block, and its Terminate ends it.
		for {
			msg, err := c.be.Receive()
			if _, bye := msg.(*pgproto3.Terminate); bye || err != nil {
				return stall
			}
		}
	case goOn, omit:
	}
	return v
}

// queue adds a message to the answer.
func (c *client) queue(m pgproto3.BackendMessage) { c.out = append(c.out, m) }

func (c *client) write(m pgproto3.BackendMessage) error {
	c.writing <- struct{}{}
	defer func() { <-c.writing }()
	c.be.Send(m)
	return c.be.Flush()
}

// answer sends a message and records it.
func (c *client) answer(m pgproto3.BackendMessage) error {
	c.b.mu.Lock()
	_, isError := m.(*pgproto3.ErrorResponse)
	c.b.answers = append(c.b.answers, Answer{Request: c.b.requests, Error: isError})
	c.b.mu.Unlock()
	return c.write(m)
}

// flush sends the answer, message by message.
func (c *client) flush() error {
	if c.isStalled() {
		return nil
	}
	for _, m := range c.out {
		switch c.reach(FromServer) {
		case cut, stall:
			return errEnd
		case omit:
			continue
		case goOn:
		}
		if err := c.answer(m); err != nil {
			return err
		}
	}
	c.out = c.out[:0]
	return nil
}

// fail answers with an error. What follows is skipped up to Sync; a FATAL one ends the connection.
func (c *client) fail(e *pgproto3.ErrorResponse) error {
	if e != NoAnswer {
		c.queue(e)
	}
	c.skip = true
	if c.tx == 'T' {
		c.tx = 'E'
	}
	c.effects, c.deferred = nil, nil
	if e == NoAnswer {
		c.out = nil
		c.b.mu.Lock()
		c.stalled = true
		c.b.mu.Unlock()
		return nil
	}
	if e.Severity == "FATAL" || c.b.o.Script.ErrorsEnd {
		_ = c.flush()
		return errEnd
	}
	return nil
}

func (c *client) handle(msg pgproto3.FrontendMessage) error {
	c.borrow()
	c.busy = true
	switch msg.(type) {
	case *pgproto3.Sync:
		return c.sync()
	case *pgproto3.CopyData, *pgproto3.CopyDone, *pgproto3.CopyFail:
		return c.copy(msg)
	}
	if c.skip {
		return nil
	}
	switch m := msg.(type) {
	case *pgproto3.Parse:
		return c.parse(m)
	case *pgproto3.Bind:
		return c.bind(m)
	case *pgproto3.Describe:
		return c.describe(m)
	case *pgproto3.Execute:
		return c.execute()
	case *pgproto3.Close:
		if m.ObjectType == 'S' {
			c.b.mu.Lock()
			delete(c.names(), m.Name)
			c.b.mu.Unlock()
		}
		if c.b.o.Script.CloseFirst {
			return c.answer(&pgproto3.CloseComplete{})
		}
		c.queue(&pgproto3.CloseComplete{})
	case *pgproto3.Query:
		return c.query(m.String)
	case *pgproto3.Flush:
		return c.flush()
	}
	return nil
}

// borrow gives a pooler's client a server connection for the transaction that begins.
func (c *client) borrow() {
	if c.server != nil {
		return
	}
	c.b.mu.Lock()
	defer c.b.mu.Unlock()
	c.server = c.b.servers[c.b.turn%len(c.b.servers)]
	c.b.turn++
}

// names are the prepared statements that a client's message is about.
func (c *client) names() map[string]*parsed {
	if c.b.o.Kind == Raw {
		return c.server.names
	}
	return c.kept
}
