package executor_test

import (
	"context"
	"errors"
	"reflect"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/internal/pgscript"
	"github.com/bounceproof/bounceproof/prepare"
)

// recorder is a rewriter that keeps what pgx gave it, and stops the query there.
type recorder struct {
	called bool
	args   []any
}

var errRecorded = errors.New("recorded")

func (r *recorder) RewriteQuery(_ context.Context, _ *pgx.Conn, _ string, args []any) (string, []any, error) {
	r.called, r.args = true, slices.Clone(args)
	return "", nil, errRecorded
}

// argument is one of the values that may stand in a call.
func argument(kind byte, recorders *[]*recorder) any {
	switch kind % 15 {
	case 0:
		return pgx.QueryResultFormats{pgx.BinaryFormatCode}
	case 1:
		return pgx.QueryResultFormats{}
	case 2:
		return pgx.QueryResultFormatsByOID{23: pgx.TextFormatCode}
	case 3:
		return pgx.QueryExecModeCacheDescribe
	case 4:
		return pgx.QueryExecModeSimpleProtocol
	case 5:
		return pgx.QueryExecMode(77)
	case 6, 7:
		r := &recorder{}
		*recorders = append(*recorders, r)
		return r
	case 8, 9:
		return prepare.Stable
	case 10:
		return nil
	case 11:
		return int(kind)
	case 12:
		return []int16{1} // looks like a format, and is an argument
	case 13:
		return int32(3) // looks like a mode, and is an argument
	default:
		return pgx.NamedArgs(nil)
	}
}

func isOption(arg any) bool {
	switch arg.(type) {
	case pgx.QueryResultFormats, pgx.QueryResultFormatsByOID, pgx.QueryExecMode, pgx.QueryRewriter:
		return true
	}
	return false
}

// FuzzOptions compares the option scanner with pgx's own: a rewriter of the test's is called by pgx with what its scanner has left.
func FuzzOptions(f *testing.F) {
	f.Add([]byte{})
	for kind := range byte(15) {
		f.Add([]byte{kind})
		f.Add([]byte{kind, 11})
		f.Add([]byte{8, kind, 11, 8})
		f.Add([]byte{6, kind, 7, 11})
		f.Add([]byte{kind, 6, 12, kind})
	}
	f.Add([]byte{3, 4, 5, 0, 1, 2, 2, 6, 8, 14, 7, 9, 11, 3})
	b := pgscript.New(f, pgscript.Options{})
	conn, err := pgx.ConnectConfig(context.Background(), b.ConnConfig(f))
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, kinds []byte) {
		if len(kinds) > 100 {
			return
		}
		var recorders []*recorder
		var args, plain []any
		var want executor.Options
		leading := true
		for _, kind := range kinds {
			arg := argument(kind, &recorders)
			args = append(args, arg)
			// Stable is an option to the executor in the way that it is none to pgx: it keeps no rewriter from its work.
			leading = leading && isOption(arg)
			if !leading || arg != any(prepare.Stable) {
				plain = append(plain, arg)
			}
			if !leading {
				continue
			}
			switch arg := arg.(type) {
			case pgx.QueryResultFormats:
				want.Formats.Positions = arg
			case pgx.QueryResultFormatsByOID:
				want.Formats.ByOID = arg
			case pgx.QueryExecMode:
				want.Mode = arg
			case pgx.QueryRewriter:
				if arg == any(prepare.Stable) {
					want.Marked = true
				} else {
					want.Rewriter = arg
				}
			}
		}
		given := slices.Clone(args)
		got := executor.ReadOptions(args)
		if !reflect.DeepEqual(args, given) {
			t.Errorf("it changed the caller's slice: %v, %v", args, given)
		}
		if got.Marked != want.Marked || got.Mode != want.Mode || !same(got.Rewriter, want.Rewriter) || !reflect.DeepEqual(got.Formats, want.Formats) {
			t.Errorf("%v: got %+v, want %+v", args, got, want)
		}
		// What pgx is given again reads the same there, but for the rewriter, which has run.
		again := executor.ReadOptions(got.PgxArgs)
		if again.Mode != got.Mode || !reflect.DeepEqual(again.Formats, got.Formats) || len(again.Args) > len(got.Args) {
			t.Errorf("%v became %v", args, got.PgxArgs)
		}
		r, ok := got.Rewriter.(*recorder)
		if !ok {
			return
		}
		rows, err := conn.Query(context.Background(), "select 1", plain...)
		rows.Close()
		if !errors.Is(err, errRecorded) {
			t.Fatalf("%v: pgx says %v", plain, err)
		}
		for _, other := range recorders {
			if other.called != (other == r) {
				t.Errorf("%v: pgx took another rewriter", args)
			}
		}
		if len(r.args) != len(got.Args) || len(r.args) > 0 && !reflect.DeepEqual(r.args, got.Args) {
			t.Errorf("%v: pgx leaves %v, the executor %v", args, r.args, got.Args)
		}
	})
}

// same compares two rewriters, of which some are maps.
func same(a, b pgx.QueryRewriter) bool {
	ra, isRecorder := a.(*recorder)
	rb, _ := b.(*recorder)
	if isRecorder {
		return ra == rb
	}
	return reflect.DeepEqual(a, b)
}
