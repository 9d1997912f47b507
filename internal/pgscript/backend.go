// Package pgscript is a wire backend for tests. It answers on in-memory connections as PostgreSQL does, runs statements on a model that
// counts them, records every message, and fails at exactly the message a test names. A [Script] makes it a server or a pooler of another
// make, and a [Trigger] sends any message of the protocol at any place of an answer.
//
// The model is small: statements have parameters and columns of types int4 and text, a transaction is a list of executed statements that
// COMMIT, or Sync outside of one, makes permanent. What it knows of a text it finds in the text itself, see [Statement], or is told with
// [Backend.Define].
package pgscript

import (
	"context"
	"fmt"
	"net"
	"slices"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgproto3"
)

// TB is what this package needs of testing.TB.
type TB interface {
	Helper()
	Cleanup(f func())
	Fatalf(format string, args ...any)
}

// Kind is what a backend pretends to be.
type Kind int

const (
	// Direct is a PostgreSQL server: each connection has its own process, which is the one BackendKeyData names.
	Direct Kind = iota
	// Raw is a transaction pooler that forwards the names of prepared statements: server connections are shared, one after the other, from
	// transaction to transaction.
	Raw
	// Tracked is a transaction pooler that keeps a client's statements: a name it does not know, and one it knows already, end the
	// connection, and so does the second Parse of a name whose first failed (PgBouncer 1.21 and newer, src/prepare.c).
	Tracked
	// Session is a pooler in session mode that forwards names: each connection has a server connection of its own, which stays when the
	// client goes, and BackendKeyData does not name its process.
	Session
)

// Options say what a backend is. The zero value is a direct server.
type Options struct {
	Kind Kind
	// Servers is how many server connections a pooler has that shares them. Default 1.
	Servers int
	// Script is what it does otherwise than its kind.
	Script Script
}

// Side is who sends a message.
type Side int

// The sides.
const (
	FromClient Side = iota
	FromServer
)

// Backend is the server. It is safe for concurrent use.
type Backend struct {
	o       Options
	working sync.WaitGroup

	mu         sync.Mutex // guards what follows
	closed     bool
	refusing   bool
	statements map[string]Statement
	servers    []*server // of a pooler
	turn       int       // which of them is next
	pids       uint32
	opened     int // connections
	clients    map[*client]struct{}
	triggers   []*Trigger
	sent       []Message
	requests   int // of them, those that ReadyForQuery answers
	answers    []Answer
	writes     int // Write calls of clients
	connects   int
	cancels    int
	ran        map[string]int
	committed  map[string]int
	silent     bool
	onExecute  func(sql string) *pgproto3.ErrorResponse
}

// server is a server connection: a process with prepared statements.
type server struct {
	pid   uint32
	names map[string]*parsed
}

// New returns a backend that ends with the test.
func New(tb TB, o Options) *Backend {
	tb.Helper()
	b := &Backend{o: o, statements: map[string]Statement{}, clients: map[*client]struct{}{}, pids: 1000}
	b.resetLocked()
	if b.sharesServers() {
		for range max(o.Servers, 1) {
			b.servers = append(b.servers, b.newServerLocked())
		}
	}
	tb.Cleanup(b.Close)
	return b
}

func (b *Backend) newServerLocked() *server {
	b.pids++
	return &server{pid: b.pids, names: map[string]*parsed{}}
}

// sharesServers reports whether clients get a server connection for a transaction at a time.
func (b *Backend) sharesServers() bool { return b.o.Kind == Raw || b.o.Kind == Tracked }

// Close closes every connection and waits until they have ended.
func (b *Backend) Close() {
	b.mu.Lock()
	b.closed = true
	b.mu.Unlock()
	b.CutAll()
	b.working.Wait()
}

// CutAll closes every connection now.
func (b *Backend) CutAll() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for c := range b.clients {
		_ = c.conn.Close()
	}
}

// Wait returns when every connection has ended, which nothing but the clients brings about.
func (b *Backend) Wait() { b.working.Wait() }

// Open returns how many connections there are.
func (b *Backend) Open() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.clients)
}

// Refuse makes new connections fail, or work again.
func (b *Backend) Refuse(refuse bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.refusing = refuse
}

// URL is a connection string whose connections [Backend.Dial] has to make.
const URL = "postgres://user@in-memory:5432/db?sslmode=disable"

