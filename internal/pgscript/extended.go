package pgscript

import (
	"fmt"
	"strconv"

	"github.com/jackc/pgx/v5/pgproto3"
)

// The extended protocol: Parse, Bind, Describe, Execute, Sync.

func (c *client) parse(m *pgproto3.Parse) error {
	c.b.mu.Lock()
	_, taken := c.names()[m.Name]
	c.b.mu.Unlock()
	if taken && m.Name != "" {
		if c.b.o.Kind == Tracked {
			return c.fail(PoolerError("prepared statement name is already in use"))
		}
		return c.fail(ServerError("42P05", fmt.Sprintf("prepared statement %q already exists", m.Name), "StorePreparedStatement"))
	}
	p := &parsed{sql: m.Query, oids: m.ParameterOIDs}
	st := c.b.statement(m.Query)
	if len(p.oids) == 0 {
		p.oids = st.Params
	}
	var e *pgproto3.ErrorResponse
	if c.aborted(m.Query) {
		e = aborted
	} else {
		e = st.fails(Parse)
	}
	p.failed = e != nil
	if e == nil || c.b.o.Kind == Tracked && m.Name != "" {
		c.b.mu.Lock()
		c.names()[m.Name] = p
		c.b.mu.Unlock()
	}
	if e != nil {
		return c.fail(e)
	}
	c.queue(&pgproto3.ParseComplete{})
	return nil
}

var aborted = ServerError("25P02", "current transaction is aborted, commands ignored until end of transaction block", "exec_parse_message")

// aborted reports whether the transaction has failed and the text is not one that ends it.
func (c *client) aborted(sql string) bool {
	word := firstWord(sql)
	return c.tx == 'E' && word != "rollback" && word != "commit" && word != "end" && word != "abort"
}

// find returns the prepared statement of a Bind or Describe, or the error of a missing one.
func (c *client) find(name string) (*parsed, error) {
	c.b.mu.Lock()
	p, ok := c.names()[name]
	c.b.mu.Unlock()
	switch {
	case ok && !p.failed:
		return p, nil
	case c.b.o.Kind == Tracked && name != "":
		return nil, c.failed(PoolerError("prepared statement did not exist"))
	case name == "":
		return nil, c.failed(ServerError("26000", "unnamed prepared statement does not exist", "exec_bind_message"))
	default:
		return nil, c.failed(ServerError("26000", fmt.Sprintf("prepared statement %q does not exist", name), "FetchPreparedStatement"))
	}
}

// errAnswered says that an error was the answer and the connection goes on.
var errAnswered = fmt.Errorf("pgscript: answered with an error")

// failed is fail for a caller that has to end too.
func (c *client) failed(e *pgproto3.ErrorResponse) error {
	if err := c.fail(e); err != nil {
		return err
	}
	return errAnswered
}

func (c *client) bind(m *pgproto3.Bind) error {
	p, err := c.find(m.PreparedStatement)
	if err != nil {
		return unanswered(err)
	}
	if c.aborted(p.sql) {
		return c.fail(aborted)
	}
	if len(m.Parameters) != len(p.oids) {
		return c.fail(ServerError("08P01", fmt.Sprintf("bind message supplies %d parameters, but prepared statement %q requires %d",
			len(m.Parameters), m.PreparedStatement, len(p.oids)), "exec_bind_message"))
	}
	st := c.b.statement(p.sql)
	if e := st.fails(Bind); e != nil {
		return c.fail(e)
	}
	args := make([]string, len(m.Parameters))
	for i, value := range m.Parameters {
		args[i] = decode(p.oids[i], formatAt(m.ParameterFormatCodes, i), value)
	}
	c.portal = &portal{p: p, args: args, formats: append([]int16(nil), m.ResultFormatCodes...)}
	c.queue(&pgproto3.BindComplete{})
	return nil
}

// unanswered hides errAnswered: the connection goes on.
func unanswered(err error) error {
	if err == errAnswered { //nolint:errorlint // its own sentinel, never wrapped
		return nil
	}
	return err
}

func (c *client) describe(m *pgproto3.Describe) error {
	if m.ObjectType == 'P' {
		c.queue(c.rowDescription(c.portal.p, c.portal.formats))
		return nil
	}
	p, err := c.find(m.Name)
	if err != nil {
		return unanswered(err)
	}
	c.queue(&pgproto3.ParameterDescription{ParameterOIDs: p.oids})
	c.queue(c.rowDescription(p, nil))
	return nil
}

func (c *client) rowDescription(p *parsed, formats []int16) pgproto3.BackendMessage {
	columns, _ := c.result(p, nil)
	if len(columns) == 0 {
		return &pgproto3.NoData{}
	}
	d := &pgproto3.RowDescription{}
	for i, col := range columns {
		d.Fields = append(d.Fields, pgproto3.FieldDescription{
			Name: []byte(col.Name), DataTypeOID: col.OID, DataTypeSize: 4, TypeModifier: -1, Format: formatAt(formats, i),
		})
	}
	return d
}

func (c *client) execute() error {
	p := c.portal
	columns, rows := c.result(p.p, p.args)
	tag, e := c.run(p.p)
	if e != nil {
		return c.fail(e)
	}
	c.notify(p.p.sql, p.args)
	c.rows(columns, rows, p.formats)
	if len(columns) > 0 && firstWord(p.p.sql) == "select" {
		tag = "SELECT " + strconv.Itoa(len(rows))
	}
	c.queue(&pgproto3.CommandComplete{CommandTag: []byte(tag)})
	return nil
}

func (c *client) sync() error {
	if c.tx == 'I' {
		if e := c.commit(); e != nil {
			c.queue(e)
		}
	}
	c.skip, c.portal = false, nil
	c.queue(&pgproto3.ReadyForQuery{TxStatus: c.tx})
	c.busy = false
	if c.tx == 'I' && c.b.sharesServers() {
		c.server = nil
	}
	return c.flush()
}
