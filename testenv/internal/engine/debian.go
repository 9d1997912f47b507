package engine

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"

	"github.com/ory/dockertest/v3/docker"

	"github.com/bounceproof/bounceproof/testenv/internal/suite"
)

// Both recipes keep postgresql-common from making a cluster, and take the suite from its main archive alone: the
// versions under test are those of a release, and an old suite's other archives go first.

// debianDockerfile builds on Debian's own image; its parameters are suite, mirror, suite.
const debianDockerfile = `FROM debian:%s-slim
RUN rm -rf /etc/apt/sources.list.d/* \
 && echo 'deb [check-valid-until=no] %s %s main' >/etc/apt/sources.list \
 && mkdir -p /etc/postgresql-common \
 && echo 'create_main_cluster = false' >/etc/postgresql-common/createcluster.conf \
 && apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends postgresql pgbouncer \
 && rm -rf /var/lib/apt/lists/*
`

// mmdebstrapArgs makes the same root file system without a registry. Packages' documentation stays out.
func mmdebstrapArgs(suite string) []string {
	return []string{
		"--variant=minbase",
		"--include=postgresql,pgbouncer",
		`--aptopt=Acquire::Check-Valid-Until "false"`,
		`--aptopt=APT::Install-Recommends "false"`,
		"--dpkgopt=path-exclude=/usr/share/man/*",
		"--dpkgopt=path-exclude=/usr/share/locale/*",
		`--essential-hook=mkdir -p "$1/etc/postgresql-common"`,
		`--essential-hook=echo "create_main_cluster = false" >"$1/etc/postgresql-common/createcluster.conf"`,
		suite,
		"-", // the tar goes to standard output
	}
}

// ownMirror stands for the mirror that mmdebstrap itself takes for a suite of Debian.
const ownMirror = ""

// mirrors returns where to look for a suite, most likely first: where the environment says, or else where this machine's own packages come
// from, and mmdebstrap's own choice. A suite that has left the mirrors needs TESTENV_DEBIAN_MIRROR.
func mirrors() []string {
	if m := os.Getenv("TESTENV_DEBIAN_MIRROR"); m != "" {
		return []string{m}
	}
	var list []string
	add := func(m string) {
		m = strings.TrimRight(m, "/")
		for _, have := range list {
			if have == m {
				return
			}
		}
		list = append(list, m)
	}
	// Empty on a system without apt, and of no use on Ubuntu, whose label is another.
	out, _ := exec.Command("apt-get", "indextargets", "--format", "$(LABEL) $(REPO_URI)").Output() //nolint:noctx // reads local files
	for line := range strings.Lines(string(out)) {
		if label, uri, _ := strings.Cut(strings.TrimSpace(line), " "); label == "Debian" {
			add(uri)
		}
	}
	return append(list, ownMirror)
}

// ErrNoMmdebstrap says that an image could not be built without a registry for want of one program.
var ErrNoMmdebstrap = errors.New("mmdebstrap is not installed (apt-get install mmdebstrap)")

// importDebian makes the base with mmdebstrap, which needs only a Debian mirror.
func (e *Engine) importDebian(ctx context.Context, s suite.Suite, base string) error {
	program, err := exec.LookPath("mmdebstrap")
	if err != nil {
		return ErrNoMmdebstrap
	}
	var errs []error
	for _, mirror := range mirrors() {
		args := mmdebstrapArgs(s.Name)
		if mirror != ownMirror {
			args = append(args, mirror)
		}
		err := e.importFrom(ctx, program, args, base)
		var noMirror *mirrorError
		if !errors.As(err, &noMirror) {
			return err // nil, or what another mirror would not mend
		}
		errs = append(errs, fmt.Errorf("%s: %w", cmp.Or(mirror, "mmdebstrap's own mirror"), err))
	}
	return fmt.Errorf("no mirror served (TESTENV_DEBIAN_MIRROR names another): %w", errors.Join(errs...))
}

// mirrorError is a failure of mmdebstrap.
type mirrorError struct{ err error }

func (e *mirrorError) Error() string { return e.err.Error() }
func (e *mirrorError) Unwrap() error { return e.err }

func (e *Engine) importFrom(ctx context.Context, program string, args []string, base string) error {
	cmd := exec.CommandContext(ctx, program, args...)
	var said bytes.Buffer
	cmd.Stderr = &said
	rootfs, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	repo, tag, _ := strings.Cut(base, ":")
	importErr := e.Pool.Client.ImportImage(docker.ImportImageOptions{
		Repository: repo, Tag: tag, Source: "-", InputStream: rootfs, OutputStream: &bytes.Buffer{}, Context: ctx,
	})
	// An engine that has given up must not look like a failure of mmdebstrap.
	_, _ = io.Copy(io.Discard, rootfs)
	if err := cmd.Wait(); err != nil {
		// What came through until then may have made an image all the same.
		_ = e.Pool.Client.RemoveImage(base)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return &mirrorError{fmt.Errorf("mmdebstrap: %w: %s", err, complaint(said.String()))}
	}
	if importErr != nil {
		return fmt.Errorf("docker import: %w", importErr)
	}
	return nil
}

// complaint returns mmdebstrap's errors, or its last words if it has none.
func complaint(said string) string {
	var lines []string
	for line := range strings.Lines(said) {
		if strings.HasPrefix(line, "E: ") {
			lines = append(lines, strings.TrimSpace(line))
		}
	}
	if len(lines) == 0 {
		return lastLines(said, 3)
	}
	return strings.Join(lines[:min(len(lines), 3)], " ")
}
