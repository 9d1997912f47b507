package await_test

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/bounceproof/bounceproof/internal/await"
)

// fake is a test that fails without ending the real one.
type fake struct {
	testing.TB
	failure string
}

func (*fake) Helper() {}

func (f *fake) Fatalf(format string, args ...any) {
	f.failure = fmt.Sprintf(format, args...)
	panic(f)
}

func TestTrueWaitsAndGivesUp(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		await.True(t, "ten seconds", func() bool { return time.Since(start) >= 10*time.Second })
		if took := time.Since(start); took < 10*time.Second || took > 11*time.Second {
			t.Errorf("it took %v", took)
		}
		f := &fake{}
		func() {
			defer func() { _ = recover() }()
			await.True(f, "the impossible", func() bool { return false })
		}()
		if f.failure != "not within 30s: the impossible" {
			t.Errorf("failure %q", f.failure)
		}
	})
}
