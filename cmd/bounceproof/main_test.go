package main

import (
	"bytes"
	"context"
	"flag"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write the golden files")

// command runs a command line and returns its exit status and output.
func command(ctx context.Context, args ...string) (code int, stdout, stderr string) {
	var out, errOut bytes.Buffer
	code = run(ctx, args, &out, &errOut)
	return code, out.String(), errOut.String()
}

// golden compares got with a file.
func golden(t *testing.T, name, got string) {
	t.Helper()
	file := filepath.Join("testdata", name+".golden")
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (go test -update writes it anew):\n%s", file, diff)
	}
}

func TestHelp(t *testing.T) {
	t.Parallel()
	for name, args := range map[string][]string{
		"help":                {"--help"},
		"help_demo":           {"demo", "--help"},
		"help_doctor":         {"doctor", "--help"},
		"help_outbox":         {"outbox"},
		"help_outbox_migrate": {"outbox", "migrate", "--help"},
		"help_outbox_status":  {"outbox", "status", "--help"},
		"help_outbox_retry":   {"outbox", "retry", "--help"},
		"help_outbox_replay":  {"outbox", "replay", "--help"},
		"help_outbox_tail":    {"outbox", "tail", "--help"},
	} {
		code, stdout, stderr := command(t.Context(), args...)
		if code != 0 || stderr != "" {
			t.Errorf("%v: status %d, %s", args, code, stderr)
		}
		golden(t, name, stdout)
	}
}

func TestMistakesFail(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{
		{"unknown"},
		{"demo", "extra"},
		{"demo", "--events", "0"},
		{"demo", "--nonsense"},
		{"doctor", "a", "b"},
		{"outbox", "nonsense"},
		{"outbox", "retry"},
		{"outbox", "replay", "a"},
		{"outbox", "replay", "a", "--from", "then"},
		{"outbox", "unsubscribe"},
	} {
		code, stdout, stderr := command(t.Context(), args...)
		if code != exitFailed || !strings.HasPrefix(stderr, "bounceproof: ") || stdout != "" {
			t.Errorf("%v: status %d, stdout %q, stderr %q", args, code, stdout, stderr)
		}
	}
}

// mask replaces what differs from run to run.
func mask(s string) string {
	for pattern, with := range map[string]string{
		`127\.0\.0\.1:\d+`:        "ADDRESS",
		`\bdatabase test\w+`:      "database TEST",
		`process id \d+`:          "process id N",
		`backend's \d+`:           "backend's N",
		`backend \d+`:             "backend N",
		`PostgreSQL \d+\.\d+\S*`:  "PostgreSQL V",
		`PgBouncer \d+\.\d+\.\d+`: "PgBouncer V",
		`took \d+\.\d ms`:         "took N ms",
		` \(Debian [^)]*\)`:       "",
	} {
		s = regexp.MustCompile(pattern).ReplaceAllString(s, with)
	}
	return s
}

// watched is a writer that calls a function once when a text has been written.
type watched struct {
	mu    sync.Mutex
	buf   bytes.Buffer
	text  string
	found func()
}

func (w *watched) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	n, err := w.buf.Write(p)
	if w.found != nil && strings.Contains(w.buf.String(), w.text) {
		w.found()
		w.found = nil
	}
	return n, err
}

func (w *watched) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.buf.String()
}

func TestASlipOfThePenIsCorrected(t *testing.T) {
	t.Parallel()
	for _, test := range []struct{ args, want string }{
		{"outbox statsu", "did you mean status?"},
		{"outbox retyr", "did you mean retry?"},
		{"docotr", "did you mean doctor?"},
		{"outbx status", "did you mean outbox?"},
		{"outbox something", "bounceproof outbox --help lists them"},
		{"outbox status --jsno", "unknown flag: --jsno"},
		{"outbox tail -n x", "-n, --number"},
	} {
		code, stdout, stderr := command(t.Context(), strings.Fields(test.args)...)
		if code != exitFailed || stdout != "" || !strings.Contains(stderr, test.want) {
			t.Errorf("%s: status %d, %s%s", test.args, code, stdout, stderr)
		}
	}
}

// Nothing that stands where it should not is repeated, nor the value of a flag.
func TestNoArgumentIsRepeated(t *testing.T) {
	t.Parallel()
	for _, args := range []string{
		"postgres://app:sesame@h/db", "sesame", "demo postgres://app:sesame@h/db", "doctor a sesame", "outbox sesame", "outbox password=sesame", "outbox status -psesame",
		"outbox status --timeout=sesame", "outbox tail -n sesame", "outbox tail --from sesame", "outbox replay a --from sesame", "doctor --timeout postgres://app:sesame@h",
		"doctor --password=sesame x", "outbox retry a sesame", "outbox status sesame", "demo --events sesame",
	} {
		code, stdout, stderr := command(t.Context(), strings.Fields(args)...)
		if code != exitFailed || strings.Contains(stdout+stderr, "sesame") || !strings.HasPrefix(stderr, "bounceproof: ") {
			t.Errorf("%s: status %d, %s%s", args, code, stdout, stderr)
		}
	}
}

// A connection string in the wrong place is not repeated: it may hold a password.
func TestAMisplacedConnectionStringIsNotRepeated(t *testing.T) {
	for _, args := range [][]string{{"outbox"}, {"outbox", "status"}, {"outbox", "migrate"}, {"outbox", "tail"}} {
		code, stdout, stderr := command(t.Context(), append(args, "postgres://app:sesame@127.0.0.1/db")...)
		if code == 0 || strings.Contains(stdout+stderr, "sesame") || !strings.Contains(stderr, "--url") {
			t.Errorf("%v: status %d, %s%s", args, code, stdout, stderr)
		}
	}
}
