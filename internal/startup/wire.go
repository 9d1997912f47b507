package startup

import (
	"context"
	"net"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
)

// wire is a connection that was taken over from pgconn, which answers a passed deadline with a CancelRequest: PgBouncer up to 1.17 can deliver that
// to a stranger's query (pgbouncer#717). Here the socket is closed.
type wire struct {
	conn     net.Conn
	frontend *pgproto3.Frontend
	stop     func() bool
}

// maxMessage is the longest answer that is read: a setting's value, or an error.
const maxMessage = 1 << 20

func takeOver(ctx context.Context, conn *pgconn.PgConn) (*wire, error) {
	if err := ctx.Err(); err != nil { // the deadline below would be set on another goroutine, and perhaps too late
		_ = conn.Close(ctx)
		return nil, err
	}
	h, err := conn.Hijack()
	if err != nil {
		_ = conn.Close(ctx)
		return nil, err
	}
	h.Frontend.SetMaxBodyLen(maxMessage)
	w := &wire{conn: h.Conn, frontend: h.Frontend}
	w.stop = context.AfterFunc(ctx, func() { _ = w.conn.SetDeadline(time.Unix(1, 0)) })
	return w, nil
}

// close says goodbye and closes the socket.
func (w *wire) close() {
	if w.stop() {
		_ = w.conn.SetDeadline(time.Now().Add(100 * time.Millisecond))
		w.frontend.Send(&pgproto3.Terminate{})
		_ = w.frontend.Flush()
	}
	_ = w.conn.Close()
}

// one runs a statement, unnamed and with text in both directions, and returns its last row, or what the other side refused it with. After an
// error the connection is of no more use.
func (w *wire) one(sql string, args ...string) (row [][]byte, refused *pgconn.PgError, err error) {
	values := make([][]byte, len(args))
	for i, arg := range args {
		values[i] = []byte(arg)
	}
	w.frontend.SendParse(&pgproto3.Parse{Query: sql})
	w.frontend.SendBind(&pgproto3.Bind{Parameters: values})
	w.frontend.SendExecute(&pgproto3.Execute{})
	w.frontend.SendSync(&pgproto3.Sync{})
	if err := w.frontend.Flush(); err != nil {
		return nil, nil, err
	}
	for {
		msg, err := w.frontend.Receive()
		if err != nil {
			return nil, nil, err
		}
		switch msg := msg.(type) {
		case *pgproto3.DataRow:
			row = make([][]byte, len(msg.Values))
			for i, v := range msg.Values {
				if v != nil {
					row[i] = append([]byte{}, v...)
				}
			}
		case *pgproto3.ErrorResponse:
			refused = pgconn.ErrorResponseToPgError(msg)
			if refused.Severity != "ERROR" && refused.SeverityUnlocalized != "ERROR" { // FATAL; Severity is in the language of lc_messages
				return nil, nil, refused
			}
		case *pgproto3.ReadyForQuery:
			return row, refused, nil
		}
	}
}
