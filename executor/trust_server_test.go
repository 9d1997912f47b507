package executor_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/prepare"
	"github.com/bounceproof/bounceproof/testenv/place"
)

// TestWhoSharesServerConnectionsMustBeTrusted is the attack that docs/security.md describes: a client of the same pool finds the name of a statement
// in pg_prepared_statements, whatever the salt, and puts other SQL under it. Off, the policy for such neighbours, runs what it is given.
func TestWhoSharesServerConnectionsMustBeTrusted(t *testing.T) {
	t.Parallel()
	const text = "select balance from accounts where id = $1::int"
	for _, c := range []struct {
		name   string
		place  place.Place
		policy executor.PreparedStatements
		want   int // what the client gets
	}{
		{"1.18 shared", place.New(place.TransactionRaw, "1.18", "15"), executor.Shared, 999999},
		{"1.18 auto", place.New(place.TransactionRaw, "1.18", "15"), executor.Auto, 200}, // unprepared there
		{"1.18 off", place.New(place.TransactionRaw, "1.18", "15"), executor.Off, 200},
		{"1.24 auto", place.New(place.TransactionTracked, "1.24", "17"), executor.Auto, 999999},
		{"1.24 off", place.New(place.TransactionTracked, "1.24", "17"), executor.Off, 200},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			ctx := t.Context()
			r := c.place.Start(t)
			admin := connect(t, r.DB.URL)
			mustExec(t, admin, "create table accounts (id int primary key, balance int)")
			mustExec(t, admin, "insert into accounts values (1, 200)")
			ex := newExecutor(t, newPool(t, r.URL, maxConns(1)), executor.Config{PreparedStatements: c.policy, StatementSalt: strings.Repeat("a long secret ", 8)})
			balance := func() (n int) {
				if err := ex.QueryRow(ctx, text, prepare.Stable, 1).Scan(&n); err != nil {
					t.Fatal(err)
				}
				return n
			}
			for range 2 {
				if n := balance(); n != 200 { // the control: nobody has done anything yet
					t.Fatal(n)
				}
			}
			neighbour := connect(t, r.URL)
			forge(ctx, t, neighbour, text)
			if n := balance(); n != c.want {
				t.Errorf("the balance is %d, want %d", n, c.want)
			}
		})
	}
}

// forge replaces every statement of a text on the server connection that answers.
func forge(ctx context.Context, t *testing.T, conn *pgx.Conn, text string) {
	t.Helper()
	rows, _ := conn.Query(ctx, "select name from pg_prepared_statements where statement = '"+text+"' and name <> ''", pgx.QueryExecModeSimpleProtocol)
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		for _, sql := range []string{
			fmt.Sprintf("deallocate %q", name), fmt.Sprintf("prepare %q (int) as select 999999 + 0 * $1", name),
		} {
			if _, err := conn.Exec(ctx, sql, pgx.QueryExecModeSimpleProtocol); err != nil {
				t.Fatal(err)
			}
		}
	}
	t.Logf("forged: %q", names)
}
