package pgscript

import (
	"fmt"
	"net"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgtype"
)

// client is one connection.
type client struct {
	b    *Backend
	conn net.Conn
	be   *pgproto3.Backend

	server *server            // a direct connection's own, or the one a pooler has lent
	kept   map[string]*parsed // of a Tracked pooler's client: its names
	tx     byte
	skip   bool // after an error, up to Sync
	portal *portal
	// effects are the texts that were executed and are not yet permanent; deferred is asked when they become so.
	effects  []string
	deferred []func(Step) *pgproto3.ErrorResponse
	out      []pgproto3.BackendMessage // up to the next Sync
	copying  bool
}

type portal struct {
	p       *parsed
	args    []string
	formats []int16
}

// errEnd ends a connection.
var errEnd = fmt.Errorf("pgscript: end of connection")

func (c *client) serve() {
	msg, err := c.be.ReceiveStartupMessage()
	if err != nil {
		return
	}
	if _, ok := msg.(*pgproto3.StartupMessage); !ok {
		c.b.mu.Lock()
		c.b.cancels++
		c.b.mu.Unlock()
		return // a cancel request, which this backend does not honour
	}
	c.b.mu.Lock()
	c.b.connects++
	c.b.pids++
	key := c.b.pids
	if c.b.o.Kind == Direct {
		c.server = &server{pid: key, names: c.kept}
	}
	c.b.mu.Unlock()
	for _, m := range []pgproto3.BackendMessage{
		&pgproto3.AuthenticationOk{},
		&pgproto3.ParameterStatus{Name: "server_version", Value: "15.0"},
		&pgproto3.ParameterStatus{Name: "client_encoding", Value: "UTF8"},
		&pgproto3.ParameterStatus{Name: "standard_conforming_strings", Value: "on"},
		&pgproto3.BackendKeyData{ProcessID: key, SecretKey: []byte{1, 2, 3, 4}},
		&pgproto3.ReadyForQuery{TxStatus: 'I'},
	} {
		c.be.Send(m)
	}
	if c.be.Flush() != nil {
		return
	}
	for {
		msg, err := c.be.Receive()
		if err != nil {
			return
		}
		if _, ok := msg.(*pgproto3.Terminate); ok {
			return
		}
		if c.blocked(FromClient) {
			return
		}
		c.b.record(messageOf(msg))
		if c.handle(msg) != nil {
			return
		}
	}
}

// record keeps what a client sent.
func (b *Backend) record(m Message) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.sent = append(b.sent, m)
	if m.EndsRequest() {
		b.requests++
	}
}

// blocked applies the triggers that a message reaches, and reports whether the connection has ended by that.
func (c *client) blocked(side Side) bool {
	switch c.b.at(side) {
	case cut:
		_ = c.conn.Close()
		return true
	case stall:
		// The client's writes must not block, and its goodbye is heard.
		for {
			msg, err := c.be.Receive()
			if _, bye := msg.(*pgproto3.Terminate); bye || err != nil {
				return true
			}
		}
	case goOn:
	}
	return false
}

// queue adds a message to the answer.
func (c *client) queue(m pgproto3.BackendMessage) { c.out = append(c.out, m) }

// flush sends the answer, message by message.
func (c *client) flush() error {
	for _, m := range c.out {
		if c.blocked(FromServer) {
			return errEnd
		}
		c.b.mu.Lock()
		_, isError := m.(*pgproto3.ErrorResponse)
		c.b.answers = append(c.b.answers, Answer{Request: c.b.requests, Error: isError})
		c.b.mu.Unlock()
		c.be.Send(m)
		if err := c.be.Flush(); err != nil {
			return err
		}
	}
	c.out = c.out[:0]
	return nil
}

// fail answers with an error. What follows is skipped up to Sync; a FATAL one ends the connection.
func (c *client) fail(e *pgproto3.ErrorResponse) error {
	c.queue(e)
	c.skip = true
	if c.tx == 'T' {
		c.tx = 'E'
	}
	c.effects, c.deferred = nil, nil
	if e.Severity == "FATAL" {
		_ = c.flush()
		return errEnd
	}
	return nil
}

