package statement

import (
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/internal/sqltext"
)

// OfText returns the description of a text without parameters that is the executor's own, under a name that is not made of the text: whoever
// parses it may say something else by it. Its rows come as text.
func OfText(name, sql string) *Description {
	return &Description{sd: pgconn.StatementDescription{Name: name, SQL: sql}, kind: sqltext.Of(sql)}
}
