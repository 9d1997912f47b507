package bounceproof_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const logPrefix = "bounceproof: "

// TestLogMessagesBeginAlike checks what no linter does: that the messages of the library are constant and begin with its name.
func TestLogMessagesBeginAlike(t *testing.T) {
	t.Parallel()
	root := os.DirFS(".")
	found := map[string]int{}
	for _, dir := range append(slices.Collect(maps.Keys(layers)), "internal") {
		err := fs.WalkDir(root, dir, func(name string, _ fs.DirEntry, err error) error {
			if err != nil || path.Ext(name) != ".go" || strings.HasSuffix(name, "_test.go") {
				return err
			}
			source, err := fs.ReadFile(root, name)
			if err != nil {
				return err
			}
			messages, wrong := logMessages(t, name, string(source))
			for _, w := range wrong {
				t.Error(w)
			}
			found[dir] += len(messages)
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	// The control: there was something to check where something is logged.
	for _, dir := range []string{"executor", "notify", "outbox"} {
		if found[dir] == 0 {
			t.Errorf("no log message was found in %s", dir)
		}
	}
}

// TestLogMessageCheckFindsWrongOnes is the control of the check itself.
func TestLogMessageCheckFindsWrongOnes(t *testing.T) {
	t.Parallel()
	messages, wrong := logMessages(t, "x.go", `package x

func f(err error) {
	_ = err.Error()
	log.Warn("bounceproof: right", slog.Int("n", 1))
	log.LogAttrs(ctx, level, "outbox: other prefix", slog.Int("n", 1))
	log.Info("bounceproof: " + what, slog.Int("n", 1))
	msg := "bounceproof: right, too"
	if err != nil {
		msg = "wrong in one branch"
	}
	log.LogAttrs(ctx, level, msg)
	log.WarnContext(ctx, unknown)
}
`)
	if diff := cmp.Diff([]string{"bounceproof: right", "outbox: other prefix", "bounceproof: right, too", "wrong in one branch"}, messages); diff != "" {
		t.Errorf("messages (-want +got):\n%s", diff)
	}
	want := []string{
		`x.go:6: the log message "outbox: other prefix" does not begin with "bounceproof: "`,
		"x.go:7: the log message is no constant",
		`x.go:12: the log message "wrong in one branch" does not begin with "bounceproof: "`,
		"x.go:13: the log message is no constant",
	}
	if diff := cmp.Diff(want, wrong); diff != "" {
		t.Errorf("findings (-want +got):\n%s", diff)
	}
}

// messageArgument says which argument of a logger's method is the message.
var messageArgument = map[string]int{
	"Debug": 0, "Info": 0, "Warn": 0, "Error": 0,
	"DebugContext": 1, "InfoContext": 1, "WarnContext": 1, "ErrorContext": 1, "Log": 2, "LogAttrs": 2,
}

// logMessages returns the log messages of a source file, and what is wrong with them. A variable has the messages that its function
// assigns to it.
func logMessages(t *testing.T, name, source string) (messages, wrong []string) {
	t.Helper()
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, name, source, 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, decl := range file.Decls {
		ast.Inspect(decl, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok {
				return true
			}
			method, ok := call.Fun.(*ast.SelectorExpr)
			if !ok {
				return true
			}
			i, logs := messageArgument[method.Sel.Name]
			if !logs || len(call.Args) <= i { // err.Error() is none
				return true
			}
			line := fmt.Sprintf("%s:%d: ", name, files.Position(call.Pos()).Line)
			texts := constants(decl, call.Args[i])
			if len(texts) == 0 {
				wrong = append(wrong, line+"the log message is no constant")
			}
			for _, text := range texts {
				if !strings.HasPrefix(text, logPrefix) {
					wrong = append(wrong, fmt.Sprintf("%sthe log message %q does not begin with %q", line, text, logPrefix))
				}
			}
			messages = append(messages, texts...)
			return true
		})
	}
	return messages, wrong
}

// constants returns the strings that an expression may be, none if that cannot be told.
func constants(function ast.Node, e ast.Expr) []string {
	switch e := e.(type) {
	case *ast.BasicLit:
		if text, err := strconv.Unquote(e.Value); err == nil && e.Kind == token.STRING {
			return []string{text}
		}
	case *ast.Ident:
		var texts []string
		ast.Inspect(function, func(n ast.Node) bool {
			assign, ok := n.(*ast.AssignStmt)
			if !ok || len(assign.Lhs) != len(assign.Rhs) {
				return true
			}
			for i, to := range assign.Lhs {
				lit, isLit := assign.Rhs[i].(*ast.BasicLit)
				if id, ok := to.(*ast.Ident); ok && isLit && id.Name == e.Name {
					texts = append(texts, constants(function, lit)...)
				}
			}
			return true
		})
		return slices.Compact(texts)
	}
	return nil
}
