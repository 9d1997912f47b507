package executor_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/prepare"
)

// conformancePlaces are the columns of the matrix: every mode with every suite's pair, and crosses between the suites.
func conformancePlaces() []place {
	var places []place
	for _, s := range suites {
		places = append(places, place{direct, "", s.server}, place{session, s.bouncer, s.server}, place{raw, s.bouncer, s.server},
			place{statement, s.bouncer, s.server})
		if s.bouncer == "1.24" || s.bouncer == "1.26" {
			places = append(places, place{tracked, s.bouncer, s.server}, place{statementTracked, s.bouncer, s.server})
		}
	}
	return append(places, place{raw, "1.15", "18"}, place{session, "1.15", "17"}, place{raw, "1.18", "17"}, place{statement, "1.18", "13"},
		place{tracked, "1.24", "13"}, place{tracked, "1.24", "18"}, place{tracked, "1.26", "15"}, place{raw, "1.26", "13"})
}

// cell is one operation under one policy in one place.
type cell struct {
	*stand
	ex     *executor.Executor
	policy executor.PreparedStatements
	table  string // of the cell's own
	plain  *pgx.Conn
	lost   int // how often the operation gave up with the typed error
}

// operation is one row of the matrix. run performs it once, the i-th time; what it returns is what the caller of the executor got. It
// fails the test where a result is wrong.
type operation struct {
	name   string
	begins bool // it needs BEGIN
	safe   bool // it binds no name on the strength of an earlier Parse, so that even On never loses a statement
	run    func(ctx context.Context, t *testing.T, c *cell, i int) error
}

var operations = []operation{
	{name: "Exec", run: conformExec},
	{name: "Query", run: conformQuery},
	{name: "QueryRow", run: conformQueryRow},
	{name: "SendBatch", safe: true, run: conformSendBatch},
	{name: "CopyFrom", safe: true, run: conformCopyFrom},
	{name: "Begin", begins: true, run: conformBegin},
	{name: "InTx", begins: true, run: conformInTx},
	{name: "NamedArgs", run: conformNamedArgs},
	{name: "QueueOnlyInTx", run: conformQueueOnly},
}

// conformanceRounds is how often a cell repeats its operation: each of four servers is met twice, and unmarked texts become stable.
const conformanceRounds = 8

// TestConformance runs every operation under every policy in every place. Every cell is a line of go test -v.
func TestConformance(t *testing.T) {
	for _, p := range conformancePlaces() {
		t.Run(p.String(), func(t *testing.T) {
			t.Parallel()
			st := p.build(t)
			st.spread(t, 4)
			for _, policy := range []executor.PreparedStatements{executor.Auto, executor.On, executor.Off, executor.Shared} {
				t.Run(policy.String(), func(t *testing.T) { conform(t, st, policy) })
			}
		})
	}
}

func conform(t *testing.T, st *stand, policy executor.PreparedStatements) {
	book := &logbook{}
	ex := newExecutor(t, newPool(t, st.url, maxConns(2)), executor.Config{PreparedStatements: policy, Logger: book.logger()})
	plain := st.plain(t)
	lost := 0
	for i, op := range operations {
		t.Run(op.name, func(t *testing.T) {
			c := &cell{stand: st, ex: ex, policy: policy, plain: plain, table: fmt.Sprintf("t_%s_%d", policy, i)}
			st.must(t, plain, "create table "+c.table+" (id int primary key, n bigint not null, v jsonb, at timestamptz)")
			before := ex.Stats()
			for round := range conformanceRounds {
				err := op.run(t.Context(), t, c, round)
				switch {
				case op.begins && st.refusesBegin():
					if !errors.Is(err, executor.ErrStatementMode) {
						t.Fatalf("round %d: want ErrStatementMode, got %v", round, err)
					}
				case err != nil && policy == executor.On && st.forwards() && !op.safe:
					if !lostOnly(err) {
						t.Fatalf("round %d: under on a lost statement is a *PreparedStatementError, got %v", round, err)
					}
					c.lost++
				case err != nil:
					t.Fatalf("round %d: %v", round, err)
				}
			}
			lost += c.lost
			after := ex.Stats()
			t.Logf("cell: %v, %v, %s: named %d, unprepared %d, shared %d, passed %d; %d lost, %d run again", st.place, policy, op.name,
				after.Named-before.Named, after.Unprepared-before.Unprepared, after.Shared-before.Shared, after.Passed-before.Passed,
				c.lost, after.Retries-before.Retries)
		})
	}
	if t.Failed() {
		return
	}
	conformTotals(t, st, policy, ex, book, lost)
}

