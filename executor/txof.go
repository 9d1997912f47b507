package executor

import (
	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/internal/txlocal"
)

// TxOf returns the transaction of an executor that tx is, or wraps: wrappers are followed from the outermost inwards as long as they have
// a method Unwrap() pgx.Tx. It reports false for any other pgx.Tx, and for nil. A wrapper that implements [Tx] itself is returned as it is; it
// should have Unwrap too, for what the outbox keeps with a transaction, such as the count of its keys, is found that way.
//
// Code that takes a pgx.Tx uses it to queue a statement, or to add a function for after the commit, where that is possible.
func TxOf(tx pgx.Tx) (Tx, bool) { return txlocal.Find[Tx](tx) }

// TxLocal returns the values that belong to the transaction. It is for the other packages of this module, by way of txlocal.Of.
func (t *tx) TxLocal() *txlocal.Values {
	if t.local == nil {
		t.local = txlocal.New(nil)
	}
	return t.local
}

// TxLocal returns the values that belong to the nested transaction, see the outermost transaction's.
func (sp *savepoint) TxLocal() *txlocal.Values {
	if sp.local == nil {
		sp.local = txlocal.New(sp.parent.TxLocal())
	}
	return sp.local
}

// TxConn returns the connection as it is, without sending BEGIN as Conn does; nil when the transaction has ended. It is for the other
// packages of this module, by way of txlocal.Conn: what they do with it must leave no state behind.
func (t *tx) TxConn() *pgx.Conn {
	if t.closed || t.s.gone() {
		return nil
	}
	return t.s.c.Conn()
}

// TxConn returns the outermost transaction's connection, see there.
func (sp *savepoint) TxConn() *pgx.Conn {
	if sp.done() {
		return nil
	}
	return sp.root.TxConn()
}

// TxOpening makes a text without arguments ride behind BEGIN, if nothing of the transaction has been sent. It is for the other packages of this
// module, by way of txlocal.Open.
func (t *tx) TxOpening(text string) { t.preamble.open(text) }
