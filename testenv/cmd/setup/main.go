// Command setup prepares this machine for the tests and the demo: it builds the images of the test environment where a
// Docker engine answers, and installs Debian's packages elsewhere, if it may. What it cannot do it says in one line
// each, with the command that would. A second run finds everything in place.
//
// With -clean it removes what tests may have left behind with TESTENV_KEEP=1.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/bounceproof/bounceproof/testenv/internal/engine"
	"github.com/bounceproof/bounceproof/testenv/internal/sandbox"
	"github.com/bounceproof/bounceproof/testenv/internal/suite"
)

func main() {
	clean := flag.Bool("clean", false, "remove the containers, volumes and directories of all runs, and end their servers")
	process := flag.Bool("process", false, "also install this machine's own PostgreSQL and PgBouncer, for the tests of the process runtime")
	ask := flag.Bool("engine", false, "do nothing, and succeed if a Docker engine answers")
	flag.Parse()
	if *ask {
		if _, err := engine.Connect(); err != nil {
			os.Exit(1)
		}
		return
	}
	if err := run(*clean, *process); err != nil {
		fmt.Fprintln(os.Stderr, "setup:", err)
		os.Exit(1)
	}
}

func run(clean, process bool) error {
	// SIGTERM as well: the children of a build must not stay.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if clean {
		return sandbox.SweepAll(ctx)
	}
	return setup(ctx, os.Stdout, process)
}

func setup(ctx context.Context, out io.Writer, process bool) error {
	e, err := engine.Connect()
	if err == nil {
		if err := buildImages(ctx, out, e); err != nil {
			return err
		}
	} else {
		_, _ = fmt.Fprintf(out, "setup: %v; for all versions run: %s\n", err, sandbox.EngineRemedy())
	}
	if process || e == nil || len(missing(ctx)) > 0 {
		if err := install(ctx, out); err != nil {
			return err
		}
	}
	return report(ctx, out)
}

// buildImages builds what is missing, two at a time: one waits for the network while the other unpacks.
func buildImages(ctx context.Context, out io.Writer, e *engine.Engine) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(2)
	for _, s := range suite.All {
		if _, ok := e.Has(s); ok {
			continue
		}
		e.Forget(s) // whoever runs setup may have repaired what failed
		g.Go(func() error {
			begin := time.Now()
			_, _ = fmt.Fprintf(out, "setup: building the image of Debian %s\n", s.Name)
			img, err := e.Ensure(ctx, s)
			if errors.Is(err, engine.ErrNoMmdebstrap) && aptGet(ctx, out, "mmdebstrap") == nil {
				e.Forget(s)
				img, err = e.Ensure(ctx, s)
			}
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if err != nil {
				_, _ = fmt.Fprintf(out, "setup: %s\n", oneLine(err))
				return nil // the report names the versions that this costs
			}
			_, _ = fmt.Fprintf(out, "setup: Debian %s with PostgreSQL %s and PgBouncer %s, built in %.0f s\n",
				s.Name, img.Postgres, img.PgBouncer, time.Since(begin).Seconds())
			return nil
		})
	}
	return g.Wait()
}

// install brings the packages of this machine's own suite, for the process runtime.
func install(ctx context.Context, out io.Writer) error {
	var packages []string
	for p, name := range map[suite.Program]string{suite.Postgres: "postgresql", suite.PgBouncer: "pgbouncer"} {
		if len(sandbox.Installed(ctx, p)) == 0 {
			packages = append(packages, name)
		}
	}
	if len(packages) == 0 {
		return nil
	}
	if err := aptGet(ctx, out, packages...); err != nil {
		_, _ = fmt.Fprintf(out, "setup: %s; run: apt-get install %s\n", oneLine(err), strings.Join(packages, " "))
	}
	sandbox.ForgetInstalled()
	return ctx.Err()
}

// missing returns why each version that is not available is not.
func missing(ctx context.Context) []error {
	var errs []error
	for _, s := range suite.All {
		for _, p := range []suite.Program{suite.Postgres, suite.PgBouncer} {
			if err := sandbox.Available(ctx, p, s.Version(p)); err != nil {
				errs = append(errs, err)
			}
		}
	}
	return errs
}

func report(ctx context.Context, out io.Writer) error {
	errs := missing(ctx)
	var have []string
	for _, s := range suite.All {
		for _, p := range []suite.Program{suite.Postgres, suite.PgBouncer} {
			if sandbox.Available(ctx, p, s.Version(p)) == nil {
				have = append(have, fmt.Sprintf("%s %s", p, s.Version(p)))
			}
		}
	}
	if len(have) > 0 {
		_, _ = fmt.Fprintf(out, "setup: ready: %s\n", strings.Join(have, ", "))
	}
	for _, err := range errs {
		_, _ = fmt.Fprintf(out, "setup: MISSING: %s\n", brief(err))
	}
	if len(errs) > 0 && os.Getenv("TESTENV_REQUIRE") == "all" {
		return fmt.Errorf("%d versions are missing and TESTENV_REQUIRE=all", len(errs))
	}
	return nil
}

// brief shortens the reason for a missing version: what failed was told in full when it did.
func brief(err error) string {
	var missing *sandbox.UnavailableError
	if errors.As(err, &missing) {
		const limit = 160
		if r := []rune(missing.Reason); len(r) > limit {
			short := *missing
			short.Reason = string(r[:limit]) + "…"
			return oneLine(&short)
		}
	}
	return oneLine(err)
}

func oneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", " ") }
