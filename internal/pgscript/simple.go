package pgscript

import (
	"strings"

	"github.com/jackc/pgx/v5/pgproto3"
)

// The simple protocol: Query and COPY.

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
