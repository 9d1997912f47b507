package pgxinternals

import (
	"bytes"
	"io"
	"reflect"
	"sync"
	"unsafe"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
)

// CopyGate keeps the end of COPY's data back until the server has answered that it takes data.
//
// PgBouncer 1.26 notes that a client is copying when the server says so, and ends that with the client's CopyDone or CopyFail. Where that
// end came first, as it does with pgconn, which sends everything at once, it keeps the server connection for that client until the client
// disconnects: a few copies of few rows take all servers of a pool. (Since pgbouncer#1471; seen on 1.26.1, not on 1.15 to 1.24.)
type CopyGate struct {
	once sync.Once
	open chan struct{}

	timestamps bool      // stand in front of each line
	tracer     io.Writer // a tracer that was there before; it goes on getting every line
}

// WatchCopy returns a gate that opens at the server's first answer on pg. Call it before the COPY is sent, and done after its end, which opens
// the gate too. pgconn shows messages to nobody, but its frontend writes a trace (pgproto3, trace.go); a trace that the connection's owner had asked for goes
// on meanwhile, and stays.
func WatchCopy(pg *pgconn.PgConn) (g *CopyGate, done func()) {
	g = &CopyGate{open: make(chan struct{})}
	f := pg.Frontend()
	restore := g.watch(f)
	return g, func() {
		g.lift()
		// The goroutine that pgconn may leave behind with a lost connection still looks at the tracer.
		if !pg.IsClosed() {
			restore()
		}
	}
}

// Wait returns once the gate is open.
func (g *CopyGate) Wait() { <-g.open }

func (g *CopyGate) lift() { g.once.Do(func() { close(g.open) }) }

// watch puts the gate in front of the frontend's tracer.
func (g *CopyGate) watch(f *pgproto3.Frontend) (restore func()) {
	field := unexported(reflect.ValueOf(f).Elem().FieldByName(frontendTracer))
	before := reflect.New(field.Type()).Elem()
	before.Set(field)
	opts := pgproto3.TracerOptions{SuppressTimestamps: true}
	if !before.IsNil() {
		tracer := before.Elem()
		opts = tracer.FieldByName(tracerOptions).Interface().(pgproto3.TracerOptions)
		g.tracer = unexported(tracer.FieldByName(tracerWriter)).Interface().(io.Writer)
	}
	g.timestamps = !opts.SuppressTimestamps
	f.Trace(g, opts)
	return func() { field.Set(before) }
}

// Write gets one line for each message: the time, perhaps, the sender (B is the server), its name, its length.
func (g *CopyGate) Write(line []byte) (int, error) {
	message := line
	if g.timestamps {
		_, message, _ = bytes.Cut(line, []byte("\t"))
	}
	if bytes.HasPrefix(message, []byte("B\tCopyInResponse\t")) || bytes.HasPrefix(message, []byte("B\tErrorResponse\t")) {
		g.lift()
	}
	if g.tracer != nil {
		return g.tracer.Write(line)
	}
	return len(line), nil
}

// The fields of pgproto3.Frontend and of its tracer.
const (
	frontendTracer = "tracer"
	tracerOptions  = "TracerOptions"
	tracerWriter   = "w"
)

// unexported returns a field so that it can be read and set.
func unexported(field reflect.Value) reflect.Value {
	return reflect.NewAt(field.Type(), unsafe.Pointer(field.UnsafeAddr())).Elem()
}
