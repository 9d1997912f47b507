package bounceproof_test

import (
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var (
	namedTest    = regexp.MustCompile("`((?:Test|Fuzz)[A-Za-z0-9]+)`")
	declaredTest = regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)[A-Za-z0-9]+)\(`)
)

// Every test that docs/security.md names for a promise exists.
func TestPromisesOfSecurityHaveTheirTests(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("docs/security.md")
	if err != nil {
		t.Fatal(err)
	}
	declared := map[string]bool{}
	err = fs.WalkDir(os.DirFS("."), ".", func(name string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(name, "_test.go") {
			return err
		}
		source, err := os.ReadFile(name)
		for _, m := range declaredTest.FindAllSubmatch(source, -1) {
			declared[string(m[1])] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	names := namedTest.FindAllSubmatch(text, -1)
	for _, m := range names {
		if !declared[string(m[1])] {
			t.Errorf("docs/security.md names %s, which does not exist", m[1])
		}
	}
	if len(names) < 8 || declared["TestThatIsNotThere"] { // the control
		t.Errorf("%d tests are named", len(names))
	}
}

// licences are the kinds that what is built into a binary may have, by words that only their texts have. The first that is found counts.
var licences = []struct{ kind, words string }{
	{"Apache-2.0", "Apache License Version 2.0"},
	{"MPL-2.0", "Mozilla Public License, version 2.0"},
	{"MPL-2.0", "Mozilla Public License version 2.0"},
	{"BSD-3-Clause", "Neither the name of"},
	{"BSD-2-Clause", "Redistribution and use in source and binary forms"},
	{"MIT", "Permission is hereby granted, free of charge, to any person obtaining a copy of this software"},
}

// allowed are the kinds for everything that a package of this module is built with, tests and the test environment included. The library's own
// graph has no licence that asks for source code to be given, but of a file that is changed (MPL-2.0: golang-lru).
var allowed = []string{"Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "MIT", "MPL-2.0"}

func licenceOf(text string) string {
	plain := strings.Join(strings.Fields(strings.NewReplacer("//", "", "#", "").Replace(text)), " ")
	for _, forbidden := range []string{"GNU AFFERO", "GNU LESSER", "GNU GENERAL PUBLIC LICENSE Version"} {
		if strings.Contains(plain, forbidden) && !strings.Contains(plain, "Mozilla Public License") {
			return "GPL"
		}
	}
	for _, l := range licences {
		if strings.Contains(strings.ToLower(plain), strings.ToLower(l.words)) {
			return l.kind
		}
	}
	return "unknown"
}

// The licence of every module whose packages are built or tested here is one of the allowed kinds.
func TestLicencesOfDependencies(t *testing.T) {
	t.Parallel()
	out := goCommand(t, ".", "list", "-deps", "-test", "-json=ImportPath,Module", "./...")
	type withModule struct {
		Module *struct {
			Path, Dir string
			Main      bool
		}
	}
	kinds := map[string]string{}
	for dec := json.NewDecoder(strings.NewReader(out)); ; {
		var p withModule
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		m := p.Module
		if m == nil || m.Main || kinds[m.Path] != "" {
			continue
		}
		kinds[m.Path] = "none"
		files, err := os.ReadDir(m.Dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			name := strings.ToUpper(f.Name())
			if f.IsDir() || path.Ext(name) == ".DOCS" || !strings.HasPrefix(name, "LICEN") && !strings.HasPrefix(name, "COPYING") {
				continue // .DOCS is that of a module's documents
			}
			text, err := os.ReadFile(filepath.Join(m.Dir, f.Name()))
			if err != nil {
				t.Fatal(err)
			}
			kinds[m.Path] = licenceOf(string(text))
		}
	}
	for module, kind := range kinds {
		if !slices.Contains(allowed, kind) {
			t.Errorf("the licence of %s: %s", module, kind)
		}
	}
	// The control: modules are found, and licences told apart.
	if kinds["github.com/jackc/pgx/v5"] != "MIT" || kinds["github.com/hashicorp/golang-lru/v2"] != "MPL-2.0" || kinds["golang.org/x/sync"] != "BSD-3-Clause" {
		t.Errorf("%v", kinds)
	}
	for text, want := range map[string]string{
		"GNU GENERAL PUBLIC LICENSE\n Version 3": "GPL", "All rights reserved.": "unknown", "Apache License\n  Version 2.0, January 2004": "Apache-2.0",
	} {
		if got := licenceOf(text); got != want {
			t.Errorf("%q: %s, want %s", text, got, want)
		}
	}
}
