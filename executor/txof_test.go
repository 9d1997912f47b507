package executor_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/internal/txlocal"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

// unwrappable and opaque are wrappers as users write them.
type unwrappable struct{ pgx.Tx }

func (w unwrappable) Unwrap() pgx.Tx { return w.Tx }

type opaque struct{ pgx.Tx }

func TestTxOfFindsTheTransactionWithinWrappers(t *testing.T) {
	t.Parallel()
	db := postgres.Start(t, postgres.Options{}).NewDatabase(t)
	pool := newPool(t, db.URL)
	ex := newExecutor(t, pool, executor.Config{})
	outer, err := ex.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = outer.Rollback(context.WithoutCancel(t.Context())) }()
	nested, err := outer.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	foreign, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = foreign.Rollback(context.WithoutCancel(t.Context())) }()
	for what, c := range map[string]struct{ tx, want pgx.Tx }{
		"outermost":         {outer, outer},
		"nested":            {nested, nested},
		"one level":         {unwrappable{outer}, outer},
		"two levels":        {unwrappable{unwrappable{nested}}, nested},
		"without Unwrap":    {opaque{outer}, nil},
		"wrapped in opaque": {unwrappable{opaque{outer}}, nil},
		"pgx's":             {foreign, nil},
		"pgx's, wrapped":    {unwrappable{foreign}, nil},
		"nil":               {nil, nil},
	} {
		got, ok := executor.TxOf(c.tx)
		if ok != (c.want != nil) || ok && pgx.Tx(got) != c.want {
			t.Errorf("%s: got %v, %v", what, got, ok)
		}
	}
}

func TestEachNestedTransactionHasValuesOfItsOwn(t *testing.T) {
	t.Parallel()
	db := postgres.Start(t, postgres.Options{}).NewDatabase(t)
	ex := newExecutor(t, newPool(t, db.URL), executor.Config{})
	begin := func(in interface {
		Begin(ctx context.Context) (pgx.Tx, error)
	},
	) pgx.Tx {
		t.Helper()
		tx, err := in.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return tx
	}
	outer := begin(ex)
	defer func() { _ = outer.Rollback(context.WithoutCancel(t.Context())) }()
	a := begin(outer)
	b := begin(a)
	if v := txlocal.Of(b); v.Parent() != txlocal.Of(a) || v.Parent().Parent() != txlocal.Of(outer) || txlocal.Of(outer).Parent() != nil {
		t.Fatal("values are not nested as the transactions are")
	}
	txlocal.Of(b).Set("kept", 1)
	if err := b.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	c := begin(a)
	txlocal.Of(c).Set("lost", 1)
	if err := c.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	d := begin(a)
	txlocal.Of(d).Set("open within", 1)
	if err := a.Commit(t.Context()); err != nil { // and d with it, as RELEASE does
		t.Fatal(err)
	}
	v := txlocal.Of(outer)
	if v.Get("kept") == nil || v.Get("lost") != nil || v.Get("open within") == nil {
		t.Errorf("kept %v, lost %v, open within %v", v.Get("kept"), v.Get("lost"), v.Get("open within"))
	}
	if txlocal.Conn(outer) == nil || txlocal.Conn(d) != nil {
		t.Error("an open transaction has a connection, and one that has ended has none")
	}
}
