package pgscript_test

import (
	"context"
	"errors"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/bounceproof/bounceproof/internal/pgscript"
)

func TestItNotifies(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := pgscript.New(t, pgscript.Options{Kind: pgscript.Session})
		conn, other := connect(t, b), connect(t, b)
		ctx := t.Context()
		results, err := conn.PgConn().Exec(ctx, `listen "Odd ""name"""; select pg_backend_pid()`).ReadAll()
		if err != nil {
			t.Fatal(err)
		}
		pid := string(results[1].Rows[0][0])
		if pid == strconv.Itoa(int(conn.PgConn().PID())) {
			t.Error("the pooler told the server's pid")
		}
		if diff := cmp.Diff([]string{`Odd "name"`}, b.Channels()); diff != "" {
			t.Error(diff)
		}
		hear := func() string {
			t.Helper()
			ctx, cancel := context.WithTimeout(ctx, time.Second)
			defer cancel()
			n, err := conn.WaitForNotification(ctx)
			if err != nil {
				return ""
			}
			return n.Channel + ": " + n.Payload
		}
		b.Notify("elsewhere", "x")
		if _, err := other.Exec(ctx, `select pg_notify($1, $2)`, `Odd "name"`, "1"); err != nil {
			t.Fatal(err)
		}
		if got := hear(); got != `Odd "name": 1` {
			t.Errorf("%q", got)
		}
		b.Broadcast("elsewhere", "2")
		if got := hear(); got != "elsewhere: 2" {
			t.Errorf("%q", got)
		}
		b.LoseNotifications(true)
		b.Notify(`Odd "name"`, "3")
		b.LoseNotifications(false)
		if got := hear(); got != "" {
			t.Errorf("%q", got)
		}
		if _, err := conn.PgConn().Exec(ctx, `unlisten "Odd ""name"""`).ReadAll(); err != nil || len(b.Channels()) != 0 {
			t.Error(b.Channels(), err)
		}
	})
}

func TestItRefusesOrStallsWhatItIsTold(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := pgscript.New(t, pgscript.Options{})
		conn, stalled := connect(t, b), connect(t, b)
		b.OnExecute(func(sql string) *pgproto3.ErrorResponse {
			switch sql {
			case "listen a":
				return pgscript.ServerError("58P01", "could not access status of transaction", "x")
			case "select 1":
				return pgscript.NoAnswer
			}
			return nil
		})
		var pgErr *pgconn.PgError
		if _, err := conn.PgConn().Exec(t.Context(), "listen a").ReadAll(); !errors.As(err, &pgErr) || pgErr.Code != "58P01" {
			t.Error(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := conn.PgConn().Exec(ctx, "select 1").ReadAll(); !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
		b.StallAll()
		late, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := stalled.PgConn().Exec(late, "select 2").ReadAll(); !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
		if _, err := connect(t, b).PgConn().Exec(t.Context(), "select 2").ReadAll(); err != nil {
			t.Error("a new connection:", err)
		}
	})
}
