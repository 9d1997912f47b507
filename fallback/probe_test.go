package fallback_test

import (
	"context"
	"errors"
	"net"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/bounceproof/bounceproof/fallback"
)

// fakePooler speaks just enough of the protocol to be probed, and behaves as its fields say. Each connection has a number from 1.
type fakePooler struct {
	key     func(conn int) uint32                      // process id in BackendKeyData
	backend func(conn, ask int) string                 // answer to the ask-th pg_backend_pid() of a connection
	rename  func(name string) string                   // name under which the server lists a statement; "" = not at all
	refuse  func(conn int) bool                        // at login
	hang    func(conn int, query string) bool          // never answer
	fail    func(query string) *pgproto3.ErrorResponse // answer with an error
	drop    bool                                       // close the socket behind an error

	mu         sync.Mutex
	wg         sync.WaitGroup
	conns      int
	open       int
	cancels    int // CancelRequests; a probe must send none
	terminates int
	syncs      int
	statements map[string]int // named statements parsed and not closed
}

func (f *fakePooler) dial(ctx context.Context) (*pgconn.PgConn, error) {
	return fallback.Dialer(f.config)(ctx)
}

func (f *fakePooler) config(context.Context) (*pgconn.Config, error) {
	config, err := pgconn.ParseConfig("postgres://u@fake:1/d?sslmode=disable")
	if err != nil {
		return nil, err
	}
	config.LookupFunc = func(context.Context, string) ([]string, error) { return []string{"127.0.0.1"}, nil }
	config.DialFunc = func(context.Context, string, string) (net.Conn, error) {
		client, server := net.Pipe()
		f.mu.Lock()
		f.conns++
		f.open++
		n := f.conns
		f.mu.Unlock()
		f.wg.Go(func() {
			f.serve(n, server)
			_ = server.Close()
			f.mu.Lock()
			f.open--
			f.mu.Unlock()
		})
		return client, nil
	}
	return config, nil
}

func (f *fakePooler) count(what *int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	*what++
}

func (f *fakePooler) serve(conn int, socket net.Conn) {
	b := pgproto3.NewBackend(socket, socket)
	startup, err := b.ReceiveStartupMessage()
	if err != nil {
		return
	}
	if _, ok := startup.(*pgproto3.CancelRequest); ok {
		f.count(&f.cancels)
		return
	}
	if f.refuse != nil && f.refuse(conn) {
		b.Send(&pgproto3.ErrorResponse{Severity: "FATAL", Code: "08P01", Message: "no more connections allowed (max_client_conn)"})
		_ = b.Flush()
		return
	}
	b.Send(&pgproto3.AuthenticationOk{})
	b.Send(&pgproto3.BackendKeyData{ProcessID: f.key(conn), SecretKey: []byte{1, 2, 3, 4}})
	b.Send(&pgproto3.ReadyForQuery{TxStatus: 'I'})
	if b.Flush() != nil {
		return
	}
	var query, param string
	asks, skip := 0, false
	named := ""
	for {
		msg, err := b.Receive()
		if err != nil {
			return
		}
		switch msg := msg.(type) {
		case *pgproto3.Terminate:
			f.count(&f.terminates)
			return
		case *pgproto3.Sync:
			f.count(&f.syncs)
			skip = false
			b.Send(&pgproto3.ReadyForQuery{TxStatus: 'I'})
			if b.Flush() != nil {
				return
			}
		case *pgproto3.Parse:
			if skip {
				continue
			}
			query = msg.Query
			if msg.Name != "" {
				named = msg.Name
				f.mu.Lock()
				f.statements[msg.Name]++
				f.mu.Unlock()
			}
			b.Send(&pgproto3.ParseComplete{})
		case *pgproto3.Close:
			if skip {
				continue
			}
			f.mu.Lock()
			delete(f.statements, msg.Name)
			f.mu.Unlock()
			b.Send(&pgproto3.CloseComplete{})
		case *pgproto3.Bind:
			if skip {
				continue
			}
			param = ""
			if len(msg.Parameters) > 0 {
				param = string(msg.Parameters[0])
			}
			b.Send(&pgproto3.BindComplete{})
		case *pgproto3.Execute:
			if skip {
				continue
			}
			if f.hang != nil && f.hang(conn, query) {
				_, _ = socket.Read(make([]byte, 1)) // until the client is gone
				f.mu.Lock()
				delete(f.statements, named) // a pooler whose client goes away in the middle of a request closes the server connection
				f.mu.Unlock()
				return
			}
			if f.fail != nil {
				if e := f.fail(query); e != nil {
					b.Send(e)
					skip = true
					if f.drop {
						_ = b.Flush()
						return
					}
					continue
				}
			}
			if strings.Contains(query, "pg_backend_pid") {
				asks++
				row := [][]byte{[]byte(f.backend(conn, asks))}
				if param != "" {
					var name []byte
					if n := f.rename(named); n != "" {
						name = []byte(n)
					}
					row = append(row, name)
				}
				b.Send(&pgproto3.DataRow{Values: row})
			}
			b.Send(&pgproto3.CommandComplete{CommandTag: []byte("SELECT 1")})
		default:
			return
		}
	}
}

