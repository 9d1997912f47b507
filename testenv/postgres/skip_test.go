package postgres_test

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/bounceproof/bounceproof/testenv/postgres"
)

// recorder is a TB that notes how a test ended.
type recorder struct {
	skipped, failed string
}

func (*recorder) Helper()                     {}
func (*recorder) Name() string                { return "TestRecorded" }
func (*recorder) Logf(string, ...any)         {}
func (r *recorder) Failed() bool              { return r.failed != "" }
func (*recorder) Cleanup(func())              {}
func (r *recorder) Skipf(f string, a ...any)  { r.skipped = fmt.Sprintf(f, a...); runtime.Goexit() }
func (r *recorder) Fatalf(f string, a ...any) { r.failed = fmt.Sprintf(f, a...); runtime.Goexit() }

// end returns how a test that starts a server of a version ends.
func end(version string) *recorder {
	r := new(recorder)
	done := make(chan struct{})
	go func() {
		defer close(done)
		postgres.Start(r, postgres.Options{Version: version})
	}()
	<-done
	return r
}

// No Debian suite brings it, and nobody has it installed.
const nowhere = "8"

func TestAMissingVersionIsSkippedLoudly(t *testing.T) {
	skips := filepath.Join(t.TempDir(), "skips")
	t.Setenv("TESTENV_SKIPS", skips)
	t.Setenv("TESTENV_REQUIRE", "")
	r := end(nowhere)
	for _, part := range []string{"PostgreSQL 8 is not available here", "; run: "} {
		if !strings.Contains(r.skipped, part) {
			t.Errorf("the skip %q does not say %q", r.skipped, part)
		}
	}
	if r.failed != "" {
		t.Errorf("failed: %s", r.failed)
	}
	recorded, err := os.ReadFile(skips)
	if err != nil || !strings.HasPrefix(string(recorded), "TestRecorded: PostgreSQL 8 is not available") {
		t.Errorf("recorded: %q, %v", recorded, err)
	}
	if err := postgres.Available(nowhere); err == nil {
		t.Error("available")
	}
}

func TestRequireAllTurnsASkipIntoAFailure(t *testing.T) {
	t.Setenv("TESTENV_REQUIRE", "all")
	r := end(nowhere)
	if r.skipped != "" || !strings.Contains(r.failed, "PostgreSQL 8 is not available here") {
		t.Errorf("skipped %q, failed %q", r.skipped, r.failed)
	}
}
