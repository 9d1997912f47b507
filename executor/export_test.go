package executor

import (
	"github.com/jackc/pgx/v5"

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