func (c *client) handle(msg pgproto3.FrontendMessage) error {
	c.borrow()
	switch msg.(type) {
	case *pgproto3.Sync:
		return c.sync()
	case *pgproto3.CopyData, *pgproto3.CopyDone, *pgproto3.CopyFail:
		return c.copy(msg)
	}
	if c.skip {
		return nil
	}
	switch m := msg.(type) {
	case *pgproto3.Parse:
		return c.parse(m)
	case *pgproto3.Bind:
		return c.bind(m)
	case *pgproto3.Describe:
		return c.describe(m)
	case *pgproto3.Execute:
		return c.execute()
	case *pgproto3.Close:
		if m.ObjectType == 'S' {
			c.b.mu.Lock()
			delete(c.names(), m.Name)
			c.b.mu.Unlock()
		}
		c.queue(&pgproto3.CloseComplete{})
	case *pgproto3.Query:
		return c.query(m.String)
	case *pgproto3.Flush:
		return c.flush()
	}
	return nil
}

// borrow gives a pooler's client a server connection for the transaction that begins.
func (c *client) borrow() {
	if c.server != nil {
		return
	}
	c.b.mu.Lock()
	defer c.b.mu.Unlock()
	c.server = c.b.servers[c.b.turn%len(c.b.servers)]
	c.b.turn++
}

// names are the prepared statements that a client's message is about.
func (c *client) names() map[string]*parsed {
	if c.b.o.Kind == Raw {
		return c.server.names
	}
	return c.kept
}

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

func (c *client) execute() error {
	p := c.portal
	columns, rows := c.result(p.p, p.args)
	tag, e := c.run(p.p)
	if e != nil {
		return c.fail(e)
	}
	c.rows(columns, rows, p.formats)
	c.queue(&pgproto3.CommandComplete{CommandTag: []byte(tag)})
	return nil
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

func (c *client) sync() error {
	if c.tx == 'I' {
		if e := c.commit(); e != nil {
			c.queue(e)
		}
	}
	c.skip, c.portal = false, nil
	c.queue(&pgproto3.ReadyForQuery{TxStatus: c.tx})
	if c.tx == 'I' && c.b.o.Kind != Direct {
		c.server = nil
	}
	return c.flush()
}

// query runs a simple query: its texts, separated by semicolons, in one transaction.
func (c *client) query(sql string) error {
	for text := range strings.SplitSeq(sql, ";") {
		if text = strings.TrimSpace(text); text == "" {
			continue
		}
		if c.aborted(text) {
			return c.endQuery(aborted)
		}
		p := &parsed{sql: text}
		st := c.b.statement(text)
		if e := st.fails(Parse); e != nil {
			return c.endQuery(e)
		}
		if firstWord(text) == "copy" && strings.Contains(text, "from stdin") {
			c.copying = true
			c.portal = &portal{p: p}
			c.queue(&pgproto3.CopyInResponse{OverallFormat: 1})
			return c.flush()
		}
		columns, rows := c.result(p, []string{})
		tag, e := c.run(p)
		if e != nil {
			return c.endQuery(e)
		}
		if len(columns) > 0 {
			c.queue(c.rowDescription(p, nil))
			c.rows(columns, rows, nil)
		}
		c.queue(&pgproto3.CommandComplete{CommandTag: []byte(tag)})
	}
	return c.sync()
}

func (c *client) endQuery(e *pgproto3.ErrorResponse) error {
	if err := c.fail(e); err != nil {
		return err
	}
	return c.sync()
}

// copy takes COPY data; what comes after COPY has failed is ignored, as the protocol has it.
func (c *client) copy(msg pgproto3.FrontendMessage) error {
	if !c.copying {
		return nil
	}
	switch m := msg.(type) {
	case *pgproto3.CopyDone:
		c.copying = false
		tag, e := c.run(c.portal.p)
		if e != nil {
			return c.endQuery(e)
		}
		c.queue(&pgproto3.CommandComplete{CommandTag: []byte(tag + " 1")})
		return c.sync()
	case *pgproto3.CopyFail:
		c.copying = false
		return c.endQuery(ServerError("57014", "COPY from stdin failed: "+m.Message, "CopyGetData"))
	}
	return nil
}