// conformTotals checks that a policy did what its name says, and said no more than it should.
func conformTotals(t *testing.T, st *stand, policy executor.PreparedStatements, ex *executor.Executor, book *logbook, lost int) {
	n := ex.Stats()
	var used []string
	for name, count := range map[string]uint64{"named": n.Named, "shared": n.Shared} {
		if count > 0 {
			used = append(used, name)
		}
	}
	want := []string{"named"}
	switch {
	case policy == executor.Off:
		want = nil
	case policy == executor.Shared && st.forwards():
		want = []string{"shared"}
	case policy == executor.Auto && st.forwards():
		want = nil
	}
	if !slices.Equal(used, want) {
		t.Errorf("want statements with a name to be run %v, got %v: %+v", want, used, n)
	}
	if policy == executor.On && st.forwards() && lost == 0 {
		t.Error("under on nothing was lost behind a pooler that loses names: the servers do not take turns, so this matrix proves nothing")
	}
	warnings := book.at(slog.LevelWarn)
	wantWarnings := 0
	if policy == executor.Auto && st.forwards() {
		wantWarnings = 1
	}
	if len(warnings) != wantWarnings {
		t.Errorf("want %d warnings, got %d: %s", wantWarnings, len(warnings), strings.Join(warnings, "\n"))
	}
	for _, secret := range []string{"select", "insert", "update", "hush"} {
		if strings.Contains(strings.ToLower(book.all()), secret) {
			t.Errorf("the log shows SQL or arguments (%q):\n%s", secret, book.all())
		}
	}
	top, err := ex.Topology(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%v, %v: taken for %v", st.place, policy, top)
}

// count is the number of rows of the cell's table, and the sum of n, read past the pooler.
func (c *cell) count(t *testing.T) string {
	return one(t, c.plain, "select count(*) || '/' || coalesce(sum(n), 0) from "+c.table)
}

// expect fails the test unless the table holds so many rows with such a sum. A lost statement may have left out some of them.
func (c *cell) expect(t *testing.T, rows, sum int) {
	t.Helper()
	if got, want := c.count(t), fmt.Sprintf("%d/%d", rows, sum); got != want {
		t.Fatalf("want rows/sum %s, got %s", want, got)
	}
}

func conformExec(ctx context.Context, t *testing.T, c *cell, i int) error {
	before := c.count(t)
	tag, err := c.ex.Exec(ctx, "insert into "+c.table+" values ($1, $2, $3, now())", prepare.Stable, i, 1, map[string]string{"k": "hush"})
	if err != nil {
		if c.count(t) != before {
			t.Fatal("a statement that was reported as lost has run")
		}
		return err
	}
	if tag.String() != "INSERT 0 1" {
		t.Fatalf("tag %q", tag)
	}
	// Unmarked: it becomes stable by itself. The argument is an int for a bigint column and nil for jsonb.
	tag, err = c.ex.Exec(ctx, "update "+c.table+" set n = n + $2, v = $3 where id = $1", i, 10, nil)
	if err != nil {
		return err
	}
	if tag.RowsAffected() != 1 {
		t.Fatalf("tag %q", tag)
	}
	if got := one(t, c.plain, "select n from "+c.table+" where id = $1 and v is null", i); got != "11" {
		t.Fatalf("n is %s", got)
	}
	// Without arguments: pgx's simple query, several statements.
	if tag, err = c.ex.Exec(ctx, "delete from "+c.table+" where id = -1; update "+c.table+" set at = null"); err != nil {
		return err
	}
	if !tag.Update() {
		t.Fatalf("tag %q", tag)
	}
	// An error of the caller's own.
	_, err = c.ex.Exec(ctx, "insert into "+c.table+" values ($1, 0)", prepare.Stable, i)
	return duplicate(t, err)
}

// duplicate turns the unique violation that a test provokes into nil.
func duplicate(t *testing.T, err error) error {
	t.Helper()
	var pgErr *pgconn.PgError
	if err == nil {
		t.Fatal("a duplicate key was accepted")
	}
	if errors.As(err, &pgErr) && pgErr.Code == "23505" {
		return nil
	}
	return err
}

func conformQuery(ctx context.Context, t *testing.T, c *cell, i int) error {
	type row struct {
		N    int64
		Text string
		V    map[string]int
	}
	rows, err := c.ex.Query(ctx, "select g::bigint as n, 'x' || g as text, jsonb_build_object('g', g) as v from generate_series(1, $1::int) g",
		prepare.Stable, 3+i)
	if err != nil {
		return err
	}
	got, err := pgx.CollectRows(rows, pgx.RowToStructByName[row])
	if err != nil {
		return err
	}
	if len(got) != 3+i || got[2+i].N != int64(3+i) || got[2+i].Text != fmt.Sprint("x", 3+i) || got[0].V["g"] != 1 {
		t.Fatalf("got %v", got)
	}
	if rows.CommandTag().String() != fmt.Sprintf("SELECT %d", 3+i) {
		t.Fatalf("tag %q", rows.CommandTag())
	}
	// Rows closed early, then an error that comes after rows.
	rows, err = c.ex.Query(ctx, "select g from generate_series(1, $1) g", 10000)
	if err != nil {
		return err
	}
	if !rows.Next() {
		return rows.Err()
	}
	rows.Close()
	if rows.Err() != nil {
		return rows.Err()
	}
	rows, err = c.ex.Query(ctx, "select 10 / (g - 500) from generate_series(1, $1) g", prepare.Stable, 1000)
	if err != nil {
		return err
	}
	n := 0
	for rows.Next() {
		n++
	}
	var pgErr *pgconn.PgError
	if !errors.As(rows.Err(), &pgErr) || pgErr.Code != "22012" {
		t.Fatalf("want a division by zero after %d rows, got %v", n, rows.Err())
	}
	return nil
}

func conformQueryRow(ctx context.Context, t *testing.T, c *cell, i int) error {
	var n int
	var text string
	err := c.ex.QueryRow(ctx, "select $1::int + 1, $2::text", prepare.Stable, i, "hush").Scan(&n, &text)
	if err != nil {
		return err
	}
	if n != i+1 || text != "hush" {
		t.Fatalf("got %d, %q", n, text)
	}
	if err := c.ex.QueryRow(ctx, "select n from "+c.table+" where id = $1", i).Scan(&n); !errors.Is(err, pgx.ErrNoRows) {
		if err == nil {
			t.Fatal("a row that is not there")
		}
		return err
	}
	err = c.ex.QueryRow(ctx, "insert into "+c.table+" values ($1, $2) returning n", prepare.Stable, i, i*2).Scan(&n)
	if err != nil {
		return err
	}
	if n != i*2 {
		t.Fatalf("n is %d", n)
	}
	// No arguments, no mark: extended in pgx too.
	if err := c.ex.QueryRow(ctx, "select count(*) from "+c.table+" where id >= 0").Scan(&n); err != nil {
		return err
	}
	if got := one(t, c.plain, "select count(*) from "+c.table); fmt.Sprint(n) != got {
		t.Fatalf("count %d, want %s", n, got)
	}
	return nil
}

func conformSendBatch(ctx context.Context, t *testing.T, c *cell, i int) error {
	insert := "insert into " + c.table + " values ($1, $2)"
	var b pgx.Batch
	b.Queue(insert, prepare.Stable, 10*i, 1)
	b.Queue(insert, prepare.Stable, 10*i+1, 2)
	b.Queue("select sum(n) from " + c.table)
	b.Queue("select n from "+c.table+" where id = $1", 10*i+1)
	b.Queue(insert, prepare.Stable, 10*i+2, 3)
	results := c.ex.SendBatch(ctx, &b)
	for range 2 {
		if tag, err := results.Exec(); err != nil || tag.RowsAffected() != 1 {
			return errors.Join(err, results.Close())
		}
	}
	var sum, n int
	if err := results.QueryRow().Scan(&sum); err != nil {
		return errors.Join(err, results.Close())
	}
	rows, err := results.Query()
	if err != nil {
		return errors.Join(err, results.Close())
	}
	if n, err = pgx.CollectExactlyOneRow(rows, pgx.RowTo[int]); err != nil {
		return errors.Join(err, results.Close())
	}
	if err := results.Close(); err != nil {
		return err
	}
	if sum != 6*i+3 || n != 2 {
		t.Fatalf("sum %d, n %d", sum, n)
	}
	c.expect(t, 3*(i+1), 6*(i+1))
	// The whole batch is one implicit transaction.
	var bad pgx.Batch
	bad.Queue(insert, prepare.Stable, 10*i+5, 1)
	bad.Queue(insert, prepare.Stable, 10*i, 1)
	bad.Queue(insert, prepare.Stable, 10*i+6, 1)
	if err := duplicate(t, c.ex.SendBatch(ctx, &bad).Close()); err != nil {
		return err
	}
	c.expect(t, 3*(i+1), 6*(i+1))
	return nil
}

func conformCopyFrom(ctx context.Context, t *testing.T, c *cell, i int) error {
	const rows = 50
	n, err := c.ex.CopyFrom(ctx, pgx.Identifier{c.table}, []string{"id", "n", "v"}, pgx.CopyFromSlice(rows, func(k int) ([]any, error) {
		return []any{rows*i + k, 1, map[string]int{"k": k}}, nil
	}))
	if err != nil {
		return err
	}
	if n != rows {
		t.Fatalf("%d rows", n)
	}
	c.expect(t, rows*(i+1), rows*(i+1))
	_, err = c.ex.CopyFrom(ctx, pgx.Identifier{c.table}, []string{"id", "n"}, pgx.CopyFromRows([][]any{{-1, 1}, {rows * i, 1}}))
	if err := duplicate(t, err); err != nil {
		return err
	}
	c.expect(t, rows*(i+1), rows*(i+1))
	return nil
}

func conformBegin(ctx context.Context, t *testing.T, c *cell, i int) error {
	before := c.count(t)
	err := func() error {
		tx, err := c.ex.Begin(ctx)
		if err != nil {
			return err
		}
		defer func() { _ = tx.Rollback(ctx) }()
		if _, err := tx.Exec(ctx, "insert into "+c.table+" values ($1, $2)", prepare.Stable, i, 1); err != nil {
			return err
		}
		nested, err := tx.Begin(ctx)
		if err != nil {
			return err
		}
		if _, err := nested.Exec(ctx, "update "+c.table+" set n = $2 where id = $1", i, 1000); err != nil {
			return err
		}
		if err := nested.Rollback(ctx); err != nil {
			return err
		}
		var n int
		if err := tx.QueryRow(ctx, "select n from "+c.table+" where id = $1", prepare.Stable, i).Scan(&n); err != nil {
			return err
		}
		if n != 1 {
			t.Fatalf("after ROLLBACK TO SAVEPOINT n is %d", n)
		}
		if c.count(t) != before {
			t.Fatal("a transaction that is still open is visible")
		}
		return tx.Commit(ctx)
	}()
	if err != nil {
		if c.count(t) != before {
			t.Fatalf("a transaction that failed has left rows: %v", err)
		}
		return err
	}
	if got := one(t, c.plain, "select n from "+c.table+" where id = $1", i); got != "1" {
		t.Fatalf("n is %s", got)
	}
	// And one that is rolled back.
	tx, err := c.ex.Begin(ctx)
	if err != nil {
		return err
	}
	if _, err := tx.Exec(ctx, "delete from "+c.table); err != nil {
		return err
	}
	if err := tx.Rollback(ctx); err != nil {
		return err
	}
	if err := tx.Commit(ctx); !errors.Is(err, pgx.ErrTxClosed) {
		t.Fatalf("Commit after Rollback: %v", err)
	}
	if got := one(t, c.plain, "select n from "+c.table+" where id = $1", i); got != "1" {
		t.Fatalf("after a rollback n is %s", got)
	}
	return nil
}

func conformInTx(ctx context.Context, t *testing.T, c *cell, i int) error {
	before := c.count(t)
	committed := 0
	var backend, again int
	err := c.ex.InTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead}, func(ctx context.Context, tx executor.Tx) error {
		tx.Queue("update "+c.table+" set n = n + 1 where id = $1", prepare.Stable, i)
		tx.OnCommit(func() { committed++ })
		var level string
		if err := tx.QueryRow(ctx, "select current_setting('transaction_isolation'), pg_backend_pid()", prepare.Stable).Scan(&level, &backend); err != nil {
			return err
		}
		if level != "repeatable read" {
			t.Fatalf("isolation level %q", level)
		}
		if _, err := tx.Exec(ctx, "insert into "+c.table+" values ($1, $2)", prepare.Stable, i, 1); err != nil {
			return err
		}
		rows, err := tx.Query(ctx, "select pg_backend_pid() from generate_series(1, $1)", 2)
		if err != nil {
			return err
		}
		pids, err := pgx.CollectRows(rows, pgx.RowTo[int])
		if err != nil {
			return err
		}
		if again = pids[1]; again != backend {
			t.Fatalf("one transaction ran on two servers: %d and %d", backend, again)
		}
		return nil
	})
	if err != nil {
		if c.count(t) != before || committed != 0 {
			t.Fatalf("a transaction that failed has left rows, or ran OnCommit %d times: %v", committed, err)
		}
		return err
	}
	if committed != 1 {
		t.Fatalf("OnCommit ran %d times", committed)
	}
	if got := one(t, c.plain, "select n from "+c.table+" where id = $1", i); got != "2" {
		t.Fatalf("n is %s, the queued update did not run once", got)
	}
	// The caller's own error rolls back and comes back as it is.
	own := errors.New("own")
	err = c.ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
		if _, err := tx.Exec(ctx, "delete from "+c.table, prepare.Stable); err != nil {
			return err
		}
		return own
	})
	if err != own { //nolint:errorlint // not wrapped
		return err
	}
	if got := one(t, c.plain, "select n from "+c.table+" where id = $1", i); got != "2" {
		t.Fatalf("after a rollback n is %s", got)
	}
	return nil
}

