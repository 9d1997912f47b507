package statement_test

import (
	"strings"
	"sync"
	"testing"

	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/internal/pgscript"
	"github.com/bounceproof/bounceproof/internal/statement"
	"github.com/bounceproof/bounceproof/prepare"
)

func TestGenerations(t *testing.T) {
	t.Parallel()
	w := newWire(t, pgscript.Options{}, 10)
	st := w.k.Lookup(selectArg, true)
	first := w.learn(selectArg)
	if first.SQL() != selectArg || st.Description() != first {
		t.Fatal(first.SQL())
	}
	st.NextGeneration(first)
	if st.Description() != nil {
		t.Fatal("the description of a plan that failed stays")
	}
	second := w.learn(selectArg)
	if want := selectArg + " /* bp:2 */"; second.SQL() != want || second.Name() != prepare.Name(want, []uint32{23}, "") || st.SQL() != selectArg {
		t.Errorf("%s, %s, %s", second.SQL(), second.Name(), st.SQL())
	}
	if got, err := w.run(t.Context(), statement.Execution{Description: second, Strategy: fallback.Named, Args: []any{5}}); got != "5" || err != nil {
		t.Error(got, err)
	}
	// Whoever failed with the first one, and comes late, moves nothing.
	st.NextGeneration(first)
	st.Forget(first)
	if st.Description() != second {
		t.Error("a late failure threw away what had been learnt since")
	}
	// Of many that failed with the same one, one moves it.
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() { st.NextGeneration(second) })
	}
	wg.Wait()
	if third := w.learn(selectArg); !strings.HasSuffix(third.SQL(), " /* bp:3 */") {
		t.Error(third.SQL())
	}
	// Forgetting is no new generation.
	st.Forget(st.Description())
	if again := w.learn(selectArg); !strings.HasSuffix(again.SQL(), " /* bp:3 */") {
		t.Error(again.SQL())
	}
}

// The salt of a catalog goes into every name, and into nothing else.
func TestSalt(t *testing.T) {
	t.Parallel()
	w := newWire(t, pgscript.Options{}, 10)
	plain := w.learn(selectArg)
	w.k = statement.NewCatalog(1, "salt")
	salted := w.learn(selectArg)
	if salted.Name() == plain.Name() || salted.Name() != prepare.Name(selectArg, []uint32{23}, "salt") || salted.SQL() != plain.SQL() {
		t.Error(plain.Name(), salted.Name(), salted.SQL())
	}
}
