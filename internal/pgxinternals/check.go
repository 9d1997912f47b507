package pgxinternals

import (
	"bytes"
	"fmt"
	"io"
	"reflect"
	"runtime/debug"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgproto3"
)

// Check returns an error when the pgx that this program is built with has changed what this package relies on. The error names the change and
// the remedy; without it the change would show as a hang or as a nil. It looks once and remembers. Safe for concurrent use.
var Check = sync.OnceValue(func() error {
	return check(assumed{
		largeObjects: reflect.TypeFor[pgx.LargeObjects](), batch: reflect.TypeFor[pgx.Batch](), frontend: reflect.TypeFor[pgproto3.Frontend](),
	})
})

// assumed are the types whose insides this package uses.
type assumed struct{ largeObjects, batch, frontend reflect.Type }

func check(types assumed) error {
	for _, step := range []func() error{
		func() error { return checkLargeObjects(types.largeObjects) },
		func() error { return checkBatch(types.batch) },
		func() error { return checkFrontend(types.frontend) },
		func() error { return checkWire(types.frontend) },
		checkTrace,
	} {
		if err := step(); err != nil {
			return fmt.Errorf("pgx %s is not as this version of Bounceproof needs it: %w; use pgx v5.13, or a newer Bounceproof", version(), err)
		}
	}
	return nil
}

func checkLargeObjects(t reflect.Type) error {
	if t.NumField() != 1 || t.Field(0).Type != reflect.TypeFor[pgx.Tx]() {
		return fmt.Errorf("%v does not hold a transaction alone", t)
	}
	return nil
}

func checkBatch(t reflect.Type) error {
	return checkField(t, batchOptions, reflect.TypeFor[*pgx.TxOptions]())
}

func checkFrontend(t reflect.Type) error {
	f, ok := t.FieldByName(frontendTracer)
	if !ok || f.Type.Kind() != reflect.Pointer || f.Type.Elem().Kind() != reflect.Struct {
		return fmt.Errorf("%v has no tracer behind a pointer", t)
	}
	tracer := f.Type.Elem()
	if err := checkField(tracer, tracerOptions, reflect.TypeFor[pgproto3.TracerOptions]()); err != nil {
		return err
	}
	return checkField(tracer, tracerWriter, reflect.TypeFor[io.Writer]())
}

func checkField(t reflect.Type, name string, want reflect.Type) error {
	if f, ok := t.FieldByName(name); !ok || f.Type != want {
		return fmt.Errorf("%v has no field %s of type %v", t, name, want)
	}
	return nil
}

// checkTrace has a frontend read the server's answer to a COPY, traced by nobody and by somebody.
func checkTrace() error {
	answer, err := (&pgproto3.CopyInResponse{}).Encode(nil)
	if err != nil {
		return err
	}
	for _, opts := range []*pgproto3.TracerOptions{nil, {}, {SuppressTimestamps: true}} {
		var trace bytes.Buffer
		f := pgproto3.NewFrontend(bytes.NewReader(bytes.Repeat(answer, 2)), io.Discard)
		if opts != nil {
			f.Trace(&trace, *opts)
		}
		g := &CopyGate{open: make(chan struct{})}
		restore := g.watch(f)
		for i := range 2 {
			if _, err := f.Receive(); err != nil {
				return err
			}
			if i == 0 {
				restore()
			}
		}
		select {
		case <-g.open:
		default:
			return fmt.Errorf("the trace of pgproto3 does not show CopyInResponse")
		}
		if n := bytes.Count(trace.Bytes(), []byte("CopyInResponse")); opts != nil && n != 2 {
			return fmt.Errorf("a trace of pgproto3 that is watched for a while shows %d of 2 messages", n)
		}
	}
	return nil
}

// version is that of the pgx this program is built with.
func version() string {
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, m := range info.Deps {
			if m.Path == "github.com/jackc/pgx/v5" {
				if m.Replace != nil {
					m = m.Replace
				}
				return m.Version
			}
		}
	}
	return "(version unknown)"
}
