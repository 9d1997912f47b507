package executor_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/internal/pgscript"
	"github.com/bounceproof/bounceproof/prepare"
)

// errNotIts is a result that was none of the call's own.
var errNotIts = errors.New("wrong rows")

// another is the value of a row that is put into an answer where rows are due, which nothing can tell from one of the statement's own.
const another = 424242

// request is one kind of request, and the check of its result.
type request struct {
	name   string
	insert string // the text it executes, "" if none
	run    func(ctx context.Context, s *scripted, k int) error
}

func rightRow(row pgx.Row, want int) error {
	var n int
	if err := row.Scan(&n); err != nil {
		return err
	}
	if n != want && n != another {
		return fmt.Errorf("%w: %d instead of %d", errNotIts, n, want)
	}
	return nil
}

const insertRow = "insert into answers values ($1)"

var requests = []request{
	{"exec", insertRow, func(ctx context.Context, s *scripted, k int) error {
		tag, err := s.ex.Exec(ctx, insertRow, prepare.Stable, k)
		if err == nil && tag.RowsAffected() != 1 {
			return fmt.Errorf("%w: %v", errNotIts, tag)
		}
		return err
	}},
	{"query row", "", func(ctx context.Context, s *scripted, k int) error {
		return rightRow(s.ex.QueryRow(ctx, "select $1", prepare.Stable, k), k)
	}},
	{"query", "", func(ctx context.Context, s *scripted, k int) error {
		rows, _ := s.ex.Query(ctx, "select $1", prepare.Stable, k)
		got, err := pgx.CollectRows(rows, pgx.RowTo[int])
		if err == nil && (len(got) == 0 || got[0] != k && got[0] != another) {
			return fmt.Errorf("%w: %v instead of %d", errNotIts, got, k)
		}
		return err
	}},
	{"learn", "", func(ctx context.Context, s *scripted, k int) error {
		return rightRow(s.ex.QueryRow(ctx, fmt.Sprintf("select $1 /* %d */", k), k), k)
	}},
	{"transaction", insertRow, func(ctx context.Context, s *scripted, k int) error {
		tx, err := s.ex.Begin(ctx)
		if err != nil {
			return err
		}
		defer func() { _ = tx.Rollback(ctx) }()
		if _, err := tx.Exec(ctx, insertRow, prepare.Stable, k); err != nil {
			return err
		}
		if err := rightRow(tx.QueryRow(ctx, "select $1", prepare.Stable, k), k); err != nil {
			return err
		}
		return tx.Commit(ctx)
	}},
	{"queue", insertRow, func(ctx context.Context, s *scripted, k int) error {
		return s.ex.InTx(ctx, pgx.TxOptions{IsoLevel: pgx.Serializable}, func(ctx context.Context, tx executor.Tx) error {
			return tx.Queue(insertRow, prepare.Stable, k)
		})
	}},
	{"batch", insertRow, func(ctx context.Context, s *scripted, k int) error {
		b := &pgx.Batch{}
		b.Queue(insertRow, prepare.Stable, k)
		b.Queue("select $1", prepare.Stable, k)
		br := s.ex.SendBatch(ctx, b)
		_, err := br.Exec()
		if err == nil {
			err = rightRow(br.QueryRow(), k)
		}
		if closeErr := br.Close(); err == nil {
			err = closeErr
		}
		return err
	}},
	{"copy", "", func(ctx context.Context, s *scripted, _ int) error {
		n, err := s.ex.CopyFrom(ctx, pgx.Identifier{"answers"}, []string{"n"}, pgx.CopyFromRows([][]any{{1}}))
		if err == nil && n != 1 {
			return fmt.Errorf("%w: copied %d", errNotIts, n)
		}
		return err
	}},
	{"simple", "", func(ctx context.Context, s *scripted, _ int) error {
		_, err := s.ex.Exec(ctx, insertRow, pgx.QueryExecModeSimpleProtocol, 1)
		return err
	}},
	{"prepare", "", func(ctx context.Context, s *scripted, k int) error {
		tx, err := s.ex.Begin(ctx)
		if err != nil {
			return err
		}
		defer func() { _ = tx.Rollback(ctx) }()
		sd, err := tx.Prepare(ctx, fmt.Sprintf("p%d", k), fmt.Sprintf("select $1 /* p%d */", k))
		if err == nil && len(sd.ParamOIDs) != 1 {
			return fmt.Errorf("%w: %v", errNotIts, sd)
		}
		return err
	}},
}

