package executor

import (
	"io"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/bounceproof/bounceproof/internal/statement"
)

// Options is what the option scanner reads off a call's arguments.
type Options struct {
	Args     []any
	Marked   bool
	Mode     pgx.QueryExecMode
	Rewriter pgx.QueryRewriter
	Formats  statement.Formats
	PgxArgs  []any
}

// ReadOptions runs the option scanner.
func ReadOptions(args []any) Options {
	q := readCall("", args)
	return Options{Args: q.args, Marked: q.marked, Mode: q.mode, Rewriter: q.rewriter, Formats: q.formats, PgxArgs: q.pgxArgs()}
}

// IgnoreMarks makes an executor believe what it once saw on a server connection, whatever has become of it.
func (ex *Executor) IgnoreMarks() { ex.shared.ignoreMarks = true }

// LimitValues makes CopyFrom refuse values of more than n bytes.
func (ex *Executor) LimitValues(n int) { ex.longestValue = n }

// MaxValue is the longest value of a COPY.
const MaxValue = maxValue

// CopyBytes returns what a COPY sends of rows, with a limit of a test's own.
func CopyBytes(fields []pgconn.FieldDescription, longest int, src pgx.CopyFromSource) ([]byte, error) {
	return io.ReadAll(&copyReader{m: pgtype.NewMap(), fields: fields, src: src, longest: longest})
}
