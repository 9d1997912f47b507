package fallback

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/bounceproof/bounceproof/internal/answer"
	"github.com/bounceproof/bounceproof/internal/pgxinternals"
)

// Dialer returns a dial function for [Probe] that connects with whatever config returns, a fresh configuration for each call: the
// connection settings of a pool with its BeforeConnect applied, for instance. The error and notice callbacks of the configuration are
// replaced, so that a probe's own errors reach nobody; everything else, also ValidateConnect and AfterConnect, is kept. A connection reads at most
// 4 MiB in its life, and no message of more than 1 MiB: whoever answers, a look at it does not take the program's memory.
func Dialer(config func(context.Context) (*pgconn.Config, error)) func(context.Context) (*pgconn.PgConn, error) {
	return func(ctx context.Context) (*pgconn.PgConn, error) {
		c, err := config(ctx)
		if err != nil {
			return nil, err
		}
		c = c.Copy()
		c.OnPgError = func(_ *pgconn.PgConn, e *pgconn.PgError) bool { return !fatal(e) }
		c.OnNotice = nil
		c.OnNotification = nil
		build := c.BuildFrontend
		if build == nil {
			build = pgproto3.NewFrontend
		}
		c.BuildFrontend = func(r io.Reader, w io.Writer) *pgproto3.Frontend {
			f := build(&limited{r: r, left: maxRead}, w)
			f.SetMaxBodyLen(maxMessage)
			return f
		}
		return pgconn.ConnectConfig(ctx, c)
	}
}

// What a probe reads. An answer of PostgreSQL's or a pooler's to what is asked has some hundred bytes, and one row.
const (
	maxRead    = 4 << 20
	maxMessage = 1 << 20
	maxRows    = 100
)

// errTooMuch is the end of a connection that sends more than any answer has.
var errTooMuch = errors.New("the other side sends more than an answer has")

// limited reads so many bytes and then fails.
type limited struct {
	r    io.Reader
	left int
}

func (l *limited) Read(p []byte) (int, error) {
	if l.left <= 0 {
		return 0, errTooMuch
	}
	n, err := l.r.Read(p[:min(len(p), l.left)])
	l.left -= n
	return n, err
}

// wire is a connection of the probe's own, taken over from pgconn. pgconn answers a passed deadline with a CancelRequest, which
// PgBouncer up to 1.17 can deliver to a stranger's query (pgbouncer#717), and with a goroutine; a probe gives up by closing its socket.
type wire struct {
	conn     net.Conn
	frontend *pgproto3.Frontend
	check    *answer.Checker // nil if it came too late, or this pgx is not as expected
	keyPID   uint32          // as BackendKeyData gave it
	dead     bool
}

func dialProbe(ctx context.Context, dial func(context.Context) (*pgconn.PgConn, error)) (*wire, error) {
	pg, err := dial(ctx)
	if err != nil {
		return nil, err
	}
	h, err := pg.Hijack()
	if err != nil {
		_ = pg.Close(ctx)
		return nil, err
	}
	w := &wire{conn: h.Conn, frontend: h.Frontend, keyPID: h.PID}
	// The frontend and what it reads from stay: where writing took pgconn more than 15 ms, a goroutine of its own is still reading from the
	// socket, and would take away the first bytes of the answer to whoever reads there too.
	h.Frontend.SetMaxBodyLen(maxMessage)       // dial need not be a Dialer
	check := &answer.Checker{LooseClose: true} // what comes before its turn is what the probe wants to see
	if pgxinternals.Check() == nil && pgxinternals.WrapWire(h.Frontend, check.Wrap) {
		w.check = check
	}
	return w, nil
}

// close says goodbye and closes the socket. It may be called twice.
func (w *wire) close() {
	if w.conn == nil {
		return
	}
	if !w.dead {
		_ = w.conn.SetDeadline(time.Now().Add(100 * time.Millisecond))
		w.frontend.Send(&pgproto3.Terminate{})
		_ = w.frontend.Flush()
	}
	_ = w.conn.Close()
	w.conn, w.dead = nil, true
}

