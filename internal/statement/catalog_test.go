package statement_test

import (
	"fmt"
	"sync"
	"testing"

	"github.com/bounceproof/bounceproof/internal/statement"
)

func TestCatalogThreshold(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		threshold int
		stableAt  int // use at which an unmarked text is stable; 0 is never
	}{{5, 5}, {1, 1}, {2, 2}, {-1, 0}} {
		c := statement.NewCatalog(test.threshold, "")
		var first *statement.Statement
		for use := 1; use <= 20; use++ {
			st := c.Lookup("select 1", false)
			if first == nil {
				first = st
			}
			if st != first {
				t.Fatalf("threshold %d: another statement at use %d", test.threshold, use)
			}
			if want := test.stableAt > 0 && use >= test.stableAt; st.Stable() != want {
				t.Errorf("threshold %d, use %d: stable is %t", test.threshold, use, st.Stable())
			}
		}
		if st := c.Lookup("select 2", true); !st.Stable() {
			t.Errorf("threshold %d: a marked text is not stable at its first use", test.threshold)
		}
		if st := c.Lookup("select 2", false); !st.Stable() {
			t.Errorf("threshold %d: a text that was marked once is not stable later", test.threshold)
		}
	}
}

// Generated SQL passes through, however much there is, and however interleaved.
func TestCatalogGeneratedSQLNeverEvictsStable(t *testing.T) {
	t.Parallel()
	c := statement.NewCatalog(5, "")
	kept := make([]*statement.Statement, 1000)
	for i := range kept {
		kept[i] = c.Lookup(fmt.Sprint("select ", i), true)
	}
	for i := range 20000 {
		for range 1 + i%4 { // never the fifth time
			c.Lookup(fmt.Sprint("select * from t where id in (", i, ")"), false)
		}
	}
	for i, st := range kept {
		if got := c.Lookup(fmt.Sprint("select ", i), false); got != st {
			t.Fatalf("stable statement %d was evicted", i)
		}
	}
	stable, fresh := c.Len()
	if stable != 1000 || fresh > 500 {
		t.Errorf("%d stable and %d fresh statements", stable, fresh)
	}
	// The bound holds for stable ones as well, and the least recently used goes.
	for i := range 100 {
		c.Lookup(fmt.Sprint("select 'more', ", i), true)
	}
	if stable, _ := c.Len(); stable != 1000 {
		t.Errorf("%d stable statements", stable)
	}
	if c.Lookup("select 999", false) != kept[999] {
		t.Error("the most recently used statement was evicted")
	}
	if c.Lookup("select 0", true) == kept[0] {
		t.Error("the least recently used statement was kept: the catalog is not bounded as it says")
	}
}

func TestCatalogConcurrently(t *testing.T) {
	t.Parallel()
	c := statement.NewCatalog(5, "")
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			for i := range 2000 {
				st := c.Lookup(fmt.Sprint("select ", i%50), g == 0)
				_, _ = st.Stable(), st.Description()
			}
		})
	}
	wg.Wait()
	if stable, fresh := c.Len(); stable != 50 || fresh != 0 {
		t.Errorf("%d stable and %d fresh statements", stable, fresh)
	}
}
