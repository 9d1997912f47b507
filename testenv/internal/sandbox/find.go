package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"

	"github.com/bounceproof/bounceproof/testenv/internal/engine"
	"github.com/bounceproof/bounceproof/testenv/internal/suite"
)

// opener opens sandboxes in one runtime.
type opener interface {
	// prepare makes the runtime ready for o, or says why it cannot serve it after all.
	prepare(ctx context.Context, o Options) error
	// open opens a sandbox. Its error is a failure, no reason to look elsewhere.
	open(ctx context.Context, o Options) (*Sandbox, error)
}

// find lists the runtimes that may provide o, best first, or says why there is none. Containers come first, so that all
// versions run in the same surroundings. TESTENV_RUNTIME=container or process allows only that one.
func find(ctx context.Context, o Options) ([]opener, error) {
	if o.Program == "" || o.Version == "" {
		return nil, fmt.Errorf("testenv: neither program nor version may be empty: %+v", o)
	}
	only := os.Getenv("TESTENV_RUNTIME")
	var found []opener
	var reasons []error
	if only != "process" {
		c, err := findContainer(o.Program, o.Version)
		if err == nil {
			found = append(found, c)
		} else {
			reasons = append(reasons, err)
		}
	}
	if only != "container" {
		l, err := findLocal(ctx, o.Program, o.Version)
		if err == nil {
			found = append(found, l)
		} else {
			reasons = append(reasons, err)
		}
	}
	if len(found) == 0 {
		return nil, unavailable(o, reasons)
	}
	return found, nil
}

// open opens a sandbox in the first runtime that can. A container may turn out not to be possible only when its image
// is built.
func open(ctx context.Context, o Options) (*Sandbox, error) {
	runtimes, err := find(ctx, o)
	if err != nil {
		return nil, err
	}
	var reasons []error
	for _, r := range runtimes {
		if err := r.prepare(ctx, o); err != nil {
			reasons = append(reasons, err)
			continue
		}
		return r.open(ctx, o)
	}
	return nil, unavailable(o, reasons)
}

func unavailable(o Options, reasons []error) error {
	said := make([]string, len(reasons))
	for i, r := range reasons {
		said[i] = strings.ReplaceAll(r.Error(), "\n", " ")
	}
	reason := strings.Join(said, ", and ")
	if only := os.Getenv("TESTENV_RUNTIME"); only != "" {
		reason += fmt.Sprintf(" (TESTENV_RUNTIME=%s)", only)
	}
	return &UnavailableError{
		Program: o.Program, Version: o.Version,
		Reason: reason, Try: remedy(o.Program, o.Version), Err: errors.Join(reasons...),
	}
}

// remedy returns the command that would most likely help.
func remedy(p suite.Program, version string) string {
	if _, err := engine.Connect(); err == nil {
		return "make setup"
	}
	if s, ok := suite.Of(p, version); ok && s.Installable() {
		return "apt-get install " + strings.ToLower(string(p))
	}
	return EngineRemedy()
}

// EngineRemedy returns the command that would bring a Docker engine to this machine.
func EngineRemedy() string {
	switch {
	case runtime.GOOS != "linux":
		return "open -a Docker && make setup" // or whatever brings an engine here
	case os.Getenv("DOCKER_HOST") != "":
		return "unset DOCKER_HOST && make setup"
	}
	if _, err := exec.LookPath("dockerd"); err == nil {
		return "service docker start && make setup"
	}
	return "apt-get install docker.io mmdebstrap && make setup"
}
