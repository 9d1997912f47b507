package pgscript

import (
	"encoding/binary"
	"regexp"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgtype"
)

// Statement is what a text does.
//
// An undefined text has as many parameters as its highest $n, all int4 (text where it says $n::text). If it begins with select or has
// returning it gives one row with one column n of type int4: the first argument, else the first number in the text, else 0. BEGIN, COMMIT,
// ROLLBACK and savepoints do what they say.
type Statement struct {
	Params  []uint32
	Columns []Column
	// Rows are the rows for these arguments, in text form or [Null]. Nil is none.
	Rows func(args []string) [][]string
	// Tag is the command tag. Empty is what an undefined text of the same first word has.
	Tag string
	// Fail is asked at each step whether it fails; nil is never. The step Sync is the end of the transaction, where a deferred constraint
	// fails.
	Fail func(Step) *pgproto3.ErrorResponse
}

// Null stands for null in a row.
const Null = "\x00null"

// Step is where a statement can fail.
type Step int

// The steps.
const (
	Parse Step = iota
	Bind
	Execute
	Sync
)

// Column is a result column: int4 or text.
type Column struct {
	Name string
	OID  uint32
}

// FailTimes is a Fail that fails n times at a step.
func FailTimes(step Step, n int, e *pgproto3.ErrorResponse) func(Step) *pgproto3.ErrorResponse {
	return func(at Step) *pgproto3.ErrorResponse {
		if at != step || n == 0 {
			return nil
		}
		n--
		return e
	}
}

// ServerError is an error as PostgreSQL makes it, which ends the transaction.
func ServerError(code, message, routine string) *pgproto3.ErrorResponse {
	return &pgproto3.ErrorResponse{
		Severity: "ERROR", SeverityUnlocalized: "ERROR", Code: code, Message: message, File: "postgres.c", Line: 1, Routine: routine,
	}
}

// PoolerError is an error as PgBouncer makes it, which ends the connection.
func PoolerError(message string) *pgproto3.ErrorResponse {
	return &pgproto3.ErrorResponse{Severity: "FATAL", Code: "08P01", Message: message}
}

// parsed is a prepared statement.
type parsed struct {
	sql    string
	oids   []uint32
	failed bool // of a Tracked client: its Parse failed, and the pooler keeps the name all the same
}

var (
	parameter = regexp.MustCompile(`\$(\d+)(::text)?`)
	number    = regexp.MustCompile(`\d+`)
)

// statement returns what a text does.
func (b *Backend) statement(sql string) Statement {
	b.mu.Lock()
	st, ok := b.statements[sql]
	b.mu.Unlock()
	word := firstWord(sql)
	if st.Tag == "" {
		st.Tag = tagOf(word)
	}
	if ok {
		return st
	}
	for _, m := range parameter.FindAllStringSubmatch(sql, -1) {
		n, _ := strconv.Atoi(m[1])
		for len(st.Params) < n {
			st.Params = append(st.Params, pgtype.Int4OID)
		}
		if m[2] != "" {
			st.Params[n-1] = pgtype.TextOID
		}
	}
	if word == "select" || strings.Contains(sql, "returning") {
		literal := number.FindString(parameter.ReplaceAllString(sql, ""))
		st.Columns = []Column{{Name: "n", OID: pgtype.Int4OID}}
		st.Rows = func(args []string) [][]string {
			if len(args) > 0 {
				return [][]string{{args[0]}}
			}
			return [][]string{{literal}}
		}
	}
	return st
}

func tagOf(word string) string {
	switch word {
	case "insert":
		return "INSERT 0 1"
	case "update", "delete", "select":
		return strings.ToUpper(word) + " 1"
	}
	return strings.ToUpper(word)
}

func firstWord(sql string) string {
	word, _, _ := strings.Cut(strings.TrimSpace(sql), " ")
	return strings.ToLower(strings.TrimSuffix(word, ";"))
}

// decode returns a Bind's argument in text form.
func decode(oid uint32, format int16, value []byte) string {
	if format == 1 && oid == pgtype.Int4OID && len(value) == 4 {
		return strconv.Itoa(int(int32(binary.BigEndian.Uint32(value)))) //nolint:gosec // the wire's own
	}
	return string(value)
}

// encode returns a value's form on the wire.
func encode(oid uint32, format int16, text string) []byte {
	if format == 1 && oid == pgtype.Int4OID {
		n, _ := strconv.ParseInt(text, 10, 32)
		return binary.BigEndian.AppendUint32(nil, uint32(n)) //nolint:gosec // the wire's own
	}
	return []byte(text)
}

// formatAt is the protocol's rule: none is text, one is for all.
func formatAt(formats []int16, i int) int16 {
	switch len(formats) {
	case 0:
		return 0
	case 1:
		return formats[0]
	default:
		return formats[i]
	}
}