func (w *wire) parse(name, sql string) { w.frontend.SendParse(&pgproto3.Parse{Name: name, Query: sql}) }

// query queues one execution of sql with text arguments and text results, unnamed.
func (w *wire) query(sql string, args ...string) {
	params := make([][]byte, len(args))
	for i, a := range args {
		params[i] = []byte(a)
	}
	w.parse("", sql)
	w.frontend.SendBind(&pgproto3.Bind{Parameters: params})
	w.frontend.SendExecute(&pgproto3.Execute{})
}

func (w *wire) closeStatement(name string) {
	w.frontend.SendClose(&pgproto3.Close{ObjectType: 'S', Name: name})
}

// group sends what fill queues and a Sync in one write, and reads to ReadyForQuery. It returns all rows, and the first error the other
// side sent. After an error that is not a *pgconn.PgError, and after one that closed the socket, the connection is dead.
func (w *wire) group(ctx context.Context, fill func(*wire)) (rows [][][]byte, err error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	_ = w.conn.SetDeadline(time.Time{})
	expired := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(expired)
		_ = w.conn.SetDeadline(time.Unix(1, 0))
	})
	defer func() {
		if !stop() {
			<-expired // or it would end the next group
		}
	}()

	fill(w)
	w.frontend.SendSync(&pgproto3.Sync{})
	if err := w.frontend.Flush(); err != nil {
		return nil, w.fail(ctx, err)
	}
	var first *pgconn.PgError
	for {
		msg, err := w.frontend.Receive()
		if err != nil {
			err = w.fail(ctx, err)
			if first != nil {
				return nil, first
			}
			return nil, err
		}
		switch msg := msg.(type) {
		case *pgproto3.DataRow:
			row := make([][]byte, len(msg.Values))
			for i, v := range msg.Values {
				if v != nil {
					row[i] = append([]byte{}, v...)
				}
			}
			if len(rows) == maxRows {
				return nil, w.fail(ctx, errTooMuch)
			}
			rows = append(rows, row)
		case *pgproto3.ErrorResponse:
			if first == nil {
				first = pgconn.ErrorResponseToPgError(msg)
			}
			if fatal(first) {
				w.dead = true
				return nil, first
			}
		case *pgproto3.ReadyForQuery:
			if first != nil {
				return nil, first
			}
			return rows, nil
		}
	}
}

func (w *wire) fail(ctx context.Context, err error) error {
	w.dead = true
	if ctxErr := ctx.Err(); ctxErr != nil {
		return ctxErr
	}
	return err
}

// backend asks which server process answers.
func (w *wire) backend(ctx context.Context) (uint32, error) {
	return w.backendAnd(ctx, func(*wire) {})
}

// orderedBackend is backend, and reports whether the answers came in the order of what was sent. A Close of no statement stands behind the
// question: PostgreSQL answers in order, and Pgpool-II answers a Close at once (4.3.5 in streaming replication mode), so it is there though it
// passes the server's process id on.
func (w *wire) orderedBackend(ctx context.Context) (pid uint32, ordered bool, err error) {
	pid, err = w.backendAnd(ctx, func(w *wire) { w.closeStatement("bp_probe_" + randomHex()) })
	return pid, w.check == nil || !w.check.Reordered(), err
}

// backendAnd asks which server process answers, and sends what more queues behind that.
func (w *wire) backendAnd(ctx context.Context, more func(*wire)) (uint32, error) {
	rows, err := w.group(ctx, func(w *wire) {
		w.query("select pg_catalog.pg_backend_pid()")
		more(w)
	})
	if err != nil {
		return 0, err
	}
	if len(rows) != 1 || len(rows[0]) != 1 {
		return 0, errors.New("pg_backend_pid() gave no row")
	}
	pid := parsePID(rows[0][0])
	if pid == 0 {
		return 0, fmt.Errorf("pg_backend_pid() gave %q", rows[0][0])
	}
	return pid, nil
}
