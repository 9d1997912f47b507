package executor_test

import (
	"context"
	"runtime"
	"testing"
	"time"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/internal/pgscript"
	"github.com/bounceproof/bounceproof/prepare"
)

// A server that announces a description or an error of 1 GiB while a statement is learnt gets no memory for it. Not parallel: it counts what the
// process allocates.
func TestLearningTakesNoMessageOfAGigabyte(t *testing.T) {
	for n, typ := range map[int]byte{1: '1', 2: 't', 3: 'T', 4: 'E'} {
		s, end := newScripted(t, pgscript.Options{}, executor.Config{PreparedStatements: executor.On})
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		trigger := s.b.Replace(min(n, 3), pgscript.Octets{typ, 0x3f, 0xff, 0xff, 0xff, 0, 0})
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		var got int
		err := s.ex.QueryRow(ctx, "select $1", prepare.Stable, 1).Scan(&got)
		runtime.ReadMemStats(&after)
		if taken := after.TotalAlloc - before.TotalAlloc; err == nil || !trigger.Fired() || ctx.Err() != nil || taken > 64<<20 {
			t.Errorf("%q: error %v after %d bytes", typ, err, taken)
		}
		cancel()
		end()
	}
}
