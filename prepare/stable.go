package prepare

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// Stable marks a statement whose text never changes. It is a leading option in pgx's own dialect:
//
//	ex.QueryRow(ctx, "select email from users where id = $1", prepare.Stable, 42)
//
// It may stand before or after other options (pgx.QueryExecMode, pgx.QueryResultFormats, pgx.NamedArgs), in front of the arguments. An explicit
// QueryExecMode counts more. An executor sends a marked statement as a named prepared statement from its first use. On a bare pool it does nothing: it
// implements [pgx.QueryRewriter] as the identity. Safe for concurrent use.
var Stable stable

// stable has no values but one, so that nobody can assign another to Stable.
type stable struct{}

// RewriteQuery returns its input.
func (stable) RewriteQuery(_ context.Context, _ *pgx.Conn, sql string, args []any) (string, []any, error) {
	return sql, args, nil
}
