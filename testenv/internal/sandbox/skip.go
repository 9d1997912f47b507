package sandbox

import (
	"fmt"
	"os"
)

// RecordSkip appends a line about a skipped test to the file named by TESTENV_SKIPS, if it is set. go test shows
// the reason of a skip only with -v; make test shows the file at its end.
func RecordSkip(test string, reason error) {
	name := os.Getenv("TESTENV_SKIPS")
	if name == "" {
		return
	}
	f, err := os.OpenFile(name, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return
	}
	defer func() { _ = f.Close() }()
	// One write, so that lines of several processes do not mix.
	_, _ = fmt.Fprintf(f, "%s: %v\n", test, reason)
}
