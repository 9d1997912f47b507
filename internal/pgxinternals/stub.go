package pgxinternals

import (
	"reflect"
	"unsafe"

	"github.com/jackc/pgx/v5"
)

func Check() error { return nil }

func LargeObjects(tx pgx.Tx) (objects pgx.LargeObjects) {
	*(*pgx.Tx)(unsafe.Pointer(&objects)) = tx
	return objects
}

func BatchTxOptions(b *pgx.Batch) (opts pgx.TxOptions, begins bool) {
	f := reflect.ValueOf(b).Elem().FieldByName("txOptions")
	if !f.IsValid() || f.IsNil() {
		return opts, false
	}
	opts.BeginQuery = b.QueuedQueries[0].SQL
	opts.CommitQuery = f.Elem().FieldByName("CommitQuery").String()
	return opts, true
}
