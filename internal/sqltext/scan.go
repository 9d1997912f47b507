package sqltext

import "strings"

// longestWord is as long as the longest word of the tables; a longer word is in none of them.
const longestWord = 16

// word puts the word that sql begins with, in lower case, into buf. It returns what of it fits.
func word(sql string, buf *[longestWord]byte) []byte {
	n := min(wordEnd(sql), longestWord)
	for i := range n {
		c := sql[i]
		if c >= 'A' && c <= 'Z' {
			c |= 0x20
		}
		buf[i] = c
	}
	return buf[:n]
}

func wordEnd(sql string) int {
	i := 0
	for i < len(sql) && (sql[i]|0x20 >= 'a' && sql[i]|0x20 <= 'z' || sql[i] == '_') {
		i++
	}
	return i
}

// skip returns sql without what may stand in front of a statement.
func skip(sql string) string {
	for {
		sql = strings.TrimLeft(sql, " \t\r\n\f\v(;")
		switch {
		case strings.HasPrefix(sql, "--"):
			sql = pastLine(sql)
		case strings.HasPrefix(sql, "/*"):
			sql = pastComment(sql)
		default:
			return sql
		}
	}
}

// nextStatement returns what follows the first semicolon that ends a statement; false if there is none. It knows strings, quoted identifiers,
// dollar quotes and comments. escapes says that a backslash in a plain string quotes what follows, and backslash whether there was one. The END in
// the body of a BEGIN ATOMIC function counts as a statement too.
func nextStatement(sql string, escapes bool) (rest string, ok, backslash bool) {
	for i := 0; i < len(sql); {
		switch c := sql[i]; {
		case c == ';':
			return sql[i+1:], true, backslash
		case c == '\'':
			var found bool
			i, found = pastQuote(sql, i, escapes || i > 0 && sql[i-1]|0x20 == 'e' && !isWord(sql, i-2))
			backslash = backslash || found
		case c == '"':
			i, _ = pastQuote(sql, i, false)
		case c == '-' && strings.HasPrefix(sql[i:], "--"):
			i = len(sql) - len(pastLine(sql[i:]))
		case c == '/' && strings.HasPrefix(sql[i:], "/*"):
			i = len(sql) - len(pastComment(sql[i:]))
		case c == '$':
			i = pastDollar(sql, i)
		case isWord(sql, i):
			for isWord(sql, i) || i < len(sql) && sql[i] == '$' { // which an identifier may hold, but not begin with
				i++
			}
		default:
			i++
		}
	}
	return "", false, backslash
}

// pastQuote returns where what is quoted at i ends. escapes says that a backslash quotes what follows, and backslash whether there was one.
func pastQuote(sql string, i int, escapes bool) (end int, backslash bool) {
	quote := sql[i]
	for i++; i < len(sql); i++ {
		switch {
		case sql[i] == '\\':
			backslash = true
			if escapes {
				i++
			}
		case sql[i] == quote && i+1 < len(sql) && sql[i+1] == quote:
			i++ // doubled
		case sql[i] == quote:
			return i + 1, backslash
		}
	}
	return len(sql), backslash
}

// pastDollar returns where the dollar-quoted string that may begin at i ends, or i+1 if none does.
func pastDollar(sql string, i int) int {
	end := i + 1
	for end < len(sql) && sql[end] != '$' {
		if !isWord(sql, end) {
			return i + 1
		}
		end++
	}
	if end == len(sql) || end > i+1 && sql[i+1] >= '0' && sql[i+1] <= '9' { // $1 is a parameter
		return i + 1
	}
	tag := sql[i : end+1]
	body := strings.Index(sql[end+1:], tag)
	if body < 0 {
		return len(sql)
	}
	return end + 1 + body + len(tag)
}

// isWord reports whether the byte at i belongs to an identifier.
func isWord(sql string, i int) bool {
	if i < 0 || i >= len(sql) {
		return false
	}
	c := sql[i]
	return c|0x20 >= 'a' && c|0x20 <= 'z' || c >= '0' && c <= '9' || c == '_' || c >= 0x80
}

// pastLine returns what follows the line that sql begins with.
func pastLine(sql string) string {
	i := strings.IndexAny(sql, "\r\n")
	if i < 0 {
		return ""
	}
	return sql[i+1:]
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
