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
	pid := strconv.Itoa(int(c.server.pid))
	pidColumn := Column{Name: "pg_backend_pid", OID: pgtype.Int4OID}
	switch {
	case strings.Contains(p.sql, "pg_prepared_statements"):
		columns := []Column{pidColumn, {Name: "name", OID: pgtype.TextOID}}
		if args == nil {
			return columns, nil
		}
		c.b.mu.Lock()
		defer c.b.mu.Unlock()
		for name, other := range c.names() {
			if name != "" && len(args) > 0 && other.sql == args[0] {
				if c.b.o.Kind == Tracked {
					name = "PGBOUNCER_1"
				}
				return columns, [][]string{{pid, name}}
			}
		}
		return columns, [][]string{{pid, ""}}
	case strings.Contains(p.sql, "pg_backend_pid()"):
		return []Column{pidColumn}, [][]string{{pid}}
	case st.Rows == nil || args == nil:
		return st.Columns, nil
	default:
		return st.Columns, st.Rows(args)
	}
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
			values[i] = encode(columns[i].OID, formatAt(formats, i), text)
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
