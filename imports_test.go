package bounceproof_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const module = "github.com/bounceproof/bounceproof"

// layers says which packages of the module each package of the library may import, besides its own subpackages. Those under internal are part
// of the library too: they are in a user's binary. What is not here is no library package: commands, the test environment, and what only tests
// import.
var layers = map[string][]string{
	"internal/answer":       {},
	"internal/backoff":      {},
	"internal/connstring":   {},
	"internal/sqltext":      {},
	"internal/pgxinternals": {},
	"internal/txlocal":      {},
	"internal/startup":      {},
	"prepare":               {},
	"fallback":              {"internal/answer", "internal/pgxinternals"},
	"internal/statement":    {"internal/answer", "internal/sqltext", "internal/pgxinternals", "prepare", "fallback"},
	"internal/selector":     {"fallback"},
	"notify":                {"internal/backoff", "internal/connstring"},
	"executor": {
		"internal/answer", "internal/sqltext", "internal/pgxinternals", "internal/txlocal", "internal/startup", "internal/statement", "internal/selector",
		"prepare", "fallback", "notify",
	},
	"outbox": {"internal/backoff", "internal/txlocal", "prepare", "fallback", "notify", "executor"},
}

// modules are the only ones that may reach a user's binary through a library package.
var modules = []string{
	module,
	"github.com/jackc/pgx/v5",
	"github.com/jackc/puddle/v2",
	"github.com/jackc/pgpassfile",    // of pgx
	"github.com/jackc/pgservicefile", // of pgx
	"golang.org/x/text",              // of pgx
	"golang.org/x/sync",
	"github.com/hashicorp/golang-lru/v2",
}

// pkg is a package as go list describes it, without its tests.
type pkg struct {
	ImportPath string
	Imports    []string
	Standard   bool
	Module     struct{ Path string }
}

// graph holds packages by import path.
type graph map[string]pkg

func TestImportsPointOneWay(t *testing.T) {
	t.Parallel()
	g := load(t)
	for _, edge := range g.violations() {
		t.Error(edge)
	}
	// The control: what is checked is there.
	for name := range layers {
		if _, ok := g[module+"/"+name]; !ok {
			t.Errorf("there is no package %s: nothing about it is checked", name)
		}
	}
}

func load(t *testing.T) graph {
	t.Helper()
	// go test caches a result until a file that the test has read changes. go list is not seen, so read them here.
	err := fs.WalkDir(os.DirFS("."), ".", func(name string, _ fs.DirEntry, err error) error {
		if err == nil && path.Ext(name) == ".go" {
			_, err = os.ReadFile(name)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", "-json=ImportPath,Imports,Standard,Module", "./...").Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			t.Fatalf("go list: %v\n%s", err, exit.Stderr)
		}
		t.Fatal(err)
	}
	g := graph{}
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p pkg
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			return g
		} else if err != nil {
			t.Fatal(err)
		}
		g[p.ImportPath] = p
	}
}

// violations returns the wrong edges, each as a sentence that names it.
func (g graph) violations() []string {
	var wrong []string
	for from, p := range g {
		rel, ours := strings.CutPrefix(from, module+"/")
		if !ours {
			continue
		}
		for _, to := range p.Imports {
			if why := forbidden(rel, to); why != "" {
				wrong = append(wrong, fmt.Sprintf("%s imports %s: %s", rel, strings.TrimPrefix(to, module+"/"), why))
			}
		}
		if _, library := layers[layer(rel)]; library {
			wrong = append(wrong, g.strangers(from)...)
		}
	}
	slices.Sort(wrong)
	return slices.Compact(wrong)
}

// layer returns the beginning of a package's path in the module that names its layer: the first element, of internal packages two.
func layer(rel string) string {
	parts := strings.SplitN(rel, "/", 3)
	if parts[0] == "internal" && len(parts) > 1 {
		return parts[0] + "/" + parts[1]
	}
	return parts[0]
}

// forbidden says why a package of the module must not import another package, "" if it may.
func forbidden(from, to string) string {
	rel, ours := strings.CutPrefix(to, module+"/")
	allowed, library := layers[layer(from)]
	switch {
	case library && to == "testing":
		return "tests must not reach a user's binary"
	case !ours:
		return ""
	case layer(rel) == "cmd" && layer(from) != "cmd":
		return "commands are on top"
	case layer(rel) == layer(from) && layer(from) != "testenv":
		return ""
	case library && !slices.Contains(allowed, rel):
		return "it is not among the layers below"
	case !library && strings.HasPrefix(from, "internal/") && isLibrary(rel):
		return "what tests are written with knows nothing of what they test"
	case layer(from) == "testenv" && isLibrary(rel):
		return "the test environment knows nothing of what it tests"
	case from == "testenv/postgres" && rel == "testenv/pgbouncer":
		return "PgBouncer needs PostgreSQL, not the other way round"
	}
	return ""
}

func isLibrary(rel string) bool {
	_, ok := layers[layer(rel)]
	return ok
}