func conformNamedArgs(ctx context.Context, t *testing.T, c *cell, i int) error {
	if _, err := c.ex.Exec(ctx, "insert into "+c.table+" values (@id, @n, @v)", prepare.Stable,
		pgx.NamedArgs{"id": i, "n": 7, "v": struct {
			A string `json:"a"`
		}{"hush"}}); err != nil {
		return err
	}
	var n int
	var v []byte
	err := c.ex.QueryRow(ctx, "select n, v from "+c.table+" where id = @id and n = @n", pgx.StrictNamedArgs{"id": i, "n": 7}, prepare.Stable).Scan(&n, &v)
	if err != nil {
		return err
	}
	if n != 7 || string(v) != `{"a": "hush"}` {
		t.Fatalf("got %d, %s", n, v)
	}
	rows, err := c.ex.Query(ctx, "select @a::int + @b::int", pgx.NamedArgs{"a": i, "b": 2})
	if err != nil {
		return err
	}
	if n, err = pgx.CollectExactlyOneRow(rows, pgx.RowTo[int]); err != nil {
		return err
	}
	if n != i+2 {
		t.Fatalf("got %d", n)
	}
	return nil
}

func conformQueueOnly(ctx context.Context, t *testing.T, c *cell, i int) error {
	before := c.count(t)
	committed := false
	err := c.ex.InTx(ctx, pgx.TxOptions{}, func(_ context.Context, tx executor.Tx) error {
		tx.Queue("insert into "+c.table+" values ($1, $2)", prepare.Stable, 2*i, 1)
		tx.Queue("insert into "+c.table+" values (@id, @n)", pgx.NamedArgs{"id": 2*i + 1, "n": 1}, prepare.Stable)
		tx.Queue("update "+c.table+" set n = n + $1 where id >= $2", 1, 2*i)
		tx.OnCommit(func() { committed = true })
		return nil
	})
	if err != nil {
		if c.count(t) != before || committed {
			t.Fatalf("a transaction that failed has left rows, or ran OnCommit: %v", err)
		}
		return err
	}
	if got := one(t, c.plain, "select count(*) || '/' || sum(n) from "+c.table+" where id >= $1", 2*i); got != "2/4" || !committed {
		t.Fatalf("rows/sum %s, OnCommit ran: %v", got, committed)
	}
	// One that fails at its second statement leaves nothing.
	before, committed = c.count(t), false
	err = c.ex.InTx(ctx, pgx.TxOptions{}, func(_ context.Context, tx executor.Tx) error {
		tx.Queue("insert into "+c.table+" values ($1, $2)", prepare.Stable, -1, 1)
		tx.Queue("insert into "+c.table+" values ($1, $2)", prepare.Stable, 2*i, 1)
		tx.OnCommit(func() { committed = true })
		return nil
	})
	err = duplicate(t, err)
	if c.count(t) != before || committed {
		t.Fatalf("a queue that failed has left rows, or ran OnCommit: %v", err)
	}
	return err
}
