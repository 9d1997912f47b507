package statement

import (
	"context"
	"errors"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/internal/pgxinternals"
	"github.com/bounceproof/bounceproof/internal/sqltext"
	"github.com/bounceproof/bounceproof/prepare"
)

// Statement is one text and what is known about it. All methods are safe for concurrent use.
type Statement struct {
	sql    string
	salt   string
	kind   sqltext.Kind
	verb   string
	stable atomic.Bool
	gen    atomic.Int32
	desc   atomic.Pointer[Description]
	learnt atomic.Int64 // when, in Unix nanoseconds
	byPath atomic.Bool  // see DependsOnSearchPath
}

// Description is what the server said about a statement when it was learnt, and the name that follows from it. It is immutable.
//
// It serves the encoding of arguments and the choice of result formats, never the decoding of rows: rows are decoded by the
// description that came with them.
type Description struct {
	// sd.SQL carries the generation comment, sd.Name the hash of text and parameter types.
	sd   pgconn.StatementDescription
	kind sqltext.Kind
	verb string // of the command tag, see [sqltext.Verb]
}

// SQL returns the text that is sent, with its generation comment if the statement has moved on.
func (d *Description) SQL() string { return d.sd.SQL }

// Name returns the statement's name on the server.
func (d *Description) Name() string { return d.sd.Name }

// ParamOIDs returns the parameter types. The caller must not change the slice.
func (d *Description) ParamOIDs() []uint32 { return d.sd.ParamOIDs }

// Fields returns the result columns as they were when the statement was learnt. The caller must not change the slice.
func (d *Description) Fields() []pgconn.FieldDescription { return d.sd.Fields }

// Utility reports whether the statement is none of those whose plans PostgreSQL keeps: its columns may differ from execution to execution, and
// it may refuse to run in a transaction of several statements.
func (d *Description) Utility() bool { return d.kind&sqltext.Utility != 0 }

// answerSize is how many bytes answer Close, Parse and Describe of the statement, as long as it is what was learnt: CloseComplete,
// ParseComplete, ParameterDescription, and RowDescription or NoData.
func (d *Description) answerSize() int {
	n := 5 + 5 + 7 + 4*len(d.sd.ParamOIDs) + 7
	for i := range d.sd.Fields {
		n += len(d.sd.Fields[i].Name) + 19
	}
	return n
}

// newStatement returns a statement that has not been learnt.
func newStatement(sql, salt string) *Statement {
	return &Statement{sql: sql, salt: salt, kind: sqltext.Of(sql), verb: sqltext.Verb(sql)}
}

// ForgetsStatements reports whether the statement throws prepared statements of the session away.
func (d *Description) ForgetsStatements() bool { return d.kind&sqltext.ForgetsStatements != 0 }

// SQL returns the text as the caller wrote it.
func (s *Statement) SQL() string { return s.sql }

// Stable reports whether the statement may be sent by name: it was marked, or used often enough.
func (s *Statement) Stable() bool { return s.stable.Load() }

// Description returns what is known, or nil while the statement has not been learnt.
func (s *Statement) Description() *Description { return s.desc.Load() }

// NeedsRefresh reports, to one caller at a time, that the description is older than age and should be learnt again. A changed parameter type to which the
// learnt one can be cast raises no error, and would be converted twice for ever.
func (s *Statement) NeedsRefresh(age time.Duration) bool {
	learnt, now := s.learnt.Load(), time.Now().UnixNano()
	return now-learnt > int64(age) && s.learnt.CompareAndSwap(learnt, now)
}

// DependsOnSearchPath reports whether the text was seen to mean other types under another search_path than the one it was learnt under.
func (s *Statement) DependsOnSearchPath() bool { return s.byPath.Load() }

// FoundBySearchPath makes DependsOnSearchPath true.
func (s *Statement) FoundBySearchPath() { s.byPath.Store(true) }

// LearntBefore reports whether the description is older than a time in Unix nanoseconds; of time 0 nothing is.
func (s *Statement) LearntBefore(t int64) bool { return t != 0 && s.learnt.Load() < t }

// Matches reports whether a result with these columns is of the types that were learnt.
func (d *Description) Matches(fields []pgconn.FieldDescription) bool {
	if d.Utility() {
		return true // it was never more than an example
	}
	if len(fields) != len(d.sd.Fields) {
		return false
	}
	for i := range fields {
		if fields[i].DataTypeOID != d.sd.Fields[i].DataTypeOID {
			return false
		}
	}
	return true
}

// Forget drops the description d if it is still the current one, so that the next execution learns again. It is the answer to a
// description that went stale. Comparing with d keeps two connections that saw the same stale description from throwing away each
// other's new one.
func (s *Statement) Forget(d *Description) { s.desc.CompareAndSwap(d, nil) }

// NextGeneration moves the statement to other bytes: its text with a comment that counts, and so to another name. A tracking pooler
// keys its statements by text and types and answers a re-Parse itself, so a plan that PostgreSQL refuses (0A000) can only be left
// behind by changing the text (PgBouncer src/prepare.c; the error sticks on 1.24 and 1.26 even under another name). d is the
// description that failed: a second caller that failed with the same one changes nothing.
func (s *Statement) NextGeneration(d *Description) {
	if gen := s.gen.Load(); d.sd.SQL == s.text(gen) {
		s.gen.CompareAndSwap(gen, gen+1)
	}
	// Also a description of an older generation goes: one that was learnt while another caller moved the statement on would
	// otherwise stay, and fail for ever.
	s.desc.CompareAndSwap(d, nil)
}

