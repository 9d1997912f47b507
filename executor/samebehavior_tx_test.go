package executor_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"reflect"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/prepare"
)

const insertH = "insert into h values ($1, $2)"

// begun says that a transaction began, and returns it.
func (s *transcript) begun(tx pgx.Tx, err error) pgx.Tx {
	s.err("begin", err)
	return tx
}

func (s *transcript) exec(ctx context.Context, tx pgx.Tx, sql string, args ...any) {
	tag, err := tx.Exec(ctx, sql, args...)
	s.tag(sql, tag, err)
}

func (s *transcript) query(ctx context.Context, tx pgx.Tx, sql string, args ...any) {
	rows, err := tx.Query(ctx, sql, args...)
	s.rows(sql, rows, err)
}

var txUsages = []usage{
	{"transactions", func(ctx context.Context, s *transcript, db starter) {
		tx := s.begun(db.Begin(ctx))
		s.exec(ctx, tx, insertH, prepare.Stable, 1, 1)
		s.exec(ctx, tx, insertH, 2, 2)
		s.query(ctx, tx, "select * from h where id > $1 order by id", 0)
		s.err("commit", tx.Commit(ctx))
		s.err("commit again", tx.Commit(ctx))
		s.err("rollback after commit", tx.Rollback(ctx))
		_, err := tx.Exec(ctx, "select 1")
		s.err("exec after commit", err)
		rows, err := tx.Query(ctx, "select $1::int", 1)
		s.err("query after commit", err)
		s.say("its connection: %v", rows.Conn() == nil)
		_, err = tx.Begin(ctx)
		s.err("begin after commit", err)
		_, err = tx.CopyFrom(ctx, pgx.Identifier{"h"}, []string{"id"}, pgx.CopyFromRows(nil))
		s.err("copy after commit", err)
		_, err = tx.Prepare(ctx, "x", "select 1")
		s.err("prepare after commit", err)
		s.err("batch after commit", tx.SendBatch(ctx, &pgx.Batch{}).Close())

		tx = s.begun(db.Begin(ctx))
		s.err("nothing but commit", tx.Commit(ctx))
		tx = s.begun(db.Begin(ctx))
		s.err("nothing but rollback", tx.Rollback(ctx))
		s.err("rollback again", tx.Rollback(ctx))

		tx = s.begun(db.Begin(ctx))
		s.exec(ctx, tx, insertH, prepare.Stable, 3, 3)
		s.exec(ctx, tx, insertH, prepare.Stable, 1, 1)
		s.exec(ctx, tx, insertH, prepare.Stable, 4, 4)
		s.query(ctx, tx, "select $1::int", 1)
		s.exec(ctx, tx, "select 1")
		s.err("commit of a failed one", tx.Commit(ctx))

		tx = s.begun(db.Begin(ctx))
		s.query(ctx, tx, "select * from nowhere where id = $1", 1)
		s.query(ctx, tx, "select $1::int", 1)
		s.err("rollback of a failed one", tx.Rollback(ctx))

		own := errors.New("own")
		s.say("func: %v", errors.Is(pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
			s.exec(ctx, tx, insertH, 5, 5)
			return own
		}), own))
		s.err("func", pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
			s.exec(ctx, tx, "insert into h values (6, 6); insert into h values (7, 7)")
			return nil
		}))
	}},
	{"options", func(ctx context.Context, s *transcript, db starter) {
		for _, o := range []pgx.TxOptions{
			{IsoLevel: pgx.Serializable, AccessMode: pgx.ReadOnly, DeferrableMode: pgx.Deferrable},
			{AccessMode: pgx.ReadOnly},
			{IsoLevel: pgx.RepeatableRead},
			{BeginQuery: "begin isolation level serializable", CommitQuery: "commit and no chain"},
			{BeginQuery: "begin what"},
			{CommitQuery: "commit what"},
		} {
			tx, err := db.BeginTx(ctx, o)
			if err != nil {
				s.say("begin or the first statement fails")
				continue
			}
			rows, err := tx.Query(ctx, "select current_setting('transaction_isolation'), current_setting('transaction_read_only'), $1::int", prepare.Stable, 1)
			if err != nil {
				s.say("begin or the first statement fails")
				_ = tx.Rollback(ctx)
				continue
			}
			s.rows("settings", rows, nil)
			s.exec(ctx, tx, insertH, 1, 1)
			s.err("commit", tx.Commit(ctx))
			s.err("rollback", tx.Rollback(ctx))
		}
		_, err := db.Exec(ctx, "create table if not exists d (id int primary key deferrable initially deferred)")
		s.err("create", err)
		s.err("a deferred constraint", pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
			for range 2 {
				s.exec(ctx, tx, "insert into d values ($1)", 1)
			}
			return nil
		}))
		_, err = db.Exec(ctx, "insert into d select 1 from generate_series(1, $1)", 2)
		s.err("and outside a transaction", err)
		rows, err := db.Query(ctx, "insert into d select 1 from generate_series(1, $1) returning id", prepare.Stable, 2)
		s.rows("and after rows", rows, err)
	}},
	{"savepoints in text", func(ctx context.Context, s *transcript, db starter) {
		tx := s.begun(db.Begin(ctx))
		s.exec(ctx, tx, "savepoint a")
		s.exec(ctx, tx, insertH, prepare.Stable, 1, 1)
		s.exec(ctx, tx, "savepoint b")
		s.exec(ctx, tx, insertH, prepare.Stable, 1, 2)
		s.exec(ctx, tx, insertH, prepare.Stable, 2, 2)
		s.exec(ctx, tx, "rollback to b")
		s.exec(ctx, tx, insertH, prepare.Stable, 2, 2)
		s.exec(ctx, tx, "release a")
		s.exec(ctx, tx, "rollback to b")
		s.err("commit", tx.Commit(ctx))
		tx = s.begun(db.Begin(ctx))
		s.exec(ctx, tx, insertH, 3, 3)
		s.exec(ctx, tx, "commit; begin")
		s.exec(ctx, tx, insertH, 4, 4)
		s.err("rollback", tx.Rollback(ctx))
	}},
	{"nested transactions", func(ctx context.Context, s *transcript, db starter) {
		tx := s.begun(db.Begin(ctx))
		a := s.begun(tx.Begin(ctx))
		s.exec(ctx, a, insertH, prepare.Stable, 1, 1)
		b := s.begun(a.Begin(ctx))
		s.exec(ctx, b, insertH, prepare.Stable, 1, 1)
		s.exec(ctx, b, insertH, prepare.Stable, 2, 2)
		s.err("rollback inner", b.Rollback(ctx))
		s.exec(ctx, a, insertH, prepare.Stable, 3, 3)
		s.err("commit outer", a.Commit(ctx))
		s.err("commit outer again", a.Commit(ctx))
		_, err := a.Exec(ctx, "select 1")
		s.err("exec on outer", err)
		_, err = a.Query(ctx, "select 1")
		s.err("query on outer", err)
		_, err = a.Begin(ctx)
		s.err("begin on outer", err)
		c := s.begun(tx.Begin(ctx))
		s.err("commit without a statement", c.Commit(ctx))
		c = s.begun(tx.Begin(ctx))
		d := s.begun(c.Begin(ctx))
		s.err("rollback without a statement", d.Rollback(ctx))
		s.exec(ctx, c, insertH, 4, 4)
		s.err("rollback", c.Rollback(ctx))
		c = s.begun(tx.Begin(ctx))
		s.query(ctx, c, "select * from nowhere where id = $1", 1)
		s.err("commit of a failed one", c.Commit(ctx))
		_ = c.Rollback(ctx)
		s.err("commit", tx.Commit(ctx))
		s.err("func in func", pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
			err := pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
				s.exec(ctx, tx, insertH, 5, 5)
				return errors.New("own")
			})
			s.err("inner", err)
			s.exec(ctx, tx, insertH, 6, 6)
			return nil
		}))
	}},
	{"copy", func(ctx context.Context, s *transcript, db starter) {
		columns := []string{"id", "n", "v"}
		table := pgx.Identifier{"h"}
		n, err := db.CopyFrom(ctx, table, columns, pgx.CopyFromRows([][]any{{1, 1, "a"}, {2, nil, nil}, {3, int64(3), strings.Repeat("z", 200_000)}}))
		s.say("%d", n)
		s.err("copy", err)
		for _, rows := range [][][]any{{{4, 4}}, {{4, "x", "y"}}, {{1, 1, "dup"}}, {{nil, 1, "null"}}, {{5, struct{}{}, "v"}}, {}} {
			n, err = db.CopyFrom(ctx, table, columns, pgx.CopyFromRows(rows))
			s.say("%d", n)
			s.err("copy", err)
		}
		_, err = db.CopyFrom(ctx, pgx.Identifier{"nowhere"}, columns, pgx.CopyFromRows(nil))
		s.say("no table: %v", err != nil && strings.Contains(err.Error(), `relation "nowhere" does not exist`))
		_, err = db.CopyFrom(ctx, table, []string{"no"}, pgx.CopyFromRows(nil))
		s.say("no column: %v", err != nil && strings.Contains(err.Error(), `column "no" does not exist`))
		left := 3
		n, err = db.CopyFrom(ctx, table, columns[:1], pgx.CopyFromFunc(func() ([]any, error) {
			if left--; left == 0 {
				return nil, errors.New("the source fails")
			}
			return []any{10 + left}, nil
		}))
		s.say("%d %v", n, err != nil && strings.Contains(err.Error(), "the source fails"))

		tx := s.begun(db.Begin(ctx))
		n, err = tx.CopyFrom(ctx, table, columns, pgx.CopyFromSlice(5000, func(i int) ([]any, error) { return []any{100 + i, i, "in tx"}, nil }))
		s.say("%d", n)
		s.err("copy in a transaction", err)
		s.query(ctx, tx, "select count(*) from h where id >= $1", 100)
		s.err("rollback", tx.Rollback(ctx))
		tx = s.begun(db.Begin(ctx))
		s.exec(ctx, tx, insertH, 20, 20)
		_, err = tx.CopyFrom(ctx, table, columns, pgx.CopyFromRows([][]any{{20, 1, "dup"}}))
		s.err("copy fails", err)
		s.exec(ctx, tx, insertH, 21, 21)
		s.err("commit", tx.Commit(ctx))
		tx = s.begun(db.Begin(ctx))
		nested := s.begun(tx.Begin(ctx))
		n, err = nested.CopyFrom(ctx, table, columns[:1], pgx.CopyFromRows([][]any{{30}, {31}}))
		s.say("%d", n)
		s.err("copy in a nested transaction", err)
		s.err("rollback", nested.Rollback(ctx))
		n, err = tx.CopyFrom(ctx, table, columns[:1], pgx.CopyFromRows([][]any{{32}}))
		s.say("%d", n)
		s.err("copy", err)
		s.err("commit", tx.Commit(ctx))
	}},
	{"large objects", func(ctx context.Context, s *transcript, db starter) {
		s.err("func", pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
			objects := tx.LargeObjects()
			oid, err := objects.Create(ctx, 0)
			s.err("create", err)
			object, err := objects.Open(ctx, oid, pgx.LargeObjectModeRead|pgx.LargeObjectModeWrite)
			s.err("open", err)
			n, err := object.Write([]byte("hello, large world"))
			s.say("%d", n)
			s.err("write", err)
			at, err := object.Seek(7, io.SeekStart)
			s.say("%d", at)
			s.err("seek", err)
			text, err := io.ReadAll(object)
			s.say("%s", text)
			s.err("read", err)
			s.err("truncate", object.Truncate(3))
			s.err("close", object.Close())
			s.exec(ctx, tx, insertH, prepare.Stable, 1, 1)
			s.err("unlink", objects.Unlink(ctx, oid))
			s.err("unlink again", objects.Unlink(ctx, oid))
			return nil
		}))
	}},
	{"prepared in a transaction", func(ctx context.Context, s *transcript, db starter) {
		for range 2 {
			tx := s.begun(db.Begin(ctx))
			sd, err := tx.Prepare(ctx, "", "select $1::int as a, $2::text as b")
			s.err("unnamed", err)
			s.say("%q %v %d", sd.Name, sd.ParamOIDs, len(sd.Fields))
			sd, err = tx.Prepare(ctx, "mine", "select $1::int + n as sum from h where id = $2")
			s.err("prepare", err)
			s.say("%q %q %v %s %d", sd.Name, sd.SQL, sd.ParamOIDs, sd.Fields[0].Name, sd.Fields[0].DataTypeOID)
			s.exec(ctx, tx, insertH, 1, 10)
			s.query(ctx, tx, "mine", 5, 1)
			s.exec(ctx, tx, "mine", 5, 1)
			var b pgx.Batch
			b.Queue("mine", 6, 1)
			b.Queue(insertH, 2, 2)
			results := tx.SendBatch(ctx, &b)
			rows, err := results.Query()
			s.rows("batch", rows, err)
			s.err("batch", results.Close())
			s.err("rollback", tx.Rollback(ctx))
		}
		tx := s.begun(db.Begin(ctx))
		_, err := tx.Prepare(ctx, "bad", "select * from nowhere")
		s.err("prepare", err)
		s.exec(ctx, tx, insertH, 1, 10)
		s.err("commit", tx.Commit(ctx))
	}},
	{"the transaction's connection", func(ctx context.Context, s *transcript, db starter) {
		for range 2 {
			tx := s.begun(db.Begin(ctx))
			s.say("status %c", tx.Conn().PgConn().TxStatus())
			s.exec(ctx, tx, insertH, prepare.Stable, 1, 1)
			rows, err := tx.Conn().Query(ctx, "select n from h where id = $1", pgx.QueryExecModeCacheDescribe, 1)
			s.rows("sees", rows, err)
			_, err = tx.Conn().Exec(ctx, "insert into h values (2, 2)")
			s.err("exec", err)
			nested := s.begun(tx.Begin(ctx))
			_, err = nested.Conn().Exec(ctx, "insert into h values (3, 3)")
			s.err("exec", err)
			s.err("rollback", nested.Rollback(ctx))
			s.query(ctx, tx, "select count(*) from h where id > $1", 0)
			s.err("rollback", tx.Rollback(ctx))
		}
	}},
	{"cursors", func(ctx context.Context, s *transcript, db starter) {
		tx := s.begun(db.Begin(ctx))
		s.exec(ctx, tx, "declare c cursor for select g, 'x' || g from generate_series(1, 5) g")
		for range 4 {
			rows, err := tx.Query(ctx, "fetch 2 from c", pgx.QueryResultFormats{pgx.TextFormatCode, pgx.TextFormatCode})
			s.rows("fetch", rows, err)
		}
		s.exec(ctx, tx, "close c")
		s.exec(ctx, tx, "declare c cursor for select now() is not null")
		for _, mode := range modes {
			rows, err := tx.Query(ctx, fmt.Sprintf("fetch %d from c", 1+mode), mode, pgx.QueryResultFormats{pgx.TextFormatCode})
			s.rows("fetch", rows, err)
		}
		s.err("commit", tx.Commit(ctx))
	}},
}

// The executor fills in pgx's LargeObjects by its shape.
func TestLargeObjectsHoldATransactionAndNothingElse(t *testing.T) {
	typ := reflect.TypeFor[pgx.LargeObjects]()
	if typ.NumField() != 1 || typ.Field(0).Type != reflect.TypeFor[pgx.Tx]() || typ.Field(0).Offset != 0 {
		t.Fatalf("%v has changed", typ)
	}
}
