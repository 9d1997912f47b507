package fallback_test

import (
	"bytes"
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
	"github.com/bounceproof/bounceproof/internal/pgscript"
)

// probed is a scripted server and the look at it.
type probed struct {
	*pgscript.Backend
	t *testing.T
}

func newProbed(t *testing.T, o pgscript.Options) probed { return probed{pgscript.New(t, o), t} }

func (p probed) config(context.Context) (*pgconn.Config, error) {
	return &p.ConnConfig(p.t).Config, nil
}

// probe looks, and checks what holds for every look: its budget, and that nothing is left of it.
func (p probed) probe(t *testing.T, ctx context.Context) (fallback.Topology, error) {
	t.Helper()
	top, err := fallback.Probe(ctx, fallback.Dialer(p.config))
	p.Wait() // every connection has ended: nothing else would let its server return
	if p.Open() != 0 || p.Cancels() != 0 {
		t.Errorf("%d connections open, %d cancel requests", p.Open(), p.Cancels())
	}
	if p.Connects() > 2 || p.RoundTrips() > 14 {
		t.Errorf("over budget: %d connections, %d round trips", p.Connects(), p.RoundTrips())
	}
	if names := p.Names(); len(names) != 0 {
		t.Errorf("left behind: %v", names)
	}
	t.Logf("%v (%s), error %v; %d round trips", top, strings.Join(top.Evidence, "; "), err, p.RoundTrips())
	return top, err
}

// sessionPooler is a session pooler that does something of its own.
func sessionPooler(s pgscript.Script) pgscript.Options {
	return pgscript.Options{Kind: pgscript.Session, Script: s}
}

// renaming is a session pooler by whose name a server knows every statement.
func renaming(name string) pgscript.Options {
	return sessionPooler(pgscript.Script{Rename: func(string) string { return name }})
}

// pids is a session pooler with other answers to pg_backend_pid().
func pids(answer func(conn, k int) string) pgscript.Options {
	return sessionPooler(pgscript.Script{BackendPID: answer})
}

func refuseSecond(conn int) *pgproto3.ErrorResponse {
	if conn == 2 {
		return pgscript.PoolerError("no more connections allowed (max_client_conn)")
	}
	return nil
}

// failing is a session pooler that answers texts which contain a word with an error.
func failing(word string, e *pgproto3.ErrorResponse) pgscript.Options {
	return sessionPooler(pgscript.Script{Execute: func(_ int, sql string) *pgproto3.ErrorResponse {
		if strings.Contains(sql, word) {
			return e
		}
		return nil
	}})
}

func notAllowed() *pgproto3.ErrorResponse {
	return &pgproto3.ErrorResponse{Severity: "FATAL", Code: "08P01", Message: "transaction blocks not allowed in statement pooling mode"}
}