// text is the SQL of generation gen; the first generation (0) is the caller's text itself.
func (s *Statement) text(gen int32) string {
	if gen == 0 {
		return s.sql
	}
	return s.sql + " /* bp:" + strconv.Itoa(int(gen)+1) + " */"
}

// describe makes the Description that follows from what the server said.
func (s *Statement) describe(sql string, paramOIDs []uint32, fields []pgconn.FieldDescription) *Description {
	return &Description{
		sd:   pgconn.StatementDescription{Name: prepare.Name(sql, paramOIDs, s.salt), SQL: sql, ParamOIDs: paramOIDs, Fields: fields},
		kind: s.kind, verb: s.verb,
	}
}

// Learn asks the server for the statement's parameter types and result columns, in one round trip and without leaving a name:
// Parse "" Describe(S) Sync, as pgx does. begin holds texts that are sent in front, such as BEGIN or SAVEPOINT, so that a failure
// leaves the transaction as aborted as it would be in pgx; with nil or none the connection's state does not change. A pgx PrepareTracer of
// the connection sees it, and begin is read behind that: the tracer may have sent what it holds. Errors are the server's, unwrapped.
func (s *Statement) Learn(ctx context.Context, c *Conn, begin *[]string) (*Description, error) {
	ds, err := c.LearnAll(ctx, []*Statement{s}, begin)
	if err != nil {
		return nil, err
	}
	return ds[0], nil // and not s.Description(): another caller may have forgotten it already
}

// Describe is [Statement.Learn] for a text that is asked about once, and not kept.
func (c *Conn) Describe(ctx context.Context, sql string, begin *[]string) (*Description, error) {
	return newStatement(sql, "").Learn(ctx, c, begin)
}

// LearnAll learns several statements in one round trip, with begin in front, see [Statement.Learn]. A failure of one is the error of all; the
// descriptions of those before it are returned.
func (c *Conn) LearnAll(ctx context.Context, sts []*Statement, begin *[]string) ([]*Description, error) {
	texts := make([]string, len(sts))
	ctxs := make([]context.Context, len(sts))
	for i, st := range sts {
		texts[i], ctxs[i] = st.text(st.gen.Load()), ctx
		if c.prepareTracer != nil {
			//nolint:fatcontext // not nested: each start gets the caller's context
			ctxs[i] = c.prepareTracer.TracePrepareStart(ctx, c.conn, pgx.TracePrepareStartData{SQL: texts[i]})
		}
	}
	var first []string
	if begin != nil {
		first = *begin
	}
	sds, err := c.learn(ctx, texts, first)
	ds := make([]*Description, len(sds))
	for i, st := range sts {
		if i < len(sds) {
			ds[i] = st.describe(texts[i], sds[i].ParamOIDs, sds[i].Fields)
			st.desc.Store(ds[i])
			st.learnt.Store(time.Now().UnixNano())
		}
		if c.prepareTracer != nil {
			var itsErr error
			if i >= len(sds) {
				itsErr = err
			}
			c.prepareTracer.TracePrepareEnd(ctxs[i], c.conn, pgx.TracePrepareEndData{Err: itsErr})
		}
	}
	return ds, err
}

// maxDescription is the longest message that learning reads. 1664 columns, the most there can be, have 140 kB; an error can quote a value.
const maxDescription = 16 << 20

// learn is the round trip of LearnAll. It returns the descriptions up to the first that failed. It is a pipeline, and not pgconn's Prepare,
// which loses the error of a PgBouncer 1.15 that closes the socket behind it.
func (c *Conn) learn(ctx context.Context, texts, begin []string) ([]*pgconn.StatementDescription, error) {
	defer pgxinternals.LimitMessages(c.pg.Frontend(), maxDescription)()
	p := c.pg.StartPipeline(ctx)
	for range c.marks(0) {
		p.SendDeallocate(markName)
	}
	for _, text := range begin {
		p.SendQueryParams(text, nil, nil, nil, nil)
		c.ExpectText(text)
	}
	for _, text := range texts {
		c.Learns++
		p.SendPrepare("", text, nil)
	}
	err := p.Sync()
	c.ForgetText()
	if err != nil {
		return nil, err
	}
	var sds []*pgconn.StatementDescription
	err = func() error {
		for {
			res, err := p.GetResults()
			if err != nil || res == nil {
				return err
			}
			switch res := res.(type) {
			case *pgconn.StatementDescription:
				sds = append(sds, res)
			case *pgconn.ResultReader:
				if _, err := res.Close(); err != nil {
					return err
				}
			}
		}
	}()
	if closeErr := p.Close(); err == nil {
		err = closeErr
	}
	if err == nil {
		err = c.Disorder()
	}
	if err == nil && len(sds) < len(texts) {
		err = errors.New("statement: learn: the server sent too few descriptions")
	}
	return sds, err
}
