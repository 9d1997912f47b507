package answer

import (
	"bytes"
	"encoding/binary"
	"strconv"
)

// inOrder judges what is no error.
func (c *Checker) inOrder(a *awaited, typ byte, body []byte) (expected, got string) {
	switch a.request {
	case parse:
		return c.only(typ, '1')
	case bind:
		if typ == '2' {
			c.columns = anyColumns
		}
		return c.only(typ, '2')
	case closing:
		return c.only(typ, '3')
	case describeStatement:
		if a.stage == atStart {
			if typ == 't' {
				a.stage = described
				return "", ""
			}
			return name('t'), name(typ)
		}
		if typ == 'T' || typ == 'n' {
			c.head++
			return "", ""
		}
		return "RowDescription or NoData", name(typ)
	case describePortal:
		switch typ {
		case 'T':
			c.columns = count(body)
		case 'n':
			c.columns = noColumns
		default:
			return "RowDescription or NoData", name(typ)
		}
		c.head++
		return "", ""
	case syncing:
		return c.ready(typ, body)
	case function:
		if typ == 'V' && a.stage == atStart && !c.skipping {
			a.stage = answeredOne
			return "", ""
		}
		if a.stage == atStart && !c.skipping {
			return name('V'), name(typ)
		}
		return c.ready(typ, body)
	case execute:
		return c.executed(a, typ, body)
	default:
		return c.queried(a, typ, body)
	}
}

// only is for a request with one answer.
func (c *Checker) only(typ, want byte) (expected, got string) {
	if typ != want {
		return name(want), name(typ)
	}
	c.head++
	return "", ""
}

// ready is the end of a request.
func (c *Checker) ready(typ byte, body []byte) (expected, got string) {
	if typ != 'Z' {
		return name('Z'), name(typ)
	}
	if len(body) != 1 || bytes.IndexByte([]byte("ITE"), body[0]) < 0 {
		return name('Z'), name('Z') + " of a status that there is not"
	}
	c.head++
	c.skipping, c.copyEnd = false, 0
	if c.head == len(c.queue) {
		c.executes = false
	}
	return "", ""
}

// executed judges the answer to Execute.
func (c *Checker) executed(a *awaited, typ byte, body []byte) (expected, got string) {
	if a.stage != atStart && a.stage != inRows {
		return c.copies(a, typ, body, func() { c.head++ })
	}
	columns := c.columns
	if columns == anyColumns && a.hint.Columns > 0 {
		columns = a.hint.Columns
	}
	switch typ {
	case 'D':
		switch n := count(body); {
		case columns == noColumns:
			return name('C'), name('D')
		case columns != anyColumns && n != columns:
			return name('D') + " of " + strconv.Itoa(columns) + " columns", name('D') + " of " + strconv.Itoa(n)
		default:
			a.stage, c.columns = inRows, n // also where nobody has described it, all rows are alike
			a.rows++
		}
		return "", ""
	case 'C':
		if !isTag(body, a.hint.Verb) {
			return name('C') + " of " + a.hint.Verb, name('C') + " of another command"
		}
		if n, ok := rowsOf(body); ok && a.hint.Verb == "SELECT" && c.columns != noColumns && n != a.rows {
			return name('C') + " of " + strconv.FormatUint(a.rows, 10) + " rows", name('C') + " of " + strconv.FormatUint(n, 10)
		}
		c.head++
		return "", ""
	case 's':
		if a.limited {
			c.head++
			return "", ""
		}
	case 'I':
		if a.stage == atStart && a.hint.Verb == "" {
			c.head++
			return "", ""
		}
	case 'G', 'H':
		if a.stage == atStart && (a.hint.Verb == "" || a.hint.Verb == copying) {
			a.stage = copyStage(typ)
			return "", ""
		}
	}
	return "DataRow or CommandComplete", name(typ)
}

