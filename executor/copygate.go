package executor

import (
	"bytes"
	"sync"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
)

// copyGate keeps the end of COPY's data back until the server has answered that it takes data.
//
// PgBouncer 1.26 notes that a client is copying when the server says so, and ends that with the client's CopyDone or CopyFail. Where that
// end came first, as it does with pgconn, which sends everything at once, it keeps the server connection for that client until the client
// disconnects: a few copies of few rows take all servers of a pool. (Since pgbouncer#1471; seen on 1.26.1, not on 1.15 to 1.24.)
type copyGate struct {
	once sync.Once
	open chan struct{}
}

// watch lifts the gate at the server's first answer. pgconn shows messages to nobody, but its frontend writes a trace.
func (g *copyGate) watch(pg *pgconn.PgConn) (done func()) {
	pg.Frontend().Trace(g, pgproto3.TracerOptions{SuppressTimestamps: true})
	return func() {
		g.lift()
		// The goroutine that pgconn may leave behind with a lost connection still looks at the tracer.
		if !pg.IsClosed() {
			pg.Frontend().Untrace()
		}
	}
}

// Write gets one line for each message: the sender (B is the server), its name, its length.
func (g *copyGate) Write(line []byte) (int, error) {
	if bytes.HasPrefix(line, []byte("B\tCopyInResponse\t")) || bytes.HasPrefix(line, []byte("B\tErrorResponse\t")) {
		g.lift()
	}
	return len(line), nil
}

func (g *copyGate) lift() { g.once.Do(func() { close(g.open) }) }