// What no PgBouncer at hand does.
func TestProbeOfOtherPoolers(t *testing.T) {
	t.Parallel()
	error115 := notAllowed()
	error115.Severity = "ERROR"
	statementMode115 := failing("begin", error115)
	statementMode115.Script.ErrorsEnd = true
	tests := []struct {
		name  string
		o     pgscript.Options
		want  fallback.Topology
		round int // trips; 0 = any
	}{
		{"a server", pgscript.Options{}, fallback.Topology{Pooler: "none", Mode: fallback.ModeDirect}, 1},
		{
			"Pgpool-II, which passes the server's process id on, and answers a Close before its turn",
			pgscript.Options{Script: pgscript.Script{CloseFirst: true}},
			fallback.Topology{Pooler: "pooler", Mode: fallback.ModeSession},
			14,
		},
		{"a session pooler", sessionPooler(pgscript.Script{}), fallback.Topology{Pooler: "pooler", Mode: fallback.ModeSession}, 14},
		{
			"Odyssey",
			pgscript.Options{Kind: pgscript.Raw, Script: pgscript.Script{Rename: func(string) string { return "odyssey_pstmt_12" }}},
			fallback.Topology{Pooler: "odyssey", Mode: fallback.ModeTransaction, Tracks: true},
			0,
		},
		{"Odyssey before 1.5.1, whose names say nothing", renaming("2caa56bd"), fallback.Topology{Pooler: "pooler", Mode: fallback.ModeSession, Tracks: true}, 14},
		{"PgCat", renaming("PGCAT_3"), fallback.Topology{Pooler: "pgcat", Mode: fallback.ModeSession, Tracks: true}, 14},
		{"Supavisor", renaming("sv_abc+/="), fallback.Topology{Pooler: "supavisor", Mode: fallback.ModeSession, Tracks: true}, 14},
		{"PgDog", renaming("__pgdog_3"), fallback.Topology{Pooler: "pgdog", Mode: fallback.ModeSession, Tracks: true}, 14},
		{
			"PgBouncer, which tracks only where it shares", renaming("PGBOUNCER_3"),
			fallback.Topology{Pooler: "pgbouncer", Mode: fallback.ModeTransaction, Tracks: true},
			4,
		},
		{"a pooler that parses later", renaming(""), fallback.Topology{Pooler: "pooler", Mode: fallback.ModeSession}, 14},
		{
			"CockroachDB, which has no process ids", pids(func(int, int) string { return "-1" }),
			fallback.Topology{Pooler: "pooler", Mode: fallback.ModeSession},
			14,
		},
		{
			"one backend on both connections",
			pgscript.Options{Kind: pgscript.Raw},
			fallback.Topology{Pooler: "pooler", Mode: fallback.ModeTransaction},
			6,
		},
		{
			"several backends in turn",
			pgscript.Options{Kind: pgscript.Raw, Servers: 4},
			fallback.Topology{Pooler: "pooler", Mode: fallback.ModeTransaction},
			4,
		},
		{
			"a change under the second connection in the last round", pids(func(conn, k int) string {
				if conn == 2 && k == 5 {
					return "777"
				}
				return strconv.Itoa(100 + conn)
			}), fallback.Topology{Pooler: "pooler", Mode: fallback.ModeTransaction}, 14,
		},
		{
			"a second connection refused", sessionPooler(pgscript.Script{Login: refuseSecond}),
			fallback.Topology{Pooler: "pooler", Mode: fallback.ModeSession, Partial: true},
			9,
		},
		{
			"a second connection refused, the first changes", sessionPooler(pgscript.Script{
				Login: refuseSecond, BackendPID: func(_, k int) string { return strconv.Itoa(100 + k/4) },
			}), fallback.Topology{Pooler: "pooler", Mode: fallback.ModeTransaction, Partial: true}, 0,
		},
		{
			"statement mode, 1.16 and later", failing("begin", notAllowed()),
			fallback.Topology{Pooler: "pooler", Mode: fallback.ModeStatement},
			0,
		},
		{
			"statement mode, 1.15", statementMode115,
			fallback.Topology{Pooler: "pooler", Mode: fallback.ModeStatement},
			0,
		},
		{
			"a second connection is ended, for want of a server",
			sessionPooler(pgscript.Script{Execute: func(conn int, _ string) *pgproto3.ErrorResponse {
				if conn == 2 {
					return pgscript.PoolerError("server login failed: FATAL too many connections for role")
				}
				return nil
			}}),
			fallback.Topology{Pooler: "pooler", Mode: fallback.ModeSession, Partial: true},
			0,
		},
		{
			"BEGIN fails for another reason", failing("begin", pgscript.ServerError("57014", "canceling statement", "ProcessInterrupts")),
			fallback.Topology{Pooler: "pooler", Mode: fallback.ModeSession, Partial: true},
			0,
		},
		{
			"pg_prepared_statements is not to be read",
			failing("pg_prepared_statements", pgscript.ServerError("42501", "permission denied", "aclcheck_error")),
			fallback.Topology{Pooler: "pooler", Mode: fallback.ModeSession},
			0,
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			p := newProbed(t, tt.o)
			got, err := p.probe(t, t.Context())
			if err != nil {
				t.Fatal(err)
			}
			wants := fallback.TrackingNo
			switch {
			case tt.want.Tracks:
				wants = fallback.TrackingYes
			case strings.Contains(tt.name, "parses later"), strings.Contains(tt.name, "is not to be read"):
				wants = fallback.TrackingUnknown // and not no
			}
			if got.Pooler != tt.want.Pooler || got.Mode != tt.want.Mode || got.Tracking() != wants || got.Partial != tt.want.Partial {
				t.Errorf("got %v, tracks: %v, partial: %t; want %v, %v, %t", got, got.Tracking(), got.Partial, tt.want, wants, tt.want.Partial)
			}
			if n := p.RoundTrips(); tt.round != 0 && n != tt.round {
				t.Errorf("%d round trips, want %d", n, tt.round)
			}
		})
	}
}

