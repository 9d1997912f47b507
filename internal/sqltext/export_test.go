package sqltext

import "strings"

// Keyword returns the first word of a statement in lower case, past white space, comments, opening parentheses and semicolons; empty if there is
// none.
func Keyword(sql string) string {
	rest := skip(sql)
	return strings.ToLower(rest[:wordEnd(rest)])
}
