package executor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/internal/statement"
)

// inOrder returns err, which may be nil, or what is behind it where an answer on the connection was out of order: then err may be the answer to
// another request, and so may what seemed to be a success. The connection is closed.
func inOrder(c *statement.Conn, err error) error {
	disorder := c.Disorder()
	if disorder == nil {
		return err
	}
	_ = c.PgConn().Close(context.Background()) // its socket is closed already, so nothing waits
	if err == nil || errors.Is(err, disorder) {
		return cmp.Or(err, disorder)
	}
	return errors.Join(disorder, err)
}

// conclude reads the answer to a statement to its end, and that of the group it rode in, if any.
func conclude(rr *pgconn.ResultReader, g *statement.Group) (pgconn.CommandTag, error) {
	tag, err := rr.Close()
	if g != nil {
		if groupErr := g.Close(); err == nil {
			err = groupErr
		}
	}
	return tag, err
}

// readOpening reads the results of what rode in front, and then the statement's.
func readOpening(g *statement.Group, texts int, ask bool) (rr *pgconn.ResultReader, on server, err error) {
	for range texts {
		if rr, err = g.Next(); err == nil {
			_, err = rr.Close()
		}
		if err != nil {
			return nil, on, err
		}
	}
	if ask {
		if rr, err = g.Next(); err != nil {
			return nil, on, err
		}
		if rr.NextRow() {
			pid, err := strconv.ParseUint(string(rr.Values()[0]), 10, 32)
			if err != nil {
				return nil, on, fmt.Errorf("executor: %s: %w", backendText, err)
			}
			on.pid = uint32(pid)
			if values := rr.Values(); len(values) > 1 {
				on.mark = string(values[1])
			}
		}
		if _, err := rr.Close(); err != nil {
			return nil, on, err
		}
	}
	rr, err = g.Next()
	return rr, on, err
}

// readable returns an error when rows came with a type that is unknown to pgx, in a binary form that was asked for because the column was of
// another type when the statement was learnt: what a caller scanned would be garbage. It also makes the next execution learn again.
func (a *attempt) readable(c *statement.Conn, q *call, fields []pgconn.FieldDescription) error {
	if a.d.Matches(fields) || fields == nil {
		return nil
	}
	a.st.Forget(a.d)
	if q.formats.Positions != nil || q.formats.ByOID != nil {
		return nil // the caller's own choice
	}
	for i := range fields {
		if fields[i].Format != pgx.BinaryFormatCode {
			continue
		}
		if typ, ok := c.TypeMap().TypeForOID(fields[i].DataTypeOID); !ok || !typ.Codec.FormatSupported(pgx.BinaryFormatCode) {
			return fmt.Errorf("executor: column %q has changed its type, and pgx knows no binary form of the new one; "+
				"the statement was executed, and the next execution will read it", fields[i].Name)
		}
	}
	return nil
}
