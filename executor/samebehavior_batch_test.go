package executor_test

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/prepare"
)

var batchUsages = []usage{
	{"batches", func(ctx context.Context, s *transcript, db starter) {
		for range 2 {
			var b pgx.Batch
			b.Queue(insertH, 1, 1)
			b.Queue(insertH, prepare.Stable, 2, 2)
			b.Queue("select id, n from h order by id")
			b.Queue("select n from h where id = @id", pgx.NamedArgs{"id": 2})
			b.Queue("delete from h")
			results := db.SendBatch(ctx, &b)
			for range 2 {
				tag, err := results.Exec()
				s.tag("exec", tag, err)
			}
			rows, err := results.Query()
			s.rows("query", rows, err)
			var n int
			s.err("row", results.QueryRow().Scan(&n))
			tag, err := results.Exec()
			s.tag("exec", tag, err)
			_, err = results.Exec()
			s.say("one too many: %v", err != nil)
			s.say("tx: %v", results.Tx() == nil)
			s.err("close", results.Close())
			s.err("close again", results.Close())
			_, err = results.Exec()
			s.say("after close: %v", err != nil)
			_, err = results.Query()
			s.say("after close: %v", err != nil)
			s.say("after close: %v", results.QueryRow().Scan(&n) != nil)
		}
		s.err("empty", db.SendBatch(ctx, &pgx.Batch{}).Close())
	}},
	{"batches that fail", func(ctx context.Context, s *transcript, db starter) {
		for _, bad := range []string{"insert into h values (1, 1)", "select 1 / (select count(*) from nowhere)", "selec", "select 1 / count(*) from h where id < 0"} {
			for _, args := range [][]any{nil, {prepare.Stable}} {
				var b pgx.Batch
				b.Queue("delete from h")
				b.Queue(insertH, prepare.Stable, 1, 1)
				b.Queue(bad, args...)
				b.Queue(insertH, prepare.Stable, 3, 3)
				results := db.SendBatch(ctx, &b)
				failed := 0
				for range 4 {
					if _, err := results.Exec(); err != nil {
						failed++
					}
				}
				s.say("failed: %v", failed >= 2)
				s.err("close", results.Close())
				s.err("only close", db.SendBatch(ctx, &b).Close())
			}
		}
		for _, args := range [][]any{{1}, {"x", 1}, {1, 2, 3}} {
			var b pgx.Batch
			b.Queue(insertH, 7, 7)
			b.Queue(insertH, args...)
			results := db.SendBatch(ctx, &b)
			_, err := results.Exec()
			s.say("%v, %v", err != nil, results.Close() != nil)
		}
	}},
	{"batches with functions", func(ctx context.Context, s *transcript, db starter) {
		for range 2 {
			var b pgx.Batch
			b.Queue("delete from h").Exec(func(ct pgconn.CommandTag) error {
				s.say("deleted %v", ct.Delete())
				return nil
			})
			b.Queue(insertH, 1, 1)
			b.Queue("select n from h where id = $1", prepare.Stable, 1).QueryRow(func(row pgx.Row) error {
				var n int
				err := row.Scan(&n)
				s.say("n = %d", n)
				return err
			})
			b.Queue("select g from generate_series(1, $1) g", 3).Query(func(rows pgx.Rows) error {
				s.rows("rows", rows, nil)
				return nil
			})
			b.Queue("select 1").QueryRow(func(pgx.Row) error { return errors.New("own") })
			b.Queue("select 2").QueryRow(func(pgx.Row) error {
				s.say("not reached")
				return nil
			})
			s.err("close", db.SendBatch(ctx, &b).Close())
		}
	}},
	{"batches with transaction control", func(ctx context.Context, s *transcript, db starter) {
		for range 2 {
			var b pgx.Batch
			b.Queue("begin")
			b.Queue("delete from h")
			b.Queue(insertH, prepare.Stable, 1, 1)
			b.Queue("savepoint a")
			b.Queue(insertH, prepare.Stable, 2, 2)
			b.Queue("rollback to a")
			b.Queue("commit")
			results := db.SendBatch(ctx, &b)
			for range 7 {
				tag, err := results.Exec()
				s.tag("exec", tag, err)
			}
			s.err("close", results.Close())
		}
		var b pgx.Batch
		b.Queue("begin")
		b.Queue(insertH, prepare.Stable, 5, 1)
		s.err("left open", db.SendBatch(ctx, &b).Close())
		var n int
		s.err("next", db.QueryRow(ctx, "select count(*) from h where id = $1", 5).Scan(&n))
		s.say("n = %d", n)
	}},
	{"batches in transactions", func(ctx context.Context, s *transcript, db starter) {
		for range 2 {
			tx := s.begun(db.Begin(ctx))
			var b pgx.Batch
			b.Queue("delete from h")
			b.Queue(insertH, prepare.Stable, 1, 1)
			b.Queue("select count(*) from h")
			results := tx.SendBatch(ctx, &b)
			s.say("tx: %v", results.Tx() == nil)
			s.err("close", results.Close())
			nested := s.begun(tx.Begin(ctx))
			s.err("duplicate", nested.SendBatch(ctx, &b).Close())
			var dup pgx.Batch
			dup.Queue(insertH, prepare.Stable, 1, 1)
			s.err("duplicate", nested.SendBatch(ctx, &dup).Close())
			s.err("aborted", nested.SendBatch(ctx, &dup).Close())
			s.err("rollback", nested.Rollback(ctx))
			s.query(ctx, tx, "select n from h where id = $1", 1)
			s.err("commit", tx.Commit(ctx))
		}
		tx := s.begun(db.Begin(ctx))
		var begins pgx.Batch
		begins.BeginTx(pgx.TxOptions{})
		results := tx.SendBatch(ctx, &begins)
		s.say("a batch that begins in a transaction: %v", results.Close() != nil)
		s.err("rollback", tx.Rollback(ctx))
	}},
	{"batches that begin", func(ctx context.Context, s *transcript, db starter) {
		for range 2 {
			var b pgx.Batch
			b.BeginTx(pgx.TxOptions{IsoLevel: pgx.Serializable})
			b.Queue("delete from h")
			b.Queue("select current_setting('transaction_isolation')")
			b.Queue(insertH, prepare.Stable, 1, 1)
			results := db.SendBatch(ctx, &b)
			for range 2 {
				tag, err := results.Exec()
				s.tag("exec", tag, err)
			}
			rows, err := results.Query()
			s.rows("isolation", rows, err)
			s.err("close", results.Close())
			tx := results.Tx()
			s.exec(ctx, tx, insertH, prepare.Stable, 2, 2)
			s.err("commit", tx.Commit(ctx))
			s.err("close again", results.Close())
			s.err("rollback", tx.Rollback(ctx))
		}
		var b pgx.Batch
		b.BeginTx(pgx.TxOptions{})
		b.Queue(insertH, prepare.Stable, 3, 3)
		results := db.SendBatch(ctx, &b)
		tx := results.Tx()
		s.err("close", results.Close())
		s.err("rollback", tx.Rollback(ctx))
		var dup pgx.Batch
		dup.BeginTx(pgx.TxOptions{CommitQuery: "commit and no chain"})
		dup.Queue(insertH, prepare.Stable, 1, 1)
		results = db.SendBatch(ctx, &dup)
		s.err("duplicate", results.Close())
		s.exec(ctx, results.Tx(), "select 1")
		s.err("commit of a failed one", results.Tx().Commit(ctx))
		var bad pgx.Batch
		bad.BeginTx(pgx.TxOptions{BeginQuery: "begin what"})
		bad.Queue(insertH, prepare.Stable, 4, 4)
		results = db.SendBatch(ctx, &bad)
		s.err("bad begin", results.Close())
		s.err("commit", results.Tx().Commit(ctx))
		var own pgx.Batch
		own.BeginTx(pgx.TxOptions{})
		own.Queue("update h set n = 4 where id = $1", 1).Exec(func(pgconn.CommandTag) error { return errNotSent{} })
		results = db.SendBatch(ctx, &own)
		s.say("a function's own error: %v", results.Close() != nil)
		s.err("commit", results.Tx().Commit(ctx))
	}},
}

// errNotSent is what a function got elsewhere: something that was not sent.
type errNotSent struct{}

func (errNotSent) Error() string     { return "not sent" }
func (errNotSent) SafeToRetry() bool { return true }
