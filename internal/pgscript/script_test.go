package pgscript_test

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/bounceproof/bounceproof/internal/pgscript"
)

const whoAndWhat = "select pg_backend_pid(), name from pg_prepared_statements where statement = $1"

// known prepares a statement and returns the server's process and its name there, "" if it has none.
func known(t *testing.T, conn *pgx.Conn) (pid int, name string) {
	t.Helper()
	if _, err := conn.PgConn().Prepare(t.Context(), "mine", "select 1", nil); err != nil {
		t.Fatal(err)
	}
	var text *string
	if err := conn.QueryRow(t.Context(), whoAndWhat, pgx.QueryExecModeExec, "select 1").Scan(&pid, &text); err != nil {
		t.Fatal(err)
	}
	if text != nil {
		name = *text
	}
	return pid, name
}

func TestAScriptIsHeeded(t *testing.T) {
	t.Parallel()
	refused := pgscript.ServerError("42501", "no", "aclcheck_error")
	b := pgscript.New(t, pgscript.Options{Kind: pgscript.Session, Script: pgscript.Script{
		Login: func(conn int) *pgproto3.ErrorResponse {
			if conn == 2 {
				return pgscript.PoolerError("no more connections")
			}
			return nil
		},
		KeyPID:     func(conn int) uint32 { return uint32(70 + conn) }, //nolint:gosec // small
		BackendPID: func(conn, k int) string { return strconv.Itoa(100*conn + k) },
		Rename:     func(name string) string { return "their_" + name },
		Execute: func(_ int, sql string) *pgproto3.ErrorResponse {
			switch sql {
			case "refused":
				return refused
			case "unanswered":
				return pgscript.NoAnswer
			}
			return nil
		},
	}})
	first := connect(t, b)
	if pid := first.PgConn().PID(); pid != 71 {
		t.Error("BackendKeyData names", pid)
	}
	if pid, name := known(t, first); pid != 101 || name != "their_mine" {
		t.Error(pid, name)
	}
	var pgErr *pgconn.PgError
	if _, err := pgx.ConnectConfig(t.Context(), b.ConnConfig(t)); !errors.As(err, &pgErr) || pgErr.Message != "no more connections" {
		t.Error("second login:", err)
	}
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		if _, err := first.Exec(t.Context(), "refused", mode); !errors.As(err, &pgErr) || pgErr.Code != "42501" {
			t.Error(mode, err)
		}
	}
	if _, err := first.Exec(t.Context(), "select 1"); err != nil {
		t.Error("after an error:", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	b.Call(pgscript.FromClient, 1, cancel)
	if _, err := first.Exec(ctx, "unanswered"); !errors.Is(err, context.Canceled) {
		t.Error("no answer:", err)
	}
	if b.Ran("refused") != 0 || b.Ran("unanswered") != 0 {
		t.Error("what was not executed was counted")
	}
}

func TestErrorsEndConnectionsWhereTheScriptSaysSo(t *testing.T) {
	t.Parallel()
	for _, end := range []bool{false, true} {
		b := pgscript.New(t, pgscript.Options{Script: pgscript.Script{ErrorsEnd: end, Execute: func(int, string) *pgproto3.ErrorResponse {
			return pgscript.ServerError("08P01", "not allowed", "")
		}}})
		conn := connect(t, b)
		_, err := conn.Exec(t.Context(), "begin", pgx.QueryExecModeExec)
		// When the connection ends at once, pgconn reports that.
		var pgErr *pgconn.PgError
		if err == nil || !end && (!errors.As(err, &pgErr) || pgErr.Severity != "ERROR") {
			t.Error(end, err)
		}
		if conn.Ping(t.Context()) == nil {
			t.Error("the second text was executed")
		}
		if conn.IsClosed() != end {
			t.Errorf("closed: %v, want %v", conn.IsClosed(), end)
		}
	}
}

// What each kind does with names and processes, with two clients.
func TestKindsDifferInWhoHasWhat(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		kind    pgscript.Kind
		servers int
		direct  bool // BackendKeyData names the server's process
		same    bool // both clients are on one
		name    string
		left    []string // names on servers when the clients have gone
	}{
		{pgscript.Direct, 0, true, false, "mine", nil},
		{pgscript.Session, 0, false, false, "mine", []string{"mine", "mine"}},
		{pgscript.Raw, 1, false, true, "mine", nil},
		{pgscript.Tracked, 1, false, true, "PGBOUNCER_1", nil},
	} {
		b := pgscript.New(t, pgscript.Options{Kind: test.kind, Servers: test.servers})
		first := connect(t, b)
		pid, name := known(t, first)
		if direct := uint32(pid) == first.PgConn().PID(); direct != test.direct || name != test.name { //nolint:gosec // a process id
			t.Errorf("kind %v: process %d, name %q", test.kind, pid, name)
		}
		if test.kind == pgscript.Raw {
			_ = first.PgConn().Deallocate(t.Context(), "mine")
		}
		second := connect(t, b)
		other, _ := known(t, second)
		if same := other == pid; same != test.same {
			t.Errorf("kind %v: processes %d and %d", test.kind, pid, other)
		}
		if test.kind == pgscript.Raw {
			_ = second.PgConn().Deallocate(t.Context(), "mine")
		}
		_, _ = first.Close(t.Context()), second.Close(t.Context())
		b.Wait()
		if got := b.Names(); !slices.Equal(got, test.left) {
			t.Errorf("kind %v: left behind %q, want %q", test.kind, got, test.left)
		}
	}
}