// strays are messages of each kind that a server can send, put where they do not belong.
func strays(sc scene) [][]pgproto3.BackendMessage {
	one := func(m pgproto3.BackendMessage) []pgproto3.BackendMessage { return []pgproto3.BackendMessage{m} }
	tag := func(text string) pgproto3.BackendMessage {
		return &pgproto3.CommandComplete{CommandTag: []byte(text)}
	}
	fields := func(names ...string) pgproto3.BackendMessage {
		d := &pgproto3.RowDescription{}
		for _, name := range names {
			d.Fields = append(d.Fields, pgproto3.FieldDescription{Name: []byte(name), DataTypeOID: 23, DataTypeSize: 4, TypeModifier: -1, Format: 1})
		}
		return d
	}
	row := &pgproto3.DataRow{Values: [][]byte{{0, 6, 0x79, 0x32}}} // another, in binary
	lost := pgscript.ServerError("26000", `prepared statement "`+prepare.Name(insertRow, []uint32{23}, "")+`" does not exist`, "FetchPreparedStatement")
	messages := [][]pgproto3.BackendMessage{
		one(&pgproto3.ParseComplete{}), one(&pgproto3.BindComplete{}), one(&pgproto3.CloseComplete{}), one(&pgproto3.NoData{}),
		one(&pgproto3.ParameterDescription{ParameterOIDs: []uint32{23}}), one(fields("n")), one(fields("n", "m")), one(row), one(&pgproto3.DataRow{Values: make([][]byte, 2)}),
		one(tag("SELECT 1")), one(tag("INSERT 0 1")), one(tag("COMMIT")), one(tag("DEALLOCATE ALL")), one(&pgproto3.EmptyQueryResponse{}),
		one(&pgproto3.PortalSuspended{}), one(&pgproto3.ReadyForQuery{TxStatus: 'I'}), one(&pgproto3.ReadyForQuery{TxStatus: 'T'}),
		one(lost), one(pgscript.ServerError("42P01", "no table", "parserOpenTable")), one(&pgproto3.CopyInResponse{}), one(&pgproto3.CopyOutResponse{}),
		one(&pgproto3.CopyData{Data: []byte("x")}), one(&pgproto3.CopyDone{}), one(&pgproto3.FunctionCallResponse{}), one(&pgproto3.AuthenticationOk{}),
		one(&pgproto3.BackendKeyData{ProcessID: 1, SecretKey: []byte{1, 2, 3, 4}}),
		// Whole answers to another client's request, and to the call before.
		{&pgproto3.BindComplete{}, row, tag("SELECT 1"), &pgproto3.ReadyForQuery{TxStatus: 'I'}},
		{&pgproto3.ParseComplete{}, &pgproto3.BindComplete{}, row, tag("SELECT 1"), &pgproto3.ReadyForQuery{TxStatus: 'I'}},
		{tag("DEALLOCATE ALL"), &pgproto3.ReadyForQuery{TxStatus: 'I'}},
	}
	if sc.o.Kind == pgscript.Raw {
		// An error answers anything. Only poolers that forward names are known to leave one to another client.
		messages = append(messages, []pgproto3.BackendMessage{
			pgscript.ServerError("42P01", "no table", "parserOpenTable"), &pgproto3.ReadyForQuery{TxStatus: 'I'},
		})
	}
	return messages
}

// judge is what may come of a request in whose answer something was wrong.
func judge(s *scripted, r request, stray string, err error) error {
	var disorder *fallback.AnswerError
	var pgErr *pgconn.PgError
	switch {
	case errors.Is(err, errNotIts):
		return err
	case err == nil, errors.As(err, &disorder), errors.As(err, &pgErr), errors.Is(err, context.DeadlineExceeded), errors.Is(err, pgx.ErrTxCommitRollback):
	default:
		return fmt.Errorf("an error of no type: %w", err)
	}
	if r.insert != "" {
		if n := s.b.Committed(r.insert); n > 1 || err == nil && n != 1 {
			return fmt.Errorf("executed %d times, the error is %w", n, err)
		}
	}
	return nil
}