// ConnConfig returns a configuration of connections to the backend.
func (b *Backend) ConnConfig(tb TB) *pgx.ConnConfig {
	tb.Helper()
	cfg, err := pgx.ParseConfig(URL)
	if err != nil {
		tb.Fatalf("pgscript: %v", err)
		return nil
	}
	b.Use(cfg)
	return cfg
}

// Use makes a configuration of connections, such as a pool's, lead to the backend.
func (b *Backend) Use(cfg *pgx.ConnConfig) {
	cfg.LookupFunc = func(_ context.Context, host string) ([]string, error) { return []string{host}, nil }
	cfg.DialFunc = b.Dial
}

// Dial opens a connection.
func (b *Backend) Dial(ctx context.Context, _, _ string) (net.Conn, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed || b.refusing {
		return nil, &net.OpError{Op: "dial", Net: "pipe", Err: fmt.Errorf("refused")}
	}
	ours, theirs := net.Pipe()
	b.opened++
	c := &client{b: b, number: b.opened, conn: ours, be: pgproto3.NewBackend(ours, ours), tx: 'I', kept: map[string]*parsed{}, writing: make(chan struct{}, 1), ended: make(chan struct{})}
	b.clients[c] = struct{}{}
	b.working.Go(func() {
		c.serve()
		c.leave()
		_ = ours.Close()
		close(c.ended)
		b.mu.Lock()
		delete(b.clients, c)
		b.mu.Unlock()
	})
	return &countedConn{Conn: theirs, b: b}, nil
}

// countedConn counts the client's writes: a request in one flush is one write.
type countedConn struct {
	net.Conn
	b *Backend
}

func (c *countedConn) Write(p []byte) (int, error) {
	c.b.mu.Lock()
	c.b.writes++
	c.b.mu.Unlock()
	return c.Conn.Write(p)
}

// Reset forgets what was recorded and counted, and every trigger.
func (b *Backend) Reset() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.resetLocked()
}

func (b *Backend) resetLocked() {
	b.sent, b.requests, b.answers, b.writes, b.connects, b.cancels, b.triggers = nil, 0, nil, 0, 0, 0, nil
	b.ran, b.committed = map[string]int{}, map[string]int{}
}

// Sent returns the messages clients sent since Reset, without those that set a connection up or end it.
func (b *Backend) Sent() []Message {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.sent)
}

// Answer is a message sent to a client.
type Answer struct {
	// Request is the number of the request that it belongs to, from 1, over all connections.
	Request int
	// Error says that it is an ErrorResponse.
	Error bool
}

// Answers returns the messages sent to clients since Reset, without those that set a connection up.
func (b *Backend) Answers() []Answer {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.answers)
}

// RoundTrips returns how many requests that are answered by ReadyForQuery were sent since Reset.
func (b *Backend) RoundTrips() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.requests
}

// Writes returns how often clients wrote since Reset, connection set-up included.
func (b *Backend) Writes() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.writes
}

// Connects returns how many connections were set up since Reset.
func (b *Backend) Connects() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.connects
}

// Cancels returns how many cancel requests came since Reset. They have no effect.
func (b *Backend) Cancels() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.cancels
}

// Ran returns how often a text was executed since Reset, rolled back or not.
func (b *Backend) Ran(sql string) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.ran[sql]
}

// Committed returns how often a text was executed by a transaction that committed, since Reset.
func (b *Backend) Committed(sql string) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.committed[sql]
}

// Define tells what a text does. Without it the text tells, see [Statement].
func (b *Backend) Define(sql string, st Statement) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.statements[sql] = st
}

// ForgetNames makes every server connection forget its prepared statements, as DEALLOCATE ALL of another client does.
func (b *Backend) ForgetNames() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, s := range b.servers {
		clear(s.names)
	}
	for c := range b.clients {
		if b.o.Kind != Raw {
			clear(c.kept)
		}
	}
}

// Names returns the names of the statements that server connections hold, sorted, each as often as there are servers with it.
func (b *Backend) Names() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	servers := slices.Clone(b.servers)
	if b.o.Kind == Direct {
		for c := range b.clients {
			if c.server != nil {
				servers = append(servers, c.server)
			}
		}
	}
	var names []string
	for _, s := range servers {
		for name := range s.names {
			if name != "" {
				names = append(names, name)
			}
		}
	}
	slices.Sort(names)
	return names
}