// A pooler replaces the server connection of a client that leaves in the middle of something, and its names with it.
func TestAPoolerReplacesAServerThatWasLeft(t *testing.T) {
	t.Parallel()
	for _, begin := range []bool{false, true} {
		b := pgscript.New(t, pgscript.Options{Kind: pgscript.Raw})
		conn := connect(t, b)
		before, _ := known(t, conn)
		if begin {
			if _, err := conn.Exec(t.Context(), "begin"); err != nil {
				t.Fatal(err)
			}
		}
		_ = conn.Close(t.Context())
		b.Wait()
		if names := b.Names(); (len(names) == 0) != begin {
			t.Errorf("left in a transaction: %v; names %v", begin, names)
		}
		conn = connect(t, b)
		var pid int
		if err := conn.QueryRow(t.Context(), "select pg_backend_pid()").Scan(&pid); err != nil || (pid != before) != begin {
			t.Errorf("left in a transaction: %v; process %d became %d, %v", begin, before, pid, err)
		}
	}
}

// Any message may come at any place of an answer.
func TestMessagesAreInsertedAndReplaced(t *testing.T) {
	t.Parallel()
	b := pgscript.New(t, pgscript.Options{})
	cfg := b.ConnConfig(t)
	var notices []string
	cfg.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) { notices = append(notices, n.Message) }
	conn, err := pgx.ConnectConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(t.Context()) })
	notice := func(text string) pgproto3.BackendMessage {
		return &pgproto3.NoticeResponse{Severity: "NOTICE", Message: text}
	}
	// The answer is ParseComplete, BindComplete, RowDescription, DataRow, CommandComplete, ReadyForQuery.
	var want []string
	for n := 1; n <= 6; n++ {
		want = append(want, strconv.Itoa(n))
		trigger := b.Insert(n, notice(strconv.Itoa(n)))
		var got int
		if err := conn.QueryRow(t.Context(), "select 5", pgx.QueryExecModeExec).Scan(&got); err != nil || got != 5 || !trigger.Fired() {
			t.Errorf("before message %d: %d, %v, %v", n, got, err, trigger.Fired())
		}
	}
	if diff := cmp.Diff(want, notices); diff != "" {
		t.Error(diff)
	}
	b.Replace(4, &pgproto3.DataRow{Values: [][]byte{[]byte("6")}}, &pgproto3.DataRow{Values: [][]byte{[]byte("7")}})
	result := conn.PgConn().ExecParams(t.Context(), "select 5", nil, nil, nil, nil).Read()
	if result.Err != nil || len(result.Rows) != 2 || string(result.Rows[0][0]) != "6" || string(result.Rows[1][0]) != "7" {
		t.Errorf("a row in place of another: %q, %v", result.Rows, result.Err)
	}
	b.Replace(2)
	if result := conn.PgConn().ExecParams(t.Context(), "select 5", nil, nil, nil, nil).Read(); result.Err != nil || len(result.Rows) != 1 {
		t.Errorf("without BindComplete, which pgconn does not ask for: %q, %v", result.Rows, result.Err)
	}
}
