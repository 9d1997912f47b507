package bounceproof_test

import (
	"encoding/json"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// requirements are what go.mod may require directly, and what for. The tests of a library package are part of the module that users
// require, so what only tests need is in their module graph too: with its versions, not with its code.
var requirements = map[string]string{
	"github.com/jackc/pgx/v5":            "the library",
	"github.com/jackc/puddle/v2":         "the library: the errors of pgxpool",
	"github.com/hashicorp/golang-lru/v2": "the library: bounded caches",
	"golang.org/x/sync":                  "the library",
	"github.com/google/go-cmp":           "tests",
	"go.uber.org/goleak":                 "tests",
	"pgregory.net/rapid":                 "tests",
	"github.com/ory/dockertest/v3":       "testenv",
	"github.com/spf13/cobra":             "cmd",
	"github.com/jedib0t/go-pretty/v6":    "cmd",
	"golang.org/x/term":                  "cmd",
}

// maxGraph is how many modules a program that uses the library may have in its module graph, itself aside. CONTRIBUTING.md says which.
const maxGraph = 56

func TestModulesOfAUser(t *testing.T) {
	t.Parallel()
	u := consumer(t, "executor", "outbox")
	graph, direct := u.graph(t), directRequirements(t, "go.mod")
	if diff := cmp.Diff(slices.Sorted(maps.Keys(requirements)), direct); diff != "" {
		t.Errorf("direct requirements of go.mod (-want +got):\n%s", diff)
	}
	if n := len(graph); n > maxGraph {
		t.Errorf("a user's module graph holds %d modules, at most %d are agreed on: %q", n, maxGraph, graph)
	}
	if diff := cmp.Diff(slices.Sorted(slices.Values(modules)), u.requires); diff != "" {
		t.Errorf("what the go command writes into the go.mod of a program that imports executor and outbox (-want +got):\n%s", diff)
	}
	// The control: what is counted is the graph of this very go.mod.
	for _, m := range direct {
		if !slices.Contains(graph, m) {
			t.Errorf("%s is required and not in a user's graph", m)
		}
	}
}

// TestModulesOfAUserAreFound is the control: the go.mod of a program that imports the test environment gets what that needs.
func TestModulesOfAUserAreFound(t *testing.T) {
	t.Parallel()
	if got := consumer(t, "testenv/postgres").requires; !slices.Contains(got, "github.com/ory/dockertest/v3") {
		t.Errorf("a program that imports testenv/postgres requires only %q", got)
	}
}

// user is a module that requires this one.
type user struct {
	dir      string
	requires []string // the modules in its go.mod, once the go command has completed it
}

// graph returns the paths of the modules in the user's module graph, without the user's own: those of go list -m all, which would also ask
// the network when each version was made.
func (u user) graph(t *testing.T) []string {
	t.Helper()
	seen := map[string]bool{}
	for node := range strings.FieldsSeq(goCommand(t, u.dir, "mod", "graph")) {
		path, _, versioned := strings.Cut(node, "@")
		if versioned && path != "go" && path != "toolchain" {
			seen[path] = true
		}
	}
	return slices.Sorted(maps.Keys(seen))
}

// consumer makes a module that imports packages of this one as it lies here. All versions and checksums are this module's own, so the
// network is not needed after go mod download, which brings the few go.mod files that a build does without.
func consumer(t *testing.T, packages ...string) user {
	t.Helper()
	root, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	var main strings.Builder
	main.WriteString("package main\n\n")
	for _, p := range packages {
		main.WriteString("import _ \"" + module + "/" + p + "\"\n")
	}
	main.WriteString("\nfunc main() {}\n")
	sums, err := os.ReadFile("go.sum")
	if err != nil {
		t.Fatal(err)
	}
	goVersion := parseGoMod(t, "go.mod").Go
	for name, text := range map[string]string{
		"main.go": main.String(),
		"go.sum":  string(sums),
		"go.mod": "module consumer\n\ngo " + goVersion + "\n\nrequire " + module + " v0.0.0\n\nreplace " + module + " => " +
			strconv.Quote(filepath.ToSlash(root)) + "\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	goCommand(t, dir, "list", "-deps", ".") // completes go.mod, as go get and go build do
	u := user{dir: dir}
	for _, r := range parseGoMod(t, filepath.Join(dir, "go.mod")).Require {
		u.requires = append(u.requires, r.Path)
	}
	slices.Sort(u.requires)
	return u
}

// goMod is a go.mod as go mod edit -json describes it.
type goMod struct {
	Go      string
	Require []struct {
		Path     string
		Indirect bool
	}
}

func parseGoMod(t *testing.T, name string) goMod {
	t.Helper()
	// go test caches a result until a file that the test has read changes. The go command is not seen, so read it here.
	if _, err := os.ReadFile(name); err != nil {
		t.Fatal(err)
	}
	var m goMod
	if err := json.Unmarshal([]byte(goCommand(t, ".", "mod", "edit", "-json", name)), &m); err != nil {
		t.Fatal(err)
	}
	return m
}

func directRequirements(t *testing.T, name string) []string {
	t.Helper()
	var direct []string
	for _, r := range parseGoMod(t, name).Require {
		if !r.Indirect {
			direct = append(direct, r.Path)
		}
	}
	slices.Sort(direct)
	return direct
}

func goCommand(t *testing.T, dir string, args ...string) string {
	t.Helper()
	c := exec.CommandContext(t.Context(), "go", args...)
	c.Dir = dir
	c.Env = append(c.Environ(), "GOFLAGS=-mod=mod", "GOWORK=off", "GOSUMDB=off") // what go.sum lacks is only read, not built
	var stderr strings.Builder
	c.Stderr = &stderr
	out, err := c.Output()
	if err != nil {
		t.Fatalf("go %s: %v\n%s", strings.Join(args, " "), err, stderr.String())
	}
	return string(out)
}
