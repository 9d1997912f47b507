package executor_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/prepare"
	"github.com/bounceproof/bounceproof/testenv/place"
)

// starter is a database that begins transactions with options. A pool is one, and so is an executor.
type starter interface {
	database
	BeginTx(ctx context.Context, opts pgx.TxOptions) (pgx.Tx, error)
}

// transcript is what a user of pgx gets to see, line by line.
type transcript struct {
	strings.Builder
}

func (s *transcript) say(format string, args ...any) { _, _ = fmt.Fprintf(s, format+"\n", args...) }

// err says what an error is: a server's by its code and text, any other by its text.
func (s *transcript) err(what string, err error) {
	var pgErr *pgconn.PgError
	switch {
	case err == nil:
		s.say("%s: ok", what)
	case errors.As(err, &pgErr) && pgErr.Code == "42704":
		s.say("%s: %s", what, pgErr.Code) // the message names an oid, which differs
	case errors.As(err, &pgErr):
		s.say("%s: %s %s, position %d", what, pgErr.Code, pgErr.Message, pgErr.Position)
	case strings.Contains(err.Error(), "mismatched param and argument count"), strings.Contains(err.Error(), " arguments, got "):
		s.say("%s: the number of arguments is wrong", what) // pgx says it in two ways, for Exec and for Query
	case errors.Is(err, pgx.ErrTxClosed), errors.Is(err, pgx.ErrTxCommitRollback), errors.Is(err, pgx.ErrNoRows):
		s.say("%s: closed %v, rolled back %v, no rows %v", what, errors.Is(err, pgx.ErrTxClosed), errors.Is(err, pgx.ErrTxCommitRollback), errors.Is(err, pgx.ErrNoRows))
	default:
		s.say("%s: %v", what, err)
	}
}

func (s *transcript) tag(what string, tag pgconn.CommandTag, err error) {
	s.err(what+" "+tag.String(), err)
}

// rows says what the rows hold, and how it came: an error of Query and one of the rows are the same to a careful caller.
func (s *transcript) rows(what string, rows pgx.Rows, err error) {
	if err == nil {
		for rows.Next() {
			values, err := rows.Values()
			s.say("%s: %v %v", what, values, err)
		}
		for _, f := range rows.FieldDescriptions() {
			s.say("%s: column %s, type %d, format %d", what, f.Name, f.DataTypeOID, f.Format)
		}
		if err = rows.Err(); err == nil {
			s.say("%s: tag %s", what, rows.CommandTag())
		}
	}
	s.err(what, err)
}

// usage is something that programs do with pgx.
type usage struct {
	name string
	do   func(ctx context.Context, s *transcript, db starter)
}

// TestSameBehavior does what programs do with pgx on a bare pool and on an executor, and compares what they get to see.
func TestSameBehavior(t *testing.T) {
	all := append(append(append(append([]usage{}, queryUsages...), rowUsages...), txUsages...), batchUsages...)
	for _, p := range place.OneOfEachKind() {
		t.Run(p.String(), func(t *testing.T) {
			t.Parallel()
			st := p.Start(t)
			openServers(t, st, 4)
			plain := connect(t, st.DB.URL)
			// By default pgx loses track of its statements where a batch fails, and answers 26000 to the next.
			bare := newPool(t, st.DB.URL, maxConns(2), func(cfg *pgxpool.Config) { cfg.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeCacheDescribe })
			for _, policy := range []executor.PreparedStatements{executor.Auto, executor.On, executor.Shared, executor.Off} {
				if policy == executor.On && p.ForwardsNames() {
					continue // it loses statements, as it says
				}
				ex := newExecutor(t, newPool(t, st.URL, maxConns(2)), executor.Config{PreparedStatements: policy, PrepareThreshold: 2})
				for _, h := range all {
					t.Run(policy.String()+"/"+h.name, func(t *testing.T) {
						run := func(db starter) string {
							mustExec(t, plain, "drop table if exists h; create table h (id int primary key, n int, v text)")
							var s transcript
							h.do(t.Context(), &s, db)
							s.say("left: %s", one(t, plain, "select string_agg(h::text, ' ' order by id) from h"))
							return s.String()
						}
						want := run(bare)
						if strings.Count(want, "\n") < 3 {
							t.Fatalf("this usage shows nothing: %s", want)
						}
						for range 3 { // the second time names are known, and the third time unmarked texts are stable
							if got := run(ex); got != want {
								t.Fatalf("pgx (-) and the executor (+) differ:\n%s", cmp.Diff(strings.Split(want, "\n"), strings.Split(got, "\n")))
							}
						}
						switch {
						case h.name == "copy" && (st.Bouncer != nil || policy == executor.Off):
							return // where a pooler may be a COPY that fails costs the connection, which a Conn cannot replace
						case h.name == "batches with transaction control":
							return // it leaves a transaction open, which on a Conn stays open
						}
						conn := acquire(t, ex)
						defer conn.Release()
						if got := run(conn); got != want {
							t.Fatalf("pgx (-) and a Conn of the executor's (+) differ:\n%s", cmp.Diff(strings.Split(want, "\n"), strings.Split(got, "\n")))
						}
					})
				}
			}
		})
	}
}