// newFake is a session pooler that forwards names: connection n is always answered by backend 100+n.
func newFake() *fakePooler {
	return &fakePooler{
		key:        func(conn int) uint32 { return uint32(900 + conn) },
		backend:    func(conn, _ int) string { return strconv.Itoa(100 + conn) },
		rename:     func(name string) string { return name },
		statements: map[string]int{},
	}
}

func (f *fakePooler) probe(t *testing.T, ctx context.Context) (fallback.Topology, error) {
	t.Helper()
	top, err := fallback.Probe(ctx, f.dial)
	f.wg.Wait() // every connection has ended: nothing else would let its server return
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.open != 0 || f.cancels != 0 {
		t.Errorf("%d connections open, %d CancelRequests", f.open, f.cancels)
	}
	if f.conns > 2 || f.syncs > 14 {
		t.Errorf("over budget: %d connections, %d round trips", f.conns, f.syncs)
	}
	if len(f.statements) != 0 {
		t.Errorf("left behind: %v", f.statements)
	}
	t.Logf("%v (%s), error %v; %d round trips", top, strings.Join(top.Evidence, "; "), err, f.syncs)
	return top, err
}

func notAllowed() *pgproto3.ErrorResponse {
	return &pgproto3.ErrorResponse{Severity: "FATAL", Code: "08P01", Message: "transaction blocks not allowed in statement pooling mode"}
}

// What no PgBouncer at hand does.
func TestProbeOfOtherPoolers(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name   string
		change func(*fakePooler)
		want   fallback.Topology
		round  int // trips; 0 = any
	}{
		{"a server", func(f *fakePooler) { f.backend = func(int, int) string { return "901" } }, fallback.Topology{Pooler: "none", Mode: fallback.ModeDirect}, 1},
		{"a session pooler", func(*fakePooler) {}, fallback.Topology{Pooler: "pooler", Mode: fallback.ModeSession}, 14},
		{
			"Odyssey", func(f *fakePooler) {
				f.rename = func(string) string { return "odyssey_pstmt_12" }
				f.backend = func(int, int) string { return "100" }
			}, fallback.Topology{Pooler: "odyssey", Mode: fallback.ModeTransaction, Tracks: true}, 0,
		},
		{"Odyssey before 1.5.1, whose names say nothing", func(f *fakePooler) { f.rename = func(string) string { return "2caa56bd" } }, fallback.Topology{Pooler: "pooler", Mode: fallback.ModeSession, Tracks: true}, 14},
		{"PgCat", func(f *fakePooler) { f.rename = func(string) string { return "PGCAT_3" } }, fallback.Topology{Pooler: "pgcat", Mode: fallback.ModeSession, Tracks: true}, 14},
		{"Supavisor", func(f *fakePooler) { f.rename = func(string) string { return "sv_abc+/=" } }, fallback.Topology{Pooler: "supavisor", Mode: fallback.ModeSession, Tracks: true}, 14},
		{"PgDog", func(f *fakePooler) { f.rename = func(string) string { return "__pgdog_3" } }, fallback.Topology{Pooler: "pgdog", Mode: fallback.ModeSession, Tracks: true}, 14},
		{
			"PgBouncer, which tracks only where it shares", func(f *fakePooler) { f.rename = func(string) string { return "PGBOUNCER_3" } },
			fallback.Topology{Pooler: "pgbouncer", Mode: fallback.ModeTransaction, Tracks: true},
			4,
		},
		{"a pooler that parses later", func(f *fakePooler) { f.rename = func(string) string { return "" } }, fallback.Topology{Pooler: "pooler", Mode: fallback.ModeSession}, 14},
		{
			"CockroachDB, which has no process ids", func(f *fakePooler) { f.backend = func(int, int) string { return "-1" } },
			fallback.Topology{Pooler: "pooler", Mode: fallback.ModeSession},
			14,
		},
		{
			"one backend on both connections", func(f *fakePooler) { f.backend = func(int, int) string { return "100" } },
			fallback.Topology{Pooler: "pooler", Mode: fallback.ModeTransaction},
			6,
		},
		{
			"a change under the second connection in the last round", func(f *fakePooler) {
				f.backend = func(conn, ask int) string {
					if conn == 2 && ask == 5 {
						return "777"
					}
					return strconv.Itoa(100 + conn)
				}
			}, fallback.Topology{Pooler: "pooler", Mode: fallback.ModeTransaction}, 14,
		},
		{"a second connection refused", func(f *fakePooler) { f.refuse = func(conn int) bool { return conn == 2 } }, fallback.Topology{Pooler: "pooler", Mode: fallback.ModeSession}, 9},
		{
			"a second connection refused, the first changes", func(f *fakePooler) {
				f.refuse = func(conn int) bool { return conn == 2 }
				f.backend = func(_, ask int) string { return strconv.Itoa(100 + ask/4) }
			}, fallback.Topology{Pooler: "pooler", Mode: fallback.ModeTransaction}, 0,
		},
		{
			"statement mode, 1.16 and later", func(f *fakePooler) {
				f.fail = func(q string) *pgproto3.ErrorResponse {
					if q == "begin" {
						return notAllowed()
					}
					return nil
				}
			}, fallback.Topology{Pooler: "pooler", Mode: fallback.ModeStatement}, 0,
		},
		{
			"statement mode, 1.15", func(f *fakePooler) {
				f.drop = true
				f.fail = func(q string) *pgproto3.ErrorResponse {
					if q == "begin" {
						e := notAllowed()
						e.Severity = "ERROR"
						return e
					}
					return nil
				}
			}, fallback.Topology{Pooler: "pooler", Mode: fallback.ModeStatement}, 0,
		},
		{
			"pg_prepared_statements is not to be read", func(f *fakePooler) {
				f.fail = func(q string) *pgproto3.ErrorResponse {
					if strings.Contains(q, "pg_prepared_statements") {
						return &pgproto3.ErrorResponse{Severity: "ERROR", Code: "42501", Message: "permission denied", Routine: "aclcheck_error"}
					}
					return nil
				}
			}, fallback.Topology{Pooler: "pooler", Mode: fallback.ModeSession}, 0,
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			f := newFake()
			tt.change(f)
			got, err := f.probe(t, t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if got.Pooler != tt.want.Pooler || got.Mode != tt.want.Mode || got.Tracks != tt.want.Tracks {
				t.Errorf("got %v, want %v", got, tt.want)
			}
			if tt.round != 0 && f.syncs != tt.round {
				t.Errorf("%d round trips, want %d", f.syncs, tt.round)
			}
		})
	}
}

