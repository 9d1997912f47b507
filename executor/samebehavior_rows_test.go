package executor_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/bounceproof/bounceproof/prepare"
)

// scanned reads a row by itself.
type scanned struct{ text string }

func (r *scanned) ScanRow(rows pgx.Rows) error {
	var id int
	var v *string
	if err := rows.Scan(&id, &v); err != nil {
		return err
	}
	if rows.Conn() != nil && rows.Conn().TypeMap() == nil {
		return errors.New("no types")
	}
	r.text = fmt.Sprintf("%d columns, raw %d, id %d, null %v", len(rows.FieldDescriptions()), len(rows.RawValues()), id, v == nil)
	return nil
}

var rowUsages = []usage{
	{"collecting", func(ctx context.Context, s *transcript, db starter) {
		type named struct {
			ID   int
			Text *string `db:"v"`
		}
		_, err := db.Exec(ctx, "insert into h select g, g, nullif('t' || g, 't2') from generate_series(1, $1) g", 3)
		s.err("insert", err)
		const sql = "select id, v from h where id > $1 order by id"
		for _, args := range [][]any{{0}, {prepare.Stable, 1}, {99}} {
			rows, _ := db.Query(ctx, sql, args...)
			byName, err := pgx.CollectRows(rows, pgx.RowToStructByName[named])
			s.say("by name: %d", len(byName))
			s.err("by name", err)
			rows, _ = db.Query(ctx, sql, args...)
			maps, err := pgx.CollectRows(rows, pgx.RowToMap)
			s.say("maps: %v", maps)
			s.err("maps", err)
			rows, _ = db.Query(ctx, sql, args...)
			byPos, err := pgx.CollectOneRow(rows, pgx.RowToAddrOfStructByPos[named])
			s.say("by position: %v", byPos != nil && byPos.Text != nil && *byPos.Text == "t1")
			s.err("by position", err)
			rows, _ = db.Query(ctx, sql, args...)
			_, err = pgx.CollectExactlyOneRow(rows, pgx.RowToMap)
			s.err("exactly one", err)
			rows, _ = db.Query(ctx, sql, args...)
			var id int
			var v *string
			tag, err := pgx.ForEachRow(rows, []any{&id, &v}, func() error {
				if id == 3 {
					return errors.New("three")
				}
				return nil
			})
			s.tag("for each", tag, err)
		}
		rows, _ := db.Query(ctx, "select id, v, n from h where id > $1", 0)
		_, err = pgx.CollectRows(rows, pgx.RowToStructByName[named])
		s.err("a column too many", err)
		rows, _ = db.Query(ctx, "selec", 1)
		_, err = pgx.CollectRows(rows, pgx.RowToMap)
		s.err("syntax", err)
	}},
	{"row scanner", func(ctx context.Context, s *transcript, db starter) {
		for range 2 {
			var one scanned
			s.err("row", db.QueryRow(ctx, "select $1::int, null::text", prepare.Stable, 4).Scan(&one))
			s.say("%s", one.text)
			rows, err := db.Query(ctx, "select g, 'v' from generate_series(1, $1) g", 2)
			s.err("query", err)
			for rows.Next() {
				s.err("scan", rows.Scan(&one))
				s.say("%s", one.text)
			}
			s.err("rows", rows.Err())
			s.err("fails", db.QueryRow(ctx, "select $1::text, null::text", "x").Scan(&one))
		}
	}},
	{"scanning errors", func(ctx context.Context, s *transcript, db starter) {
		var n int
		var text string
		for range 2 {
			s.err("no rows", db.QueryRow(ctx, "select 1 where $1", false).Scan(&n))
			s.err("no rows, stable", db.QueryRow(ctx, "select 1 where $1", prepare.Stable, false).Scan(&n))
			s.err("null", db.QueryRow(ctx, "select null::int where $1", true).Scan(&n))
			s.err("type", db.QueryRow(ctx, "select 'x'::text where $1", true).Scan(&n))
			s.err("too few", db.QueryRow(ctx, "select 1, 'x' where $1", true).Scan(&n))
			s.err("too many", db.QueryRow(ctx, "select 1 where $1", true).Scan(&n, &text))
			s.err("none", db.QueryRow(ctx, "select 1 where $1", true).Scan())
			s.err("two rows", db.QueryRow(ctx, "select g from generate_series(7, $1::int) g", 8).Scan(&n))
			s.say("first: %d", n)
			var bytes pgtype.DriverBytes
			s.err("driver bytes", db.QueryRow(ctx, "select 'x'::bytea where $1", true).Scan(&bytes))
			s.err("division", db.QueryRow(ctx, "select 1 / $1::int", 0).Scan(&n))
			s.err("nil destination", db.QueryRow(ctx, "select 1, 'x' where $1", true).Scan(nil, &text))
		}
		rows, err := db.Query(ctx, "select g, 'x' from generate_series(1, $1) g", 5)
		s.err("query", err)
		s.say("next %v", rows.Next())
		s.err("scan", rows.Scan(&text, &n))
		s.say("next %v", rows.Next())
		s.err("rows", rows.Err())
		s.say("scan after the end: %v", rows.Scan(&n, &text) != nil)
		rows.Close()
		rows.Close()
		s.say("tag %s", rows.CommandTag())
		rows, err = db.Query(ctx, "select 10 / (g - 3) as x from generate_series(1, $1) g", 9)
		s.err("query", err)
		for rows.Next() {
			s.err("scan", rows.Scan(&n))
			s.say("x = %d", n)
		}
		s.err("after two rows", rows.Err())
	}},
	{"shapes", func(ctx context.Context, s *transcript, db starter) {
		for range 2 {
			for _, sql := range []string{
				"select from generate_series(1, 3)", "select 1 as a, 2 as a", "insert into h values (9, 9) on conflict do nothing", "values (1, 'x'), (2, null)",
				"delete from h where id = 9 returning *", "show work_mem", "explain (costs off) select 1", "table h", "", "create temp table if not exists x () on commit drop",
				"select array[1,2], row(1, 'a'), '{\"a\": 1}'::jsonb, 1.50, '2024-01-01'::date, 'infinity'::timestamptz, int4range(1, 3)",
			} {
				rows, err := db.Query(ctx, sql)
				s.rows(sql, rows, err)
				rows, err = db.Query(ctx, sql, prepare.Stable)
				s.rows(sql, rows, err)
			}
		}
	}},
	{"early close", func(ctx context.Context, s *transcript, db starter) {
		for range 2 {
			rows, err := db.Query(ctx, "select repeat('x', 1000) from generate_series(1, $1) g", 3000)
			s.err("query", err)
			for range 2 {
				s.say("next %v", rows.Next())
			}
			rows.Close()
			s.say("next %v, tag %s", rows.Next(), rows.CommandTag())
			s.err("rows", rows.Err())
			_, err = rows.Values()
			s.say("values after close: %v", err != nil)
		}
		var n int
		s.err("the connection is fine", db.QueryRow(ctx, "select $1::int", 5).Scan(&n))
	}},
}
