package notify_test

import (
	"context"
	"errors"
	"net"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgxpool"
)

// fakePG is as much of a server, and of a pooler before it, as a listener meets: enough to have its time-outs and
// failures happen in virtual time. It is a notify.Pool too.
type fakePG struct {
	t    *testing.T
	born time.Time

	mu        sync.Mutex
	conns     map[*fakeConn]bool
	pids      uint32
	dials     []time.Duration // when somebody connected, or tried
	down      bool            // nobody can connect
	mute      bool            // pg_notify hangs until its context ends, on all paths
	lost      bool            // the pool's pg_notify succeeds and does nothing
	deaf      bool            // LISTEN succeeds and nothing arrives
	listenErr string          // SQLSTATE of every LISTEN
	pooled    bool            // clients get invented pids
	statement func(sql string)
}

type fakeConn struct {
	pg     *fakePG
	net    net.Conn
	pid    uint32
	out    chan pgproto3.BackendMessage
	heard  map[string]bool
	buried bool // black-holed: takes everything, answers nothing
}

func newFakePG(t *testing.T) *fakePG {
	return &fakePG{t: t, born: time.Now(), conns: map[*fakeConn]bool{}, pids: 100}
}

func (f *fakePG) with(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

func (f *fakePG) dialled() []time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]time.Duration(nil), f.dials...)
}

// Exec is the pool's: it notifies.
func (f *fakePG) Exec(ctx context.Context, _ string, args ...any) (pgconn.CommandTag, error) {
	f.mu.Lock()
	mute, down, lost := f.mute, f.down, f.lost
	f.mu.Unlock()
	if mute {
		<-ctx.Done()
		return pgconn.CommandTag{}, ctx.Err()
	}
	if down {
		return pgconn.CommandTag{}, errors.New("down")
	}
	if !lost {
		f.notify(args[len(args)-2].(string), args[len(args)-1].(string))
	}
	return pgconn.CommandTag{}, nil
}

func (f *fakePG) notify(channel, payload string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for c := range f.conns {
		if c.heard[channel] && !c.buried && !f.deaf {
			c.out <- &pgproto3.NotificationResponse{PID: 1, Channel: channel, Payload: payload}
		}
	}
}

// stranger delivers a notification to everybody, asked for or not.
func (f *fakePG) stranger(channel string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for c := range f.conns {
		c.out <- &pgproto3.NotificationResponse{PID: 1, Channel: channel}
	}
}

// bury black-holes all connections there are; killAll closes them.
func (f *fakePG) bury() {
	f.with(func() {
		for c := range f.conns {
			c.buried = true
		}
	})
}

func (f *fakePG) killAll() {
	f.with(func() {
		for c := range f.conns {
			_ = c.net.Close()
		}
	})
}

func (f *fakePG) Config() *pgxpool.Config {
	cfg, err := pgxpool.ParseConfig("postgres://u@fake/db?sslmode=disable")
	if err != nil {
		f.t.Fatal(err)
	}
	cfg.ConnConfig.LookupFunc = func(context.Context, string) ([]string, error) { return []string{"127.0.0.1"}, nil }
	cfg.ConnConfig.DialFunc = func(context.Context, string, string) (net.Conn, error) {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.dials = append(f.dials, time.Since(f.born))
		if f.down {
			return nil, errors.New("connection refused")
		}
		f.pids++
		client, server := net.Pipe()
		c := &fakeConn{pg: f, net: server, pid: f.pids, out: make(chan pgproto3.BackendMessage, 10_000), heard: map[string]bool{}}
		f.conns[c] = true
		go c.serve()
		return client, nil
	}
	return cfg
}

func (c *fakeConn) serve() {
	backend := pgproto3.NewBackend(c.net, c.net)
	done := make(chan struct{})
	go func() { // writes, so that reading never waits
		for {
			select {
			case <-done:
				return
			case m := <-c.out:
				backend.Send(m)
				for len(c.out) > 0 {
					backend.Send(<-c.out)
				}
				_ = backend.Flush()
			}
		}
	}()
	defer close(done)
	defer c.pg.with(func() { delete(c.pg.conns, c) })
	if _, err := backend.ReceiveStartupMessage(); err != nil {
		return
	}
	pid := c.pid
	if c.pg.pooled {
		pid += 1_000_000
	}
	c.say(&pgproto3.AuthenticationOk{}, &pgproto3.BackendKeyData{ProcessID: pid, SecretKey: []byte{1, 2, 3, 4}},
		&pgproto3.ReadyForQuery{TxStatus: 'I'})
	for {
		m, err := backend.Receive()
		if err != nil {
			return
		}
		switch m := m.(type) {
		case *pgproto3.Query:
			c.query(m.String)
		case *pgproto3.Terminate:
			_ = c.net.Close()
			return
		}
	}
}

func (c *fakeConn) say(messages ...pgproto3.BackendMessage) {
	c.pg.mu.Lock()
	defer c.pg.mu.Unlock()
	for _, m := range messages {
		if !c.buried {
			c.out <- m
		}
	}
}

var quoted = regexp.MustCompile(`^(listen|unlisten) "(.*)"$`)

func (c *fakeConn) query(sql string) {
	if c.pg.statement != nil {
		c.pg.statement(sql)
	}
	for _, sql := range strings.Split(sql, ";") {
		sql = strings.TrimSpace(sql)
		if m := quoted.FindStringSubmatch(sql); m != nil {
			c.pg.mu.Lock()
			code := c.pg.listenErr
			if code == "" {
				c.heard[m[2]] = m[1] == "listen"
			}
			c.pg.mu.Unlock()
			if code != "" && m[1] == "listen" {
				c.say(&pgproto3.ErrorResponse{Severity: "ERROR", SeverityUnlocalized: "ERROR", Code: code, Message: "no"})
				break
			}
			c.say(&pgproto3.CommandComplete{CommandTag: []byte(strings.ToUpper(m[1]))})
			continue
		}
		c.say(
			&pgproto3.RowDescription{Fields: []pgproto3.FieldDescription{{Name: []byte("x"), DataTypeOID: 25, DataTypeSize: -1, TypeModifier: -1}}},
			&pgproto3.DataRow{Values: [][]byte{[]byte(strconv.Itoa(int(c.pid)))}},
			&pgproto3.CommandComplete{CommandTag: []byte("SELECT 1")})
	}
	c.say(&pgproto3.ReadyForQuery{TxStatus: 'I'})
}
