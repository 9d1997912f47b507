package pgxinternals

import (
	"fmt"
	"io"
	"reflect"

	"github.com/jackc/pgx/v5/pgproto3"
)

// WrapWire puts what wrap returns in place of the streams of a frontend. It does nothing and returns false while the frontend holds bytes that
// it has read and not used. A pool's configuration could have a frontend of its own (pgconn.Config.BuildFrontend), but an executor is given a
// pool that is made.
func WrapWire(f *pgproto3.Frontend, wrap func(io.Reader, io.Writer) (io.Reader, io.Writer)) bool {
	v := reflect.ValueOf(f).Elem()
	if f.ReadBufferLen() > 0 || v.FieldByName(frontendPartial).Bool() {
		return false
	}
	r := unexported(v.FieldByName(frontendChunks).Elem().FieldByName(chunksReader))
	w := unexported(v.FieldByName(frontendWriter))
	newR, newW := wrap(r.Interface().(io.Reader), w.Interface().(io.Writer))
	r.Set(reflect.ValueOf(newR))
	w.Set(reflect.ValueOf(newW))
	return true
}

// LimitMessages makes a frontend refuse a message with a body of more than n bytes, by its header and before there is memory for it, until restore is
// called. A pgx that is not as expected has its own limit, 1 GiB.
func LimitMessages(f *pgproto3.Frontend, n int) (restore func()) {
	if Check() != nil {
		return func() {}
	}
	before := int(reflect.ValueOf(f).Elem().FieldByName(frontendLimit).Int())
	if before > 0 && before < n {
		return func() {} // the connection's owner allows less
	}
	f.SetMaxBodyLen(n)
	return func() { f.SetMaxBodyLen(before) }
}

// The fields of pgproto3.Frontend and of its chunkReader.
const (
	frontendLimit   = "maxBodyLen"
	frontendChunks  = "cr"
	chunksReader    = "r"
	frontendWriter  = "w"
	frontendPartial = "partialMsg"
)

func checkWire(t reflect.Type) error {
	for name, want := range map[string]reflect.Type{
		frontendWriter: reflect.TypeFor[io.Writer](), frontendPartial: reflect.TypeFor[bool](), frontendLimit: reflect.TypeFor[int](),
	} {
		if err := checkField(t, name, want); err != nil {
			return err
		}
	}
	f, ok := t.FieldByName(frontendChunks)
	if !ok || f.Type.Kind() != reflect.Pointer || f.Type.Elem().Kind() != reflect.Struct {
		return fmt.Errorf("%v has no reader behind a pointer", t)
	}
	return checkField(f.Type.Elem(), chunksReader, reflect.TypeFor[io.Reader]())
}
