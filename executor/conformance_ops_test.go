package executor_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/prepare"
)

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