// queried judges the answer to a simple query, which may be of several statements.
func (c *Checker) queried(a *awaited, typ byte, body []byte) (expected, got string) {
	if c.skipping {
		return c.ready(typ, body)
	}
	switch a.stage {
	case atStart, answeredOne:
		if a.hint.Verb != "" && a.stage == answeredOne {
			return c.ready(typ, body)
		}
		if a.hint.Verb == copying && typ != 'G' && (typ != 'H' || a.hint.CopyIn) || a.hint.Verb != "" && typ == 'I' {
			return "the answer to " + a.hint.Verb, name(typ)
		}
		switch typ {
		case 'T':
			a.stage, c.columns = inRows, count(body)
			return "", ""
		case 'C', 'I':
			if typ == 'C' && !isTag(body, a.hint.Verb) {
				return name('C') + " of " + a.hint.Verb, name('C') + " of another command"
			}
			a.stage = answeredOne
			return "", ""
		case 'G', 'H':
			a.stage = copyStage(typ)
			return "", ""
		case 'Z':
			if a.stage == answeredOne {
				return c.ready(typ, body)
			}
		}
		return "RowDescription or CommandComplete", name(typ)
	case inRows:
		switch {
		case typ == 'D' && count(body) == c.columns:
			return "", ""
		case typ == 'D':
			return name('D') + " of " + strconv.Itoa(c.columns) + " columns", name('D') + " of " + strconv.Itoa(count(body))
		case typ == 'C':
			a.stage = answeredOne
			return "", ""
		}
		return "DataRow or CommandComplete", name(typ)
	default:
		return c.copies(a, typ, body, func() { a.stage = answeredOne })
	}
}

// copies judges the answer to COPY, of which done is the end.
func (c *Checker) copies(a *awaited, typ byte, body []byte, done func()) (expected, got string) {
	switch {
	case typ == 'C' && !isTag(body, copying):
		return name('C') + " of " + copying, name('C') + " of another command"
	case a.stage == inCopyIn && typ == 'C' && c.copyEnd == 'c', a.stage == afterCopy && typ == 'C':
		c.copyEnd = 0
		done()
		return "", ""
	case a.stage == inCopyOut && typ == 'd':
		return "", ""
	case a.stage == inCopyOut && typ == 'c':
		a.stage = afterCopy
		return "", ""
	case a.stage == inCopyOut:
		return "CopyData or CopyDone", name(typ)
	case a.stage == inCopyIn && c.copyEnd == 0:
		return "no answer before the end of the data", name(typ)
	case a.stage == inCopyIn && c.copyEnd == 'f':
		return name('E'), name(typ)
	}
	return name('C'), name(typ)
}

func copyStage(typ byte) stage {
	if typ == 'G' {
		return inCopyIn
	}
	return inCopyOut
}

// count is the number of columns at the start of a RowDescription or a DataRow.
func count(body []byte) int {
	if len(body) < 2 {
		return malformed
	}
	return int(binary.BigEndian.Uint16(body))
}

// isFatal reports whether an error is the connection's last: SFATAL, or VFATAL where the first is translated.
func isFatal(body []byte) bool {
	for len(body) > 1 {
		field, rest, _ := bytes.Cut(body, []byte{0})
		if len(field) > 1 && (field[0] == 'S' || field[0] == 'V') && (string(field[1:]) == "FATAL" || string(field[1:]) == "PANIC") {
			return true
		}
		body = rest
	}
	return false
}

// rowsOf is the number of rows that a command tag ends with.
func rowsOf(tag []byte) (n uint64, ok bool) {
	tag = bytes.TrimRight(tag, "\x00")
	for _, digit := range tag[bytes.LastIndexByte(tag, ' ')+1:] {
		if digit < '0' || digit > '9' {
			return 0, false
		}
		n, ok = n*10+uint64(digit-'0'), true
	}
	return n, ok
}

// isServers reports whether PostgreSQL made an error (9.6 or newer), and no pooler: those leave the severity's untranslated form out.
func isServers(body []byte) bool {
	_, rest, _ := bytes.Cut(body, []byte{0})
	return len(rest) > 0 && rest[0] == 'V'
}

// isTag reports whether a command tag can be that of a command.
func isTag(tag []byte, verb string) bool {
	word, _, _ := bytes.Cut(bytes.TrimRight(tag, "\x00"), []byte{' '})
	return verb == "" || string(word) == verb || verb == "COMMIT" && string(word) == "ROLLBACK"
}

var names = map[byte]string{
	'1': "ParseComplete", '2': "BindComplete", '3': "CloseComplete", 'c': "CopyDone", 'C': "CommandComplete", 'd': "CopyData", 'D': "DataRow",
	'E': "ErrorResponse", 'G': "CopyInResponse", 'H': "CopyOutResponse", 'I': "EmptyQueryResponse", 'K': "BackendKeyData", 'n': "NoData",
	'R': "Authentication", 's': "PortalSuspended", 't': "ParameterDescription", 'T': "RowDescription", 'v': "NegotiateProtocolVersion",
	'V': "FunctionCallResponse", 'Z': "ReadyForQuery",
}

func name(typ byte) string {
	if n, ok := names[typ]; ok {
		return n
	}
	return "a message of no known type"
}
