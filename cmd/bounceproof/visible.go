package main

import (
	"fmt"
	"io"
	"strings"
	"unicode"
)

// visible returns text of somebody else, such as a server's error or the name of a subscription, as a terminal can show it: what would be obeyed
// in place of shown, control characters and marks that turn the direction of writing, is written as \u001b. Line breaks and tabs stay; a text
// that is not UTF-8 gets the replacement character.
func visible(s string) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	if !strings.ContainsFunc(s, obeyed) {
		return s
	}
	var b strings.Builder
	for _, r := range s {
		if obeyed(r) {
			fmt.Fprintf(&b, `\u%04x`, r)
		} else {
			b.WriteRune(r)
		}
	}
	return b.String()
}

// obeyed reports whether a terminal acts on a character: C0 and C1 controls (ECMA-48), and Unicode's marks of direction.
func obeyed(r rune) bool {
	return unicode.IsControl(r) && r != '\n' && r != '\t' || unicode.Is(unicode.Bidi_Control, r)
}

// visibleWriter makes what is written visible. In JSON, which has no such characters but in strings, an escape means the same.
type visibleWriter struct{ io.Writer }

// Write takes whole texts: json.Encoder and fmt write each value at once.
func (w visibleWriter) Write(p []byte) (int, error) {
	if _, err := io.WriteString(w.Writer, visible(string(p))); err != nil {
		return 0, err
	}
	return len(p), nil
}