func TestProbeGivesUpAfterItsBudgetAndNamesIt(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := newFake()
		f.hang = func(int, string) bool { return true }
		begin := time.Now()
		_, err := f.probe(t, t.Context())
		if took := time.Since(begin); took != 2*time.Second {
			t.Errorf("took %v, want the budget of 2 s", took)
		}
		if err == nil || errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "within 2s") {
			t.Errorf("the caller's context is not to blame, got %v", err)
		}
	})
}

func TestProbeStopsWhenItsCallerDoes(t *testing.T) {
	t.Parallel()
	for _, at := range []string{"pg_backend_pid()", "pg_prepared_statements", "begin"} {
		synctest.Test(t, func(t *testing.T) {
			f := newFake()
			f.hang = func(_ int, q string) bool {
				return strings.HasSuffix(q, at) || strings.Contains(q, at) && at != "pg_backend_pid()"
			}
			ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
			defer cancel()
			begin := time.Now()
			_, err := f.probe(t, ctx)
			if took := time.Since(begin); took != 300*time.Millisecond {
				t.Errorf("%s: took %v, want 300 ms", at, took)
			}
			if !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%s: want the context's error, got %v", at, err)
			}
		})
	}
}

func TestProbeTakesASecondConnectionThatHangsForNoEvidence(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := newFake()
		f.hang = func(conn int, _ string) bool { return conn == 2 }
		begin := time.Now()
		top, err := f.probe(t, t.Context())
		if err != nil || top.Mode != fallback.ModeSession {
			t.Errorf("got %v, %v", top, err)
		}
		if took := time.Since(begin); took != 500*time.Millisecond {
			t.Errorf("took %v, want 500 ms", took)
		}
	})
}

func TestProbeReportsADialErrorAndTheCallersContext(t *testing.T) {
	t.Parallel()
	failure := errors.New("no route")
	_, err := fallback.Probe(t.Context(), func(context.Context) (*pgconn.PgConn, error) { return nil, failure })
	if !errors.Is(err, failure) {
		t.Errorf("want the dial error, got %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := fallback.Probe(ctx, newFake().dial); !errors.Is(err, context.Canceled) {
		t.Errorf("want context.Canceled, got %v", err)
	}
}

func TestDialerKeepsTheUsersCallbacksOutOfTheProbe(t *testing.T) {
	t.Parallel()
	f := newFake()
	f.refuse = func(conn int) bool { return conn == 2 }
	var given *pgconn.Config
	calls := 0
	dial := fallback.Dialer(func(ctx context.Context) (*pgconn.Config, error) {
		c, err := f.config(ctx)
		c.OnPgError = func(*pgconn.PgConn, *pgconn.PgError) bool { calls++; return true }
		given = c
		return c, err
	})
	top, err := fallback.Probe(t.Context(), dial)
	f.wg.Wait()
	if err != nil || top.Mode != fallback.ModeSession || calls != 0 {
		t.Errorf("got %v, %v, %d calls of the user's OnPgError", top, err, calls)
	}
	if given.OnPgError(nil, nil); calls != 1 {
		t.Error("the given configuration was changed")
	}
}