// rewriter asks the connection that it gets.
type rewriter struct{ fail error }

func (r rewriter) RewriteQuery(_ context.Context, conn *pgx.Conn, sql string, args []any) (string, []any, error) {
	if r.fail != nil {
		return "", nil, r.fail
	}
	typ, ok := conn.TypeMap().TypeForName("int4")
	if !ok || conn.PgConn().IsClosed() {
		return "", nil, errors.New("this is no connection")
	}
	return sql + fmt.Sprintf(" + %d", typ.OID), append(args, 7), nil
}

var modes = []pgx.QueryExecMode{
	pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
}

var queryUsages = []usage{
	{"several statements", func(ctx context.Context, s *transcript, db starter) {
		tag, err := db.Exec(ctx, "insert into h values (1, 1); insert into h values (2, 2); update h set n = 5")
		s.tag("three", tag, err)
		tag, err = db.Exec(ctx, "insert into h values (3, 3); insert into h values (1, 1)")
		s.tag("the second fails, both are gone", tag, err)
		tag, err = db.Exec(ctx, "begin; insert into h values (4, 4); rollback; insert into h values (5, 5)")
		s.tag("with a transaction", tag, err)
		for _, text := range []string{"", ";", "-- nothing", "  "} {
			tag, err = db.Exec(ctx, text)
			s.tag("empty", tag, err)
		}
		tag, err = db.Exec(ctx, "select $1::int", 1, 2)
		s.tag("too many arguments", tag, err)
		tag, err = db.Exec(ctx, "select 1; select $1::int", 1)
		s.tag("several with arguments", tag, err)
		tag, err = db.Exec(ctx, "selec 1")
		s.tag("syntax", tag, err)
		tag, err = db.Exec(ctx, "select g from generate_series(1, 3) g")
		s.tag("rows that nobody reads", tag, err)
		tag, err = db.Exec(ctx, "select g from generate_series(1, $1) g", 4)
		s.tag("and with arguments", tag, err)
	}},
	{"explicit modes", func(ctx context.Context, s *transcript, db starter) {
		for _, mode := range modes {
			s.say("mode %v", mode)
			rows, err := db.Query(ctx, "select $1::int + 1 as a, 'x'::text as b, now() is not null", mode, 41)
			s.rows("query", rows, err)
			var n int
			s.err("row", db.QueryRow(ctx, "select $1::int * 2", mode, 21).Scan(&n))
			tag, err := db.Exec(ctx, "insert into h values ($1, $2)", mode, int(mode)*10, 1)
			s.tag("exec", tag, err)
			tag, err = db.Exec(ctx, "update h set n = n + 1; update h set n = n + 1", mode)
			s.tag("exec of two without arguments", tag, err)
			rows, err = db.Query(ctx, "select n from h where id = $1", mode, int(mode)*10)
			s.rows("query", rows, err)
			tag, err = db.Exec(ctx, "insert into h values ($1, $2)", mode, int(mode)*10, 1)
			s.tag("duplicate", tag, err)
			tag, err = db.Exec(ctx, "insert into h values (@id, @n)", mode, pgx.NamedArgs{"id": int(mode)*10 + 1, "n": 1})
			s.tag("with named arguments", tag, err)
			tag, err = db.Exec(ctx, "insert into h values (@id, @n)", pgx.NamedArgs{"id": int(mode)*10 + 2, "n": 1}, mode)
			s.tag("the other way round", tag, err)
		}
	}},
	{"result formats", func(ctx context.Context, s *transcript, db starter) {
		for _, option := range []any{
			pgx.QueryResultFormats{pgx.TextFormatCode, pgx.BinaryFormatCode},
			pgx.QueryResultFormats{pgx.TextFormatCode},
			pgx.QueryResultFormats{pgx.BinaryFormatCode},
			pgx.QueryResultFormatsByOID{pgtype.Int4OID: pgx.TextFormatCode, pgtype.TextOID: pgx.BinaryFormatCode},
			pgx.QueryResultFormatsByOID{pgtype.Int4OID: pgx.BinaryFormatCode},
		} {
			for _, args := range [][]any{{option, 5}, {option, prepare.Stable, 5}, {pgx.QueryExecModeCacheDescribe, option, 5}} {
				rows, err := db.Query(ctx, "select $1::int, 'abc'::text", args...)
				if err != nil {
					s.err("query", err)
					continue
				}
				for rows.Next() {
					s.say("%T %x", option, rows.RawValues())
				}
				s.rows("formats", rows, nil)
			}
		}
		rows, err := db.Query(ctx, "select $1::int, 2, 3", pgx.QueryResultFormats{pgx.TextFormatCode, pgx.TextFormatCode}, 5)
		s.rows("two formats for three columns", rows, err)
	}},
	{"rewriters", func(ctx context.Context, s *transcript, db starter) {
		for range 2 {
			rows, err := db.Query(ctx, "select @b::int - @a::int", prepare.Stable, pgx.NamedArgs{"a": 1, "b": 5})
			s.rows("named and stable", rows, err)
			// In this order only: to bare pgx Stable is a rewriter, and the last one counts.
			rows, err = db.Query(ctx, "select $1::int", prepare.Stable, rewriter{})
			s.rows("own", rows, err)
			rows, err = db.Query(ctx, "select $1::int", rewriter{})
			s.rows("own", rows, err)
		}
		rows, err := db.Query(ctx, "select @a::int", pgx.StrictNamedArgs{"b": 1})
		s.rows("strict", rows, err)
		rows, err = db.Query(ctx, "select @a::text", pgx.NamedArgs{"b": 1})
		s.rows("missing", rows, err)
		tag, err := db.Exec(ctx, "insert into h values (1, @n)", pgx.NamedArgs{"n": nil})
		s.tag("nil", tag, err)
		tag, err = db.Exec(ctx, "insert into h values (2, 2); insert into h values (3, 3)", pgx.NamedArgs{})
		s.tag("no argument left: a simple query", tag, err)
		_, err = db.Exec(ctx, "select 1", rewriter{errors.New("no")}, 1)
		s.err("refused", err)
		var n int
		s.err("refused", db.QueryRow(ctx, "select 1", rewriter{errors.New("no")}, 1).Scan(&n))
		s.err("refused", db.QueryRow(ctx, "select $1::int", pgx.NamedArgs{"x": 1}, 3).Scan(&n))
	}},
	{"arguments", func(ctx context.Context, s *transcript, db starter) {
		for _, args := range [][]any{{1}, {1, 2, 3}, {"x", 2}, {struct{}{}, 2}, {nil, nil}, {int64(1) << 40, 1}} {
			rows, err := db.Query(ctx, "select $1::int, $2::int", args...)
			s.rows("query", rows, err)
			tag, err := db.Exec(ctx, "select $1::int, $2::int", append([]any{prepare.Stable}, args...)...)
			s.tag("exec", tag, err)
		}
		rows, err := db.Query(ctx, "select id from generate_series(1, 9) id where id = any($1)", []int{3, 1})
		s.rows("any", rows, err)
		rows, err = db.Query(ctx, "select $1")
		s.rows("none", rows, err)
		rows, err = db.Query(ctx, "select $1", "what type is this")
		s.rows("unknown type", rows, err)
		rows, err = db.Query(ctx, "select length($1), $2::int", strings.Repeat("long", 12_000), 1)
		s.rows("long argument", rows, err)
		rows, err = db.Query(ctx, "select $1::int /* "+strings.Repeat("long", 12_000)+" */", prepare.Stable, 1)
		s.rows("long text", rows, err)
	}},
	{"done contexts", func(ctx context.Context, s *transcript, db starter) {
		done, cancel := context.WithCancel(ctx)
		cancel()
		_, err := db.Exec(done, "insert into h values ($1, 1)", 1)
		s.say("exec: %v", errors.Is(err, context.Canceled))
		_, err = db.Query(done, "select $1::int", prepare.Stable, 1)
		s.say("query: %v", errors.Is(err, context.Canceled))
		var n int
		s.say("row: %v", errors.Is(db.QueryRow(done, "select $1::int", 1).Scan(&n), context.Canceled))
		_, err = db.Begin(done)
		s.say("begin: %v", errors.Is(err, context.Canceled))
		s.err("afterwards", db.QueryRow(ctx, "select $1::int", 5).Scan(&n))
		s.say("n = %d", n)
	}},
}