// strangers returns the edges through which a library package reaches a module it must not.
func (g graph) strangers(from string) []string {
	var wrong []string
	seen := map[string]bool{from: true}
	for queue := []string{from}; len(queue) > 0; queue = queue[1:] {
		at := queue[0]
		for _, to := range g[at].Imports {
			p, known := g[to]
			if seen[to] || !known || p.Standard {
				continue
			}
			seen[to] = true
			if !slices.Contains(modules, p.Module.Path) {
				wrong = append(wrong, fmt.Sprintf("%s reaches module %s: %s imports %s",
					strings.TrimPrefix(from, module+"/"), p.Module.Path, at, to))
				continue
			}
			queue = append(queue, to)
		}
	}
	return wrong
}

// TestImportCheckFindsWrongEdges is the control of the check itself: each wrong edge alone, and none among right ones.
func TestImportCheckFindsWrongEdges(t *testing.T) {
	t.Parallel()
	const dockertest = "github.com/ory/dockertest/v3"
	right := map[string][]string{
		"prepare":           {"github.com/jackc/pgx/v5", "fmt"},
		"executor":          {"prepare", "fallback", "notify", "internal/statement"},
		"internal/selector": {"fallback"},
		"outbox":            {"executor", "prepare", "internal/backoff"},
		"cmd/bounceproof":   {"executor", "outbox", "testenv/pgbouncer", "testing"},
		"testenv/pgbouncer": {"testenv/postgres"},
		"testenv/postgres":  {dockertest, "testenv/internal/sandbox"},
	}
	if got := synthetic(right).violations(); len(got) > 0 {
		t.Errorf("right edges are called wrong: %q", got)
	}
	const layersSay = ": it is not among the layers below"
	for _, tc := range []struct{ from, to, want string }{
		{"prepare", "fallback", "prepare imports fallback" + layersSay},
		{"notify", "executor", "notify imports executor" + layersSay},
		{"executor", "outbox", "executor imports outbox" + layersSay},
		{"executor/sub", "outbox", "executor/sub imports outbox" + layersSay},
		{"outbox", "testenv/postgres", "outbox imports testenv/postgres" + layersSay},
		{"executor", "internal/pgscript", "executor imports internal/pgscript" + layersSay},
		{"outbox", "cmd/bounceproof", "outbox imports cmd/bounceproof: commands are on top"},
		{"prepare", "testing", "prepare imports testing: tests must not reach a user's binary"},
		{"internal/backoff", "notify", "internal/backoff imports notify" + layersSay},
		{"fallback", "internal/selector", "fallback imports internal/selector" + layersSay},
		{"internal/pgscript", "executor", "internal/pgscript imports executor: what tests are written with knows nothing of what they test"},
		{"testenv/proxy", "prepare", "testenv/proxy imports prepare: the test environment knows nothing of what it tests"},
		{"testenv/postgres", "testenv/pgbouncer", "testenv/postgres imports testenv/pgbouncer: PgBouncer needs PostgreSQL, not the other way round"},
		{"fallback", dockertest, "fallback reaches module " + dockertest + ": " + module + "/fallback imports " + dockertest},
	} {
		edges := map[string][]string{tc.from: {tc.to}}
		got := synthetic(edges).violations()
		if diff := cmp.Diff([]string{tc.want}, got); diff != "" {
			t.Errorf("%s -> %s (-want +got):\n%s", tc.from, tc.to, diff)
		}
	}
	// A module that comes in through another package is found at the edge where it does.
	far := synthetic(map[string][]string{"outbox": {"executor"}, "executor": {"github.com/jackc/pgx/v5"}})
	p := far["github.com/jackc/pgx/v5"]
	p.Imports = []string{dockertest}
	far["github.com/jackc/pgx/v5"] = p
	far[dockertest] = pkg{ImportPath: dockertest, Module: struct{ Path string }{dockertest}}
	want := []string{
		"executor reaches module " + dockertest + ": github.com/jackc/pgx/v5 imports " + dockertest,
		"outbox reaches module " + dockertest + ": github.com/jackc/pgx/v5 imports " + dockertest,
	}
	if diff := cmp.Diff(want, far.violations()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// synthetic makes a graph from edges. Paths without a dot are of the module, if they are not of the standard library.
func synthetic(edges map[string][]string) graph {
	g := graph{}
	add := func(name string) string {
		p := pkg{ImportPath: name}
		switch {
		case strings.Contains(name, "."):
			p.Module.Path = name
		case name == "fmt" || name == "testing":
			p.Standard = true
		default:
			p.ImportPath = path.Join(module, name)
			p.Module.Path = module
		}
		if _, ok := g[p.ImportPath]; !ok {
			g[p.ImportPath] = p
		}
		return p.ImportPath
	}
	for from, tos := range edges {
		at := add(from)
		var imports []string
		for _, to := range tos {
			imports = append(imports, add(to))
		}
		p := g[at]
		p.Imports = imports
		g[at] = p
	}
	return g
}
