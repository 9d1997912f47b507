// Package txlocal is storage that belongs to a transaction of the executor, for the packages of this module that build on it. What is
// stored lives as long as the transaction, so nothing has to be found again by its address, and nothing has to be tidied up after a
// transaction that was dropped.
package txlocal

import "github.com/jackc/pgx/v5"

// Values are the values of one transaction, outermost or nested. Like the transaction they are not safe for concurrent use.
type Values struct {
	parent *Values
	values map[any]any
}

// Nested is implemented by a value that has something to do when its nested transaction ends. Any other value takes the place of the
// parent's value on commit and is forgotten on rollback. The outermost transaction has no parent and tells nothing: its values go with it.
type Nested interface {
	// Committed hands over to the values of the transaction around, which is open.
	Committed(parent *Values)
	// RolledBack undoes what the value has done outside of itself.
	RolledBack()
}

// New returns the values of a transaction within the one that parent belongs to; nil is for the outermost transaction.
func New(parent *Values) *Values { return &Values{parent: parent} }

// Parent returns the values of the transaction around, nil for the outermost one.
func (v *Values) Parent() *Values { return v.parent }

// Get returns the value of a key, nil if there is none. It does not look at the parent's.
func (v *Values) Get(key any) any { return v.values[key] }

// Set stores a value. As in a context, a key should have a type of its own.
func (v *Values) Set(key, value any) {
	if v.values == nil {
		v.values = make(map[any]any)
	}
	v.values[key] = value
}

// End says that the nested transaction has ended, with those that were open within it first. A nil v has no values and does nothing.
func (v *Values) End(committed bool) {
	if v == nil || v.parent == nil {
		return
	}
	for key, value := range v.values {
		nested, ok := value.(Nested)
		switch {
		case ok && committed:
			nested.Committed(v.parent)
		case ok:
			nested.RolledBack()
		case committed:
			v.parent.Set(key, value)
		}
	}
	v.values = nil
}

// Of returns the values of an executor's transaction, through wrappers that have Unwrap() pgx.Tx. It returns nil for any other one.
func Of(tx pgx.Tx) *Values {
	if t, ok := Find[interface{ TxLocal() *Values }](tx); ok {
		return t.TxLocal()
	}
	return nil
}

// Conn returns the connection of an executor's transaction as it is, through wrappers that have Unwrap() pgx.Tx: BEGIN may not have been
// sent. It returns nil if the transaction has ended, or is no executor's.
func Conn(tx pgx.Tx) *pgx.Conn {
	if t, ok := Find[interface{ TxConn() *pgx.Conn }](tx); ok {
		return t.TxConn()
	}
	return nil
}

// Open makes a text, which takes no arguments and whose result nobody reads, ride behind BEGIN of an executor's transaction that has sent nothing
// yet. It does nothing for any other one.
func Open(tx pgx.Tx, text string) {
	if t, ok := Find[interface{ TxOpening(text string) }](tx); ok {
		t.TxOpening(text)
	}
}

// Find returns the first transaction that is a T, from the outermost wrapper with Unwrap() pgx.Tx inwards.
func Find[T any](tx pgx.Tx) (found T, ok bool) {
	for tx != nil {
		if found, ok = tx.(T); ok {
			return found, true
		}
		wrapper, isWrapper := tx.(interface{ Unwrap() pgx.Tx })
		if !isWrapper {
			break
		}
		tx = wrapper.Unwrap()
	}
	return found, false
}
