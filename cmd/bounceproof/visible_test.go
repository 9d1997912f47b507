package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// hostile is what a server, or who may name something there, can put into a text: a title, a colour, an eight-bit escape, a turn of direction.
const hostile = "name\x1b]0;owned\a\x1b[31mred\u009b2J\u202etxt.exe\x7f\r"

// Nothing that a terminal obeys gets through any of the ways by which the commands print texts of others.
func TestTextsOfOthersAreNotObeyed(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	v := newView(&out)
	v.fact("fact", hostile)
	remedy := hostile
	v.finding(finding{Severity: problem, What: hostile, Remedy: &remedy})
	v.wrapped(hostile)
	v.check(check{false, hostile})
	v.tableOrList([][]string{{"head"}, {hostile}}, 2)
	v.terminal, v.width = true, 10
	v.tableOrList([][]string{{"head", "second"}, {hostile, hostile}}, 2)
	printError(&out, errors.New(hostile))
	if err := json.NewEncoder(visibleWriter{&out}).Encode(hostile); err != nil {
		t.Fatal(err)
	}
	for _, r := range out.String() {
		if obeyed(r) {
			t.Fatalf("%U in %q", r, out.String())
		}
	}
	if n := strings.Count(strings.ReplaceAll(out.String(), "\n", ""), `\u001b`); n < 8 {
		t.Errorf("%d escapes are shown: %s", n, out.String())
	}
}

// JSON says the same with it as without.
func TestVisibleJSONMeansTheSame(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		text := rapid.String().Draw(t, "text") + hostile
		var out bytes.Buffer
		if err := json.NewEncoder(visibleWriter{&out}).Encode(text); err != nil {
			t.Fatal(err)
		}
		var got string
		if err := json.Unmarshal(out.Bytes(), &got); err != nil || got != text {
			t.Errorf("%q, %v, want %q", got, err, text)
		}
		if s := visible(text); strings.ContainsFunc(s, obeyed) {
			t.Errorf("%q", s)
		}
	})
	if plain := "Größe 3\n\tµ ✓"; visible(plain) != plain { // the control
		t.Errorf("%q", visible(plain))
	}
}
