package sqltext

import "strings"

// Keyword returns the first word of a statement in lower case, past white space, comments and opening parentheses; empty if there is none.
func Keyword(sql string) string {
	for {
		sql = strings.TrimLeft(sql, " \t\r\n\f\v(;")
		switch {
		case strings.HasPrefix(sql, "--"):
			_, rest, ok := strings.Cut(sql, "\n")
			if !ok {
				return ""
			}
			sql = rest
		case strings.HasPrefix(sql, "/*"):
			sql = pastComment(sql)
		default:
			end := strings.IndexFunc(sql, func(r rune) bool { return (r|0x20 < 'a' || r|0x20 > 'z') && r != '_' })
			if end < 0 {
				end = len(sql)
			}
			return strings.ToLower(sql[:end])
		}
	}
}

// pastComment returns what follows the comment that sql begins with. PostgreSQL's comments nest.
func pastComment(sql string) string {
	depth := 0
	for i := 0; i+1 < len(sql); {
		switch sql[i : i+2] {
		case "/*":
			depth++
			i += 2
		case "*/":
			depth--
			i += 2
			if depth == 0 {
				return sql[i:]
			}
		default:
			i++
		}
	}
	return ""
}

// isUtility reports whether a statement's result may have other columns at every execution without the server calling a plan stale: FETCH from
// a cursor, EXECUTE, EXPLAIN, SHOW. PostgreSQL describes those when the portal starts (UtilityTupleDescriptor, src/backend/tcop/utility.c)
// and never refuses them with 0A000.
func isUtility(sql string) bool {
	switch Keyword(sql) {
	case "select", "insert", "update", "delete", "merge", "with", "values", "table", "":
		return false
	}
	return true
}
