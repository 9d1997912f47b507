package pgxinternals

import (
	"reflect"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgproto3"
)

func TestThisPgxIsAsAssumed(t *testing.T) {
	t.Parallel()
	if err := Check(); err != nil {
		t.Error(err)
	}
}

// Types as a later pgx may have them.
type (
	tracer             struct{ W int }
	largeObjectsOfMore struct {
		tx     pgx.Tx
		closed bool
	}
	largeObjectsOfOther    struct{ conn *pgx.Conn }
	batchWithout           struct{ begins *pgx.TxOptions }
	batchOfValue           struct{ txOptions pgx.TxOptions }
	frontendWithout        struct{ hooks []func() }
	frontendWithInterface  struct{ tracer any }
	frontendOfOtherTracers struct{ tracer *tracer }
)

func TestAnotherPgxIsNamed(t *testing.T) {
	t.Parallel()
	_ = []any{
		largeObjectsOfMore{nil, true}.closed, largeObjectsOfMore{}.tx, largeObjectsOfOther{}.conn, batchWithout{}.begins, batchOfValue{}.txOptions,
		frontendWithout{}.hooks, frontendWithInterface{}.tracer, frontendOfOtherTracers{}.tracer,
	}
	now := assumed{reflect.TypeFor[pgx.LargeObjects](), reflect.TypeFor[pgx.Batch](), reflect.TypeFor[pgproto3.Frontend]()}
	for _, other := range []reflect.Type{reflect.TypeFor[largeObjectsOfMore](), reflect.TypeFor[largeObjectsOfOther]()} {
		types := now
		types.largeObjects = other
		isNamed(t, check(types), other)
	}
	for _, other := range []reflect.Type{reflect.TypeFor[batchWithout](), reflect.TypeFor[batchOfValue]()} {
		types := now
		types.batch = other
		isNamed(t, check(types), other)
	}
	for _, other := range []reflect.Type{
		reflect.TypeFor[frontendWithout](), reflect.TypeFor[frontendWithInterface](),
	} {
		types := now
		types.frontend = other
		isNamed(t, check(types), other)
	}
	types := now
	types.frontend = reflect.TypeFor[frontendOfOtherTracers]()
	isNamed(t, check(types), reflect.TypeFor[tracer]())
}

func isNamed(t *testing.T, err error, other reflect.Type) {
	t.Helper()
	if err == nil {
		t.Errorf("%v is taken", other)
		return
	}
	for _, want := range []string{other.Name(), "pgx v5", "use pgx v5.13"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q does not say %q", err, want)
		}
	}
}
