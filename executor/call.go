package executor

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/internal/sqltext"
	"github.com/bounceproof/bounceproof/internal/statement"
	"github.com/bounceproof/bounceproof/prepare"
)

// call is one Exec, Query or QueryRow as the caller wrote it, with pgx's leading options taken off the arguments.
type call struct {
	sql      string
	args     []any // without the options; after rewrite what the rewriter made of them
	givenSQL string
	given    []any // as the caller wrote them, with givenSQL: tracers see these
	marked   bool
	mode     pgx.QueryExecMode // 0 is none given
	rewriter pgx.QueryRewriter
	formats  statement.Formats
}

// readCall takes the options off the arguments by pgx's rule: they lead, in any order, and the last of a kind counts. prepare.Stable is
// a kind of its own, so that it goes together with a rewriter such as pgx.NamedArgs.
func readCall(sql string, args []any) call {
	q := call{sql: sql, args: args, givenSQL: sql, given: args}
	for len(q.args) > 0 {
		switch arg := q.args[0].(type) {
		case pgx.QueryResultFormats:
			q.formats.Positions = arg
		case pgx.QueryResultFormatsByOID:
			q.formats.ByOID = arg
		case pgx.QueryExecMode:
			q.mode = arg
		case pgx.QueryRewriter:
			if arg == pgx.QueryRewriter(prepare.Stable) {
				q.marked = true
			} else {
				q.rewriter = arg
			}
		default:
			return q
		}
		q.args = q.args[1:]
	}
	return q
}

// rewrite runs the caller's rewriter, if any, on the real connection.
func (q *call) rewrite(ctx context.Context, conn *pgx.Conn) error {
	if q.rewriter == nil {
		return nil
	}
	sql, args, err := q.rewriter.RewriteQuery(ctx, conn, q.sql, q.args)
	if err != nil {
		return fmt.Errorf("rewrite query failed: %w", err)
	}
	q.sql, q.args, q.rewriter = sql, args, nil
	return nil
}

// stable reports whether the caller asks for a prepared statement at the first use.
func (q *call) stable() bool { return q.marked || q.mode == pgx.QueryExecModeCacheStatement }

// unprepared reports whether the caller asks for no name, ever.
func (q *call) unprepared() bool {
	return q.mode == pgx.QueryExecModeCacheDescribe || q.mode == pgx.QueryExecModeDescribeExec
}

// describesEachTime reports whether the caller asks for a description that no earlier call has left.
func (q *call) describesEachTime() bool { return q.mode == pgx.QueryExecModeDescribeExec }

// isPgx reports whether the call goes to pgx as it is: the modes that know no types, and the empty text. exec is true for Exec, where
// pgx makes every call without arguments a simple query, whatever the mode, so that migration scripts of several statements work.
func (q *call) isPgx(exec bool) bool {
	switch {
	case q.mode == pgx.QueryExecModeExec, q.mode == pgx.QueryExecModeSimpleProtocol:
		return true // with its rewriter
	case q.rewriter != nil:
		return false // what the text and the arguments will be is not known yet
	case q.sql == "":
		return true
	case len(q.args) > 0:
		return false
	default:
		return exec && !q.marked || isCopy(q.sql)
	}
}

// isCopy reports whether the text is COPY, whose answer only pgx's own paths read past.
func isCopy(sql string) bool { return sqltext.Of(sql)&sqltext.Copy != 0 }

// pgxArgs returns the arguments for pgx: the options it has to see again, and the rest.
func (q *call) pgxArgs() []any {
	args := make([]any, 0, len(q.args)+2)
	switch {
	case q.mode != 0:
		args = append(args, q.mode)
	case isCopy(q.sql):
		args = append(args, pgx.QueryExecModeExec) // and not by a name of pgx's
	}
	if q.rewriter != nil {
		args = append(args, q.rewriter)
	}
	if q.formats.Positions != nil {
		args = append(args, q.formats.Positions)
	}
	if q.formats.ByOID != nil {
		args = append(args, q.formats.ByOID)
	}
	return append(args, q.args...)
}
