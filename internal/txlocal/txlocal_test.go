package txlocal_test

import (
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/internal/txlocal"
)

type key struct{}

// counted counts how its transactions ended.
type counted struct{ committed, rolledBack int }

func (c *counted) Committed(parent *txlocal.Values) { c.committed++; parent.Set("from child", true) }
func (c *counted) RolledBack()                      { c.rolledBack++ }

func TestValuesGoToTheParentOnCommitAndVanishOnRollback(t *testing.T) {
	t.Parallel()
	for _, committed := range []bool{false, true} {
		outer := txlocal.New(nil)
		inner := txlocal.New(outer)
		if inner.Parent() != outer || outer.Parent() != nil {
			t.Fatal("the parent is not the one that was given")
		}
		c := &counted{}
		inner.Set(key{}, 1)
		inner.Set("counted", c)
		if outer.Get(key{}) != nil || inner.Get(key{}) != 1 {
			t.Error("a value is not its transaction's alone while that is open")
		}
		inner.End(committed)
		if got := outer.Get(key{}); (got == 1) != committed {
			t.Errorf("committed %v: the parent has %v", committed, got)
		}
		if (c.committed == 1) != committed || (c.rolledBack == 1) == committed || (outer.Get("from child") != nil) != committed {
			t.Errorf("committed %v: the value was told %+v", committed, *c)
		}
		if outer.Get("counted") != nil {
			t.Error("a value that hands itself over was handed over as well")
		}
		if inner.End(committed); c.committed+c.rolledBack != 1 {
			t.Error("a second end tells the values again")
		}
	}
	var none *txlocal.Values
	none.End(true) // a transaction in which nothing was stored
}

type holder struct {
	pgx.Tx
	v *txlocal.Values
}

func (h holder) TxLocal() *txlocal.Values { return h.v }

type wrapper struct{ pgx.Tx }

func (w wrapper) Unwrap() pgx.Tx { return w.Tx }

type opaque struct{ pgx.Tx }

func TestOfFollowsWrappersThatCanBeUnwrapped(t *testing.T) {
	t.Parallel()
	v := txlocal.New(nil)
	h := holder{v: v}
	for what, c := range map[string]struct {
		tx   pgx.Tx
		want *txlocal.Values
	}{
		"itself": {h, v}, "one level": {wrapper{h}, v}, "two levels": {wrapper{wrapper{h}}, v},
		"without Unwrap": {opaque{h}, nil}, "nothing inside": {wrapper{nil}, nil}, "nil": {nil, nil},
	} {
		if got := txlocal.Of(c.tx); got != c.want {
			t.Errorf("%s: got %p, want %p", what, got, c.want)
		}
		if txlocal.Conn(c.tx) != nil {
			t.Errorf("%s: a connection from a transaction that has none to give", what)
		}
	}
}
