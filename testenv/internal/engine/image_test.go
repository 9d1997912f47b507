//go:build linux

package engine_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/bounceproof/bounceproof/testenv/internal/engine"
	"github.com/bounceproof/bounceproof/testenv/internal/suite"
)

const childEnv = "BOUNCEPROOF_TEST_BUILD"

// noSuite is in no registry and on no mirror.
var noSuite = suite.Suite{Name: "nosuchsuite", Postgres: "1", PgBouncer: "0.1"}

// TestMain turns the test binary into one of the processes that want the same image.
func TestMain(m *testing.M) {
	if os.Getenv(childEnv) == "" {
		os.Exit(m.Run())
	}
	e, err := engine.Connect()
	if err != nil {
		panic(err)
	}
	if _, err := e.Ensure(context.Background(), noSuite); err != nil {
		_, _ = os.Stdout.WriteString(err.Error())
	}
	os.Exit(0)
}

// A build that fails is the one that can be tried again and again; that a successful one is done once follows from the
// same lock.
func TestProcessesThatWantTheSameImageBuildItOnce(t *testing.T) {
	t.Parallel()
	if _, err := engine.Connect(); err != nil {
		if os.Getenv("TESTENV_REQUIRE") == "all" {
			t.Fatal(err)
		}
		t.Skip(err)
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	tried := filepath.Join(dir, "tried")
	// In place of the real one, it says that it ran, takes its time, and fails.
	script := "#!/bin/sh\necho run >>'" + tried + "'\nsleep 1\necho 'E: no such suite' >&2\nexit 1\n"
	if err := os.WriteFile(filepath.Join(dir, "mmdebstrap"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	child := func() string {
		cmd := exec.CommandContext(t.Context(), exe)
		cmd.Env = append(os.Environ(), childEnv+"=1", "PATH="+dir+":"+os.Getenv("PATH"),
			"XDG_CACHE_HOME="+dir, "TESTENV_DEBIAN_MIRROR=http://127.0.0.1:1/debian")
		out, err := cmd.Output()
		if err != nil {
			t.Error(err)
		}
		return string(out)
	}
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			said := child()
			for _, part := range []string{"no such suite", "http://127.0.0.1:1/debian", "TESTENV_DEBIAN_MIRROR"} {
				if !strings.Contains(said, part) {
					t.Errorf("the error %q does not say %q", said, part)
				}
			}
		})
	}
	wg.Wait()
	if n := runs(t, tried); n != 1 {
		t.Errorf("three processes tried %d times", n)
	}
	// The failure is remembered for a while and then not any more.
	failed, err := filepath.Glob(filepath.Join(dir, "bounceproof-testenv", "*.failed"))
	if err != nil || len(failed) != 1 {
		t.Fatalf("failures: %q, %v", failed, err)
	}
	longAgo := time.Now().Add(-time.Hour)
	if err := os.Chtimes(failed[0], longAgo, longAgo); err != nil {
		t.Fatal(err)
	}
	child()
	if n := runs(t, tried); n != 2 {
		t.Errorf("an hour later: %d tries in all, want 2", n)
	}
}

func runs(t *testing.T, file string) int {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return strings.Count(string(data), "run\n")
}
