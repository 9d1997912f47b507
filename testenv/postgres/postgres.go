// Package postgres runs real PostgreSQL servers for tests, the demo and benchmarks.
//
// A version comes from Debian's own package, in a container where a Docker engine answers and as a local process
// where it is installed. A version that is not to be had skips the test and says why and what to do about it;
// TESTENV_REQUIRE=all makes that a failure. Servers end with the process that started them, even if it is killed.
//
// The environment variables are described in testenv/README.md.
package postgres

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/bounceproof/bounceproof/testenv/internal/sandbox"
	"github.com/bounceproof/bounceproof/testenv/internal/suite"
)

// TB is what the test environment needs of testing.TB. The demo command brings its own, so that package testing
// stays out of its binary.
type TB interface {
	Helper()
	Name() string
	Logf(format string, args ...any)
	Skipf(format string, args ...any)
	Fatalf(format string, args ...any)
	Failed() bool
	Cleanup(func())
}

// Options says which server is wanted. The zero value is any version, shared, in memory.
type Options struct {
	// Version is a major version, one of Versions or whatever else is installed. Empty means any.
	Version string
	// Settings are added to the server's configuration and win over the defaults.
	Settings map[string]string
	// Durable keeps the data on a disk with fsync, synchronous_commit and full_page_writes on, for benchmarks.
	// Otherwise all three are off.
	Durable bool
	// Dedicated gives the caller a server of its own, which ends with the test. Otherwise all callers of this
	// process with equal options share one.
	Dedicated bool
}

// startTimeout bounds the start of a server. Building an image has its own, longer limit.
const startTimeout = 60 * time.Second

// Versions returns the versions that the test environment can bring everywhere, oldest first.
func Versions() []string { return suite.Versions(suite.Postgres) }

// Available reports why Start would skip for a version, nil if it would not. It does not build an image.
func Available(version string) error {
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	if version == "" {
		_, err := anyVersion(ctx)
		return err
	}
	return sandbox.Available(ctx, suite.Postgres, version)
}

// anyVersion chooses the version for callers that do not mind: Debian 12's, which is the likeliest to be installed,
// else the newest there is.
func anyVersion(ctx context.Context) (string, error) {
	candidates := []string{"15"}
	for _, v := range sandbox.Installed(ctx, suite.Postgres) {
		major, _, _ := strings.Cut(v, ".")
		candidates = append(candidates, major)
	}
	newestFirst := Versions()
	slices.Reverse(newestFirst)
	candidates = append(candidates, newestFirst...)
	var first error
	for _, v := range candidates {
		err := sandbox.Available(ctx, suite.Postgres, v)
		if err == nil {
			return v, nil
		}
		if first == nil {
			first = err
		}
	}
	return "", first
}

// shared holds the servers that tests of this process share.
var shared struct {
	mu      sync.Mutex // guards servers, not what happens inside an entry
	servers map[string]func() (*Server, error)
}

// Start returns a running server. It ends the test when there is none: by a skip when this machine cannot provide the
// version, by a failure when the server does not start. It is safe for concurrent use, also across processes.
func Start(tb TB, o Options) *Server {
	tb.Helper()
	s, err := start(o)
	if err != nil {
		Unavailable(tb, err)
		return nil
	}
	if o.Dedicated {
		tb.Cleanup(func() {
			if err := s.close(); err != nil {
				tb.Logf("testenv: closing PostgreSQL %s: %v", s.version, err)
			}
		})
	}
	mark := s.log.Mark()
	tb.Cleanup(func() {
		if tb.Failed() {
			tb.Logf("PostgreSQL %s on port %d, end of its log during this test:\n%s", s.version, s.sandbox.Port, sandbox.Tail(s.log.Since(mark), 60))
		}
	})
	return s
}

// Unavailable ends the test because of err, which Start or Available returned: by a skip, or by a failure when
// TESTENV_REQUIRE=all or when err is not about availability.
func Unavailable(tb TB, err error) {
	tb.Helper()
	var missing *sandbox.UnavailableError
	if !errors.As(err, &missing) {
		tb.Fatalf("%v", err)
		return
	}
	if os.Getenv("TESTENV_REQUIRE") == "all" {
		tb.Fatalf("testenv: %v (TESTENV_REQUIRE=all forbids to skip)", missing)
		return
	}
	sandbox.RecordSkip(tb.Name(), missing)
	tb.Skipf("testenv: %v", missing)
}

// Shutdown ends every server that this process has started, through this package or package pgbouncer, and returns when they
// are gone. Without it they end just after the process. Nothing may be started afterwards.
func Shutdown() error { return sandbox.Sweep() }

func start(o Options) (*Server, error) {
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	if o.Version == "" {
		v, err := anyVersion(ctx)
		if err != nil {
			return nil, err
		}
		o.Version = v
	}
	if o.Dedicated {
		return launch(o)
	}
	key := fmt.Sprintf("%s %t", o.Version, o.Durable)
	for _, k := range slices.Sorted(maps.Keys(o.Settings)) {
		key += fmt.Sprintf(" %q=%q", k, o.Settings[k])
	}
	shared.mu.Lock()
	if shared.servers == nil {
		shared.servers = map[string]func() (*Server, error){}
	}
	once, ok := shared.servers[key]
	if !ok {
		o.Settings = maps.Clone(o.Settings)
		once = sync.OnceValues(func() (*Server, error) { return launch(o) })
		shared.servers[key] = once
	}
	shared.mu.Unlock()
	return once()
}
