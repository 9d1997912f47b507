package logrec_test

import (
	"errors"
	"log/slog"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/bounceproof/bounceproof/internal/logrec"
)

func TestLinesAreKeptByLevel(t *testing.T) {
	t.Parallel()
	var r logrec.Recorder
	log := r.Logger()
	log.Debug("quiet")
	log.Warn("it failed", slog.Any("error", errors.New("no route")), slog.Int("attempt", 2))
	log.With(slog.String("pool", "a")).WithGroup("g").With(slog.Int("x", 1)).Warn("twice", slog.Group("h", slog.Bool("y", true)), slog.Group("", slog.Int("z", 3)))
	want := []string{"it failed error=no route attempt=2", "twice pool=a g.x=1 g.h.y=true g.z=3"}
	if diff := cmp.Diff(want, r.At(slog.LevelWarn)); diff != "" {
		t.Error(diff)
	}
	if got := r.At(slog.LevelError); got != nil {
		t.Errorf("%q", got)
	}
	if got := r.All(); got != "DEBUG quiet\nWARN "+want[0]+"\nWARN "+want[1]+"\n" {
		t.Errorf("%q", got)
	}
	r.Reset()
	if got := r.All(); got != "" {
		t.Errorf("%q", got)
	}
}

func TestRecorderIsSafeForConcurrentUse(t *testing.T) {
	t.Parallel()
	var r logrec.Recorder
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 100 {
				r.Logger().With(slog.String("k", "v")).Info("hello")
				_ = r.All()
			}
		})
	}
	wg.Wait()
	if n := len(r.At(slog.LevelInfo)); n != 800 {
		t.Errorf("%d lines, want 800", n)
	}
}
