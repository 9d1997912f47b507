// Package pgxinternals is the one place that reaches into pgx, for what pgx does not give away and nothing else can do. [Check] says whether the
// pgx that a program is built with still looks as this package assumes; an executor asks before it does anything.
package pgxinternals

import (
	"reflect"
	"unsafe"

	"github.com/jackc/pgx/v5"
)

// LargeObjects makes pgx's large objects for a transaction that is not pgx's own. pgx makes them for its own transactions only, and those would
// run their statements in the pool's mode: by names of pgx's, which a pooler that forwards them loses. A LargeObjects holds its transaction and
// nothing else (pgx, large_objects.go).
func LargeObjects(tx pgx.Tx) (objects pgx.LargeObjects) {
	*(*pgx.Tx)(unsafe.Pointer(&objects)) = tx
	return objects
}

// Writing a pgx.Tx into a LargeObjects that is smaller would be a write past its end: then this does not compile.
var _ = [1]struct{}{}[unsafe.Sizeof(pgx.LargeObjects{})-unsafe.Sizeof(pgx.Tx(nil))]

// BatchTxOptions returns the options that Batch.BeginTx was called with, and whether it was called. pgx keeps them to itself (batch.go), and
// reading them is the only way to honour the call. Of the options that begin the transaction only the text is left, which is the batch's first
// item.
func BatchTxOptions(b *pgx.Batch) (opts pgx.TxOptions, begins bool) {
	f := reflect.ValueOf(b).Elem().FieldByName(batchOptions)
	if f.IsNil() {
		return opts, false
	}
	opts.BeginQuery = b.QueuedQueries[0].SQL
	opts.CommitQuery = f.Elem().FieldByName("CommitQuery").String()
	return opts, true
}

// batchOptions is the field of pgx.Batch that holds a *pgx.TxOptions.
const batchOptions = "txOptions"