// Each message of the protocol, before and in place of each message of each kind of answer, and each message left out: the caller gets the right
// rows, or a typed error, and nothing runs twice. The connection is closed, so that the calls that follow are right.
func TestAnAnswerBelongsToWhatWasSent(t *testing.T) {
	t.Parallel()
	for _, sc := range scenes {
		for _, r := range requests {
			t.Run(sc.name+", "+r.name, func(t *testing.T) {
				t.Parallel()
				s, _ := newScripted(t, sc.o, executor.Config{PreparedStatements: sc.policy})
				ctx := t.Context()
				k := 1000
				if err := errors.Join(r.run(ctx, s, k), s.sane(ctx)); err != nil {
					t.Fatal("as it is:", err)
				}
				cells, refused := 0, 0
				cell := func(what, stray string, plan func() *pgscript.Trigger) (fired bool) {
					if err := s.ready(ctx); err != nil {
						t.Fatal(err)
					}
					s.b.Reset()
					k++
					trigger := plan()
					patience := 2 * time.Second
					if stray == "" || stray == "ErrorResponse" {
						patience = 50 * time.Millisecond // what was left out may be what ends the answer
					}
					limited, cancel := context.WithTimeout(ctx, patience)
					err := r.run(limited, s, k)
					cancel()
					if !trigger.Fired() {
						s.b.Reset() // the trigger too
						return false
					}
					cells++
					if err != nil {
						refused++
					}
					if patience == 2*time.Second && errors.Is(err, context.DeadlineExceeded) {
						t.Errorf("%s: no end", what)
					}
					if wrong := judge(s, r, stray, err); wrong != nil {
						t.Errorf("%s: %v", what, wrong)
					}
					s.b.Reset()
					if after := s.ready(ctx); after != nil {
						t.Fatalf("%s, %v, and then: %v", what, err, after)
					}
					return true
				}
				all := strays(sc)
				for n := 1; ; n++ {
					if n > 60 {
						t.Fatal("no end of the answer")
					}
					if !cell(fmt.Sprintf("without message %d", n), "", func() *pgscript.Trigger { return s.b.Replace(n) }) {
						break
					}
					for _, m := range all {
						if _, isError := m[0].(*pgproto3.ErrorResponse); isError && r.name == "copy" {
							continue // on a connection without buffers pgconn then waits to write
						}
						name := strings.ReplaceAll(fmt.Sprintf("%T of %d", m[0], len(m)), "*pgproto3.", "")
						cell(fmt.Sprintf("%s before message %d", name, n), name, func() *pgscript.Trigger { return s.b.Insert(n, m...) })
						stray := name
						if len(m) == 1 && strings.HasPrefix(name, "ErrorResponse") {
							stray = "ErrorResponse" // nothing follows where it stands for the last message
						}
						cell(fmt.Sprintf("%s for message %d", name, n), stray, func() *pgscript.Trigger { return s.b.Replace(n, m...) })
					}
				}
				t.Logf("%d cells, %d with an error", cells, refused)
				if refused*2 < cells {
					t.Error("most of the answers were wrong, and only a few were refused:", refused, cells)
				}
			})
		}
	}
}

// ready has a connection in the pool that knows the statements, whatever was there before.
func (s *scripted) ready(ctx context.Context) error {
	err := s.sane(ctx)
	var disorder *fallback.AnswerError
	if errors.As(err, &disorder) {
		err = s.sane(ctx) // an answer too many shows with the next request, and that connection is closed
	}
	return err
}

// The control: what a pooler leaves of another client's answers makes pgx give each statement the answer to the one before.
func TestAnErrorThatAnotherClientLeftShiftsNoAnswers(t *testing.T) {
	t.Parallel()
	left := []pgproto3.BackendMessage{pgscript.ServerError("42P01", "no table", "parserOpenTable"), &pgproto3.ReadyForQuery{TxStatus: 'I'}}
	s, _ := newScripted(t, pgscript.Options{Kind: pgscript.Raw}, executor.Config{})
	for _, bare := range []bool{true, false} {
		query := func(k int) (n int, err error) {
			if bare {
				err = s.pool.QueryRow(t.Context(), "select $1", pgx.QueryExecModeExec, k).Scan(&n)
			} else {
				err = s.ex.QueryRow(t.Context(), "select $1", prepare.Stable, k).Scan(&n)
			}
			return n, err
		}
		if n, err := query(1); n != 1 || err != nil {
			t.Fatal(n, err)
		}
		s.b.Reset()
		s.b.Insert(1, left...)
		var pgErr *pgconn.PgError
		if _, err := query(2); !errors.As(err, &pgErr) {
			t.Fatal(err)
		}
		n, err := query(3)
		var disorder *fallback.AnswerError
		switch {
		case bare && (n != 2 || err != nil):
			t.Error("bare pgx was expected to give the answer to the statement before:", n, err)
		case !bare && (!errors.As(err, &disorder) || !disorder.Executes):
			t.Error("the executor:", n, err)
		}
		s.pool.Reset()
		if n, err := query(4); n != 4 || err != nil {
			t.Error(n, err)
		}
	}
}
