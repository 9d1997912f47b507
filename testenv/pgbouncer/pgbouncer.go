// Package pgbouncer runs real PgBouncers of several versions in front of a server of package postgres.
package pgbouncer

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/bounceproof/bounceproof/testenv/internal/sandbox"
	"github.com/bounceproof/bounceproof/testenv/internal/suite"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

// Options says which PgBouncer is wanted. The zero value is any version in transaction mode.
type Options struct {
	// Version is one of Versions or whatever else is installed, as major.minor. Empty means any.
	Version string
	// PoolMode is session, transaction or statement. Empty means transaction.
	PoolMode string
	// PoolSize is default_pool_size, the server connections per database and user. 0 means 4.
	PoolSize int
	// MaxPreparedStatements is max_prepared_statements. 0 means PgBouncer's own default (0 in 1.21 to 1.23, 200
	// from 1.24 on), negative means off. Before 1.21 there is no such setting, and it is left out.
	MaxPreparedStatements int
	// Settings are added to the section [pgbouncer] and win over everything above.
	Settings map[string]string
}

const startTimeout = 60 * time.Second

// Versions returns the versions that the test environment can bring everywhere, oldest first.
func Versions() []string { return suite.Versions(suite.PgBouncer) }

// Available reports why Start would skip for a version, nil if it would not. It does not build an image.
func Available(version string) error {
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	if version == "" {
		_, err := anyVersion(ctx)
		return err
	}
	return sandbox.Available(ctx, suite.PgBouncer, version)
}

// anyVersion chooses the version for callers that do not mind: Debian 12's, which is the likeliest to be installed,
// else the newest there is.
func anyVersion(ctx context.Context) (string, error) {
	candidates := []string{"1.18"}
	for _, v := range sandbox.Installed(ctx, suite.PgBouncer) {
		candidates = append(candidates, majorMinor(v))
	}
	all := Versions()
	for i := range all {
		candidates = append(candidates, all[len(all)-1-i])
	}
	var first error
	for _, v := range candidates {
		err := sandbox.Available(ctx, suite.PgBouncer, v)
		if err == nil {
			return v, nil
		}
		if first == nil {
			first = err
		}
	}
	return "", first
}

// Tracks reports whether a version, as major.minor, can keep track of prepared statements: max_prepared_statements came with 1.21.
func Tracks(version string) bool { return atLeast(version, 21) }

func majorMinor(v string) string {
	parts := strings.SplitN(v, ".", 3)
	if len(parts) < 2 {
		return v
	}
	return parts[0] + "." + parts[1]
}

// atLeast reports whether version 1.x is at least 1.minor.
func atLeast(version string, minor int) bool {
	_, rest, _ := strings.Cut(majorMinor(version), ".")
	n, err := strconv.Atoi(rest)
	return err == nil && n >= minor
}

// Start returns a running PgBouncer of the test's own in front of s. It ends with the test. Like postgres.Start it skips
// the test when this machine cannot provide the version, and fails it when PgBouncer does not start.
func Start(tb postgres.TB, s *postgres.Server, o Options) *Bouncer {
	tb.Helper()
	b, err := launch(s, o)
	if err != nil {
		postgres.Unavailable(tb, err)
		return nil
	}
	tb.Cleanup(func() {
		if tb.Failed() {
			tb.Logf("PgBouncer %s on port %d, end of its log:\n%s", b.version, b.sandbox.Port, b.log.Tail(60))
		}
		if err := b.close(); err != nil {
			tb.Logf("testenv: closing PgBouncer %s: %v", b.version, err)
		}
	})
	return b
}

// launch starts a PgBouncer. A port that is taken meanwhile costs another try.
func launch(s *postgres.Server, o Options) (*Bouncer, error) {
	if o.Version == "" {
		ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
		defer cancel()
		v, err := anyVersion(ctx)
		if err != nil {
			return nil, err
		}
		o.Version = v
	}
	var err error
	for range 5 {
		var b *Bouncer
		if b, err = tryLaunch(s, o); err == nil {
			return b, nil
		}
		if !errors.Is(err, sandbox.ErrPortTaken) {
			break
		}
	}
	return nil, err
}

func tryLaunch(s *postgres.Server, o Options) (_ *Bouncer, err error) {
	sb, err := sandbox.Open(context.Background(), sandbox.Options{Program: suite.PgBouncer, Version: o.Version})
	if err != nil {
		return nil, err
	}
	b := &Bouncer{version: o.Version, sandbox: sb, server: s, options: o, log: new(sandbox.Log)}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.close())
		}
	}()
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	if err := sb.Write(ctx, "userlist.txt", []byte(fmt.Sprintf("%q %q\n", postgres.Superuser, postgres.Password()))); err != nil {
		return nil, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.writeIniLocked(ctx); err != nil {
		return nil, err
	}
	if err := b.startLocked(ctx); err != nil {
		return nil, err
	}
	return b, nil
}
