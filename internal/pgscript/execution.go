package pgscript

import (
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgtype"
)

// result returns the columns and rows of a text: those of its statement, or what a probe asks the server about itself.
func (c *client) result(p *parsed, args []string) ([]Column, [][]string) {
	st := c.b.statement(p.sql)
	pidColumn := Column{Name: "pg_backend_pid", OID: pgtype.Int4OID}
	switch {
	case strings.Contains(p.sql, "pg_prepared_statements"):
		columns := []Column{pidColumn, {Name: "name", OID: pgtype.TextOID}}
		if args == nil {
			return columns, nil
		}
		return columns, [][]string{{c.backendPID(), c.serverName(args)}}
	case strings.Contains(p.sql, "pg_backend_pid(), '"): // with a literal of the client's own
		columns := []Column{pidColumn, {Name: "?column?", OID: pgtype.TextOID}}
		if args == nil {
			return columns, nil
		}
		_, literal, _ := strings.Cut(p.sql, "'")
		return columns, [][]string{{c.backendPID(), strings.TrimSuffix(literal, "'")}}
	case strings.Contains(p.sql, "pg_backend_pid()"):
		if args == nil {
			return []Column{pidColumn}, nil
		}
		return []Column{pidColumn}, [][]string{{c.backendPID()}}
	case strings.HasPrefix(p.sql, "select where") && strings.Contains(p.sql, "pg_postmaster_start_time"):
		columns := []Column{{Name: "n", OID: pgtype.Int4OID}}
		if len(args) == 3 && c.b.Stamped(args[0], args[1], args[2]) {
			return columns, [][]string{{"1"}}
		}
		return columns, nil
	case st.Rows == nil || args == nil:
		return st.Columns, nil
	default:
		return st.Columns, st.Rows(args)
	}
}

// backendPID is the answer to pg_backend_pid().
func (c *client) backendPID() string {
	c.asked++
	if f := c.b.o.Script.BackendPID; f != nil {
		return f(c.number, c.asked)
	}
	return strconv.Itoa(int(c.server.pid))
}

// serverName is the name by which the server knows the statement with the text of the first argument, [Null] if there is none.
func (c *client) serverName(args []string) string {
	c.b.mu.Lock()
	defer c.b.mu.Unlock()
	for name, p := range c.names() {
		if name != "" && len(args) > 0 && p.sql == args[0] {
			if name = c.b.rename(name); name != "" {
				return name
			}
		}
	}
	return Null
}

func (s *Statement) fails(step Step) *pgproto3.ErrorResponse {
	if s.Fail == nil {
		return nil
	}
	return s.Fail(step)
}

func (c *client) rows(columns []Column, rows [][]string, formats []int16) {
	for _, row := range rows {
		values := make([][]byte, len(row))
		for i, text := range row {
			if text != Null {
				values[i] = encode(columns[i].OID, formatAt(formats, i), text)
			}
		}
		c.queue(&pgproto3.DataRow{Values: values})
	}
}

// run executes a text and returns its tag.
func (c *client) run(p *parsed) (string, *pgproto3.ErrorResponse) {
	st := c.b.statement(p.sql)
	if e := st.fails(Execute); e != nil {
		return "", e
	}
	if e := c.b.executes(p.sql); e != nil {
		return "", e
	}
	if f := c.b.o.Script.Execute; f != nil {
		if e := f(c.number, p.sql); e != nil {
			return "", e
		}
	}
	text := strings.ToLower(p.sql)
	switch word := firstWord(p.sql); {
	case word == "begin" || word == "start":
		c.tx = 'T'
		return "BEGIN", nil
	case word == "commit" || word == "end":
		if c.tx == 'E' {
			c.tx, c.effects, c.deferred = 'I', nil, nil
			return "ROLLBACK", nil
		}
		e := c.commit()
		c.tx = 'I'
		return "COMMIT", e
	case word == "rollback" && strings.Contains(text, "savepoint"):
		c.tx = 'T' // a model without partial rollback: tests of savepoints have a real server
		return "ROLLBACK", nil
	case word == "rollback" || word == "abort":
		c.tx, c.effects, c.deferred = 'I', nil, nil
		return "ROLLBACK", nil
	}
	c.listen(p.sql)
	c.b.mu.Lock()
	c.b.ran[p.sql]++
	c.b.mu.Unlock()
	c.effects = append(c.effects, p.sql)
	if st.Fail != nil {
		c.deferred = append(c.deferred, st.Fail)
	}
	return st.Tag, nil
}

// commit makes what was executed permanent.
func (c *client) commit() *pgproto3.ErrorResponse {
	defer func() { c.effects, c.deferred = nil, nil }()
	for _, fail := range c.deferred {
		if e := fail(Sync); e != nil {
			return e
		}
	}
	c.b.mu.Lock()
	defer c.b.mu.Unlock()
	for _, sql := range c.effects {
		c.b.committed[sql]++
	}
	return nil
}
