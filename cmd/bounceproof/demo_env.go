package main

import (
	"fmt"
	"sync"

	"github.com/bounceproof/bounceproof/testenv/postgres"
)

// env stands in for a test: it owns the servers that are started for it. Safe for concurrent use.
type env struct {
	log func(line string)

	mu       sync.Mutex // guards what follows
	cleanups []func()
	failed   bool
}

var _ postgres.TB = (*env)(nil)

// ended is what Skipf and Fatalf panic with, so that they do not return, as in a test.
type ended struct{ err error }

// attempt runs f, which starts servers, and returns what it was skipped or failed with.
func (e *env) attempt(f func()) (err error) {
	defer func() {
		switch r := recover().(type) {
		case nil:
		case ended:
			err = r.err
		default:
			panic(r)
		}
	}()
	f()
	return nil
}

// close ends what was started, the latest first.
func (e *env) close() {
	e.mu.Lock()
	cleanups := e.cleanups
	e.cleanups = nil
	e.mu.Unlock()
	for i := range cleanups {
		cleanups[len(cleanups)-1-i]()
	}
}

// Helper does nothing.
func (e *env) Helper() {}

// Name begins the names of databases.
func (e *env) Name() string { return "demo" }

// Logf reports what only matters when something goes wrong.
func (e *env) Logf(format string, args ...any) { e.log(fmt.Sprintf(format, args...)) }

// Skipf ends the attempt.
func (e *env) Skipf(format string, args ...any) { panic(ended{fmt.Errorf(format, args...)}) }

// Fatalf ends the attempt.
func (e *env) Fatalf(format string, args ...any) {
	e.mu.Lock()
	e.failed = true
	e.mu.Unlock()
	panic(ended{fmt.Errorf(format, args...)})
}

// Failed reports whether Fatalf was called.
func (e *env) Failed() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.failed
}

// Cleanup adds a function for close.
func (e *env) Cleanup(f func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.cleanups = append(e.cleanups, f)
}
