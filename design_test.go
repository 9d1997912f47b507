package bounceproof_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// link is a Markdown link to a file of the repository, and what is named in backquotes right behind it.
var link = regexp.MustCompile("\\]\\(([^)#][^)]*)\\)(?:((?:[ ,]|and)*`[A-Za-z.]+`)*)")

var backquoted = regexp.MustCompile("`([A-Za-z.]+)`")

// TestDesignIsOfThisCode keeps DESIGN.md to the code it speaks of: every file it links to exists, what it names behind a link is declared there, and
// the file map has every file of the library.
func TestDesignIsOfThisCode(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("DESIGN.md")
	if err != nil {
		t.Fatal(err)
	}
	design := string(text)
	for _, problem := range wrongLinks(design) {
		t.Error(problem)
	}
	for _, file := range libraryFiles(t) {
		if !strings.Contains(design, "["+path.Base(file)+"]("+file+")") {
			t.Errorf("the file map of DESIGN.md does not have %s", file)
		}
	}
}

// TestDesignCheckFindsWhatIsGone is the control.
func TestDesignCheckFindsWhatIsGone(t *testing.T) {
	t.Parallel()
	for text, wrong := range map[string]int{
		"[x](executor/retry.go) `decideRetry`":               0,
		"[x](executor/retry.go) `decideRetry`, `run`":        0,
		"[x](executor/retry.go) `task`":                      0,
		"[x](internal/sqltext) `Of`":                         0,
		"[x](executor/retry.go) `decideRetry`, `neverWas`":   1,
		"[x](executor/gone.go) `decideRetry`":                1,
		"[x](internal/sqltext) `Off`":                        1,
		"[x](#layers), [y](https://example.com/z) `Nothing`": 0,
	} {
		if got := wrongLinks(text); len(got) != wrong {
			t.Errorf("%q: %q", text, got)
		}
	}
}

func wrongLinks(text string) (problems []string) {
	for _, m := range link.FindAllStringSubmatch(text, -1) {
		target := m[1]
		if strings.Contains(target, "://") || strings.HasPrefix(target, "#") {
			continue
		}
		info, err := os.Stat(target)
		if err != nil {
			problems = append(problems, "there is no "+target)
			continue
		}
		if !info.IsDir() && path.Ext(target) != ".go" {
			continue
		}
		names := declared(target, info.IsDir())
		for _, name := range backquoted.FindAllStringSubmatch(m[0], -1) {
			last := name[1][strings.LastIndexByte(name[1], '.')+1:]
			if !slices.Contains(names, last) {
				problems = append(problems, target+" declares no "+name[1])
			}
		}
	}
	return problems
}

// declared returns the names of the functions, methods, types, variables and constants of a file, or of all files of a folder.
func declared(target string, folder bool) (names []string) {
	files := []string{target}
	if folder {
		files = nil
		entries, _ := os.ReadDir(target)
		for _, e := range entries {
			if path.Ext(e.Name()) == ".go" {
				files = append(files, path.Join(target, e.Name()))
			}
		}
	}
	for _, file := range files {
		f, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
		if err != nil {
			continue
		}
		ast.Inspect(f, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.FuncDecl:
				names = append(names, n.Name.Name)
			case *ast.TypeSpec:
				names = append(names, n.Name.Name)
			case *ast.ValueSpec:
				for _, id := range n.Names {
					names = append(names, id.Name)
				}
			}
			return true
		})
	}
	return names
}

// libraryFiles returns the files of the library packages, without tests.
func libraryFiles(t *testing.T) (files []string) {
	t.Helper()
	for layer := range layers {
		err := fs.WalkDir(os.DirFS("."), layer, func(name string, e fs.DirEntry, err error) error {
			if err == nil && !e.IsDir() && path.Ext(name) == ".go" && !strings.HasSuffix(name, "_test.go") && e.Name() != "doc.go" {
				files = append(files, name)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	slices.Sort(files)
	return slices.Compact(files)
}