func TestProbeGivesUpAfterItsBudgetAndNamesIt(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := newProbed(t, failing("", pgscript.NoAnswer))
		begin := time.Now()
		_, err := p.probe(t, t.Context())
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
			p := newProbed(t, sessionPooler(pgscript.Script{Execute: func(_ int, sql string) *pgproto3.ErrorResponse {
				if strings.HasSuffix(sql, at) || strings.Contains(sql, at) && at != "pg_backend_pid()" {
					return pgscript.NoAnswer
				}
				return nil
			}}))
			ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
			defer cancel()
			begin := time.Now()
			_, err := p.probe(t, ctx)
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
		p := newProbed(t, sessionPooler(pgscript.Script{Execute: func(conn int, _ string) *pgproto3.ErrorResponse {
			if conn == 2 {
				return pgscript.NoAnswer
			}
			return nil
		}}))
		begin := time.Now()
		top, err := p.probe(t, t.Context())
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
	if _, err := fallback.Probe(ctx, fallback.Dialer(newProbed(t, pgscript.Options{}).config)); !errors.Is(err, context.Canceled) {
		t.Errorf("want context.Canceled, got %v", err)
	}
}

// slowWriter is a connection whose first write takes until a reader waits for what comes after the answer: on a busy machine the start-up message
// takes pgconn more than 15 ms, and it reads beside, on a goroutine that is in the middle of a read when the connection is handed over.
type slowWriter struct {
	net.Conn
	once    sync.Once
	reading chan struct{}
	ready   bool // the answer to the start-up message has been read; used by readers only, which take turns
}

func (s *slowWriter) Read(p []byte) (int, error) {
	if s.ready {
		s.once.Do(func() { close(s.reading) })
	}
	n, err := s.Conn.Read(p)
	s.ready = s.ready || bytes.HasSuffix(p[:n], []byte{'Z', 0, 0, 0, 5, 'I'})
	return n, err
}

func (s *slowWriter) Write(p []byte) (int, error) {
	n, err := s.Conn.Write(p)
	<-s.reading
	return n, err
}

func TestProbeReadsWherePgconnIsReading(t *testing.T) {
	t.Parallel()
	for range 50 { // of two readers that wait, either could be the first
		p := newProbed(t, pgscript.Options{})
		top, err := fallback.Probe(t.Context(), fallback.Dialer(func(ctx context.Context) (*pgconn.Config, error) {
			c, err := p.config(ctx)
			c.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
				conn, err := p.Dial(ctx, network, addr)
				return &slowWriter{Conn: conn, reading: make(chan struct{})}, err
			}
			return c, err
		}))
		if err != nil || top.Mode != fallback.ModeDirect {
			t.Fatalf("got %v, error %v", top, err)
		}
	}
}

func TestDialerKeepsTheUsersCallbacksOutOfTheProbe(t *testing.T) {
	t.Parallel()
	p := newProbed(t, sessionPooler(pgscript.Script{Login: refuseSecond}))
	var given *pgconn.Config
	calls := 0
	dial := fallback.Dialer(func(ctx context.Context) (*pgconn.Config, error) {
		c, err := p.config(ctx)
		c.OnPgError = func(*pgconn.PgConn, *pgconn.PgError) bool { calls++; return true }
		given = c
		return c, err
	})
	top, err := fallback.Probe(t.Context(), dial)
	p.Wait()
	if err != nil || top.Mode != fallback.ModeSession || calls != 0 {
		t.Errorf("got %v, %v, %d calls of the user's OnPgError", top, err, calls)
	}
	if given.OnPgError(nil, nil); calls != 1 {
		t.Error("the given configuration was changed")
	}
}
