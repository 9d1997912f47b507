package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
)

var aptMu sync.Mutex // apt's own lock does not wait

// aptGet installs Debian packages without starting what they bring: no cluster is made, and a service that the
// package starts by itself is stopped and disabled again.
func aptGet(ctx context.Context, out io.Writer, packages ...string) error {
	aptMu.Lock()
	defer aptMu.Unlock()
	if os.Geteuid() != 0 {
		return fmt.Errorf("only root can install %s", strings.Join(packages, " "))
	}
	if _, err := exec.LookPath("apt-get"); err != nil {
		return errors.New("there is no apt-get here")
	}
	_, _ = fmt.Fprintf(out, "setup: apt-get install %s\n", strings.Join(packages, " "))
	const clusters = "/etc/postgresql-common/createcluster.conf"
	if _, err := os.Stat(clusters); errors.Is(err, os.ErrNotExist) {
		if err := os.MkdirAll(filepath.Dir(clusters), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(clusters, []byte("create_main_cluster = false\n"), 0o644); err != nil {
			return err
		}
	}
	// The lists of a new machine are empty or old; where they cannot be fetched the old ones may do.
	_ = apt(ctx, "update", "-q")
	if err := apt(ctx, append([]string{"install", "-y", "-q", "--no-install-recommends", "-o", "Dpkg::Options::=--force-confold"}, packages...)...); err != nil {
		return err
	}
	for _, p := range packages {
		if p == "pgbouncer" {
			// Fails where systemd does not run, and then nothing was started either.
			_ = exec.CommandContext(ctx, "systemctl", "disable", "--now", "pgbouncer").Run()
		}
	}
	return nil
}

func apt(ctx context.Context, args ...string) error {
	cmd := exec.CommandContext(ctx, "apt-get", args...)
	cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
	said, err := cmd.CombinedOutput()
	if err != nil {
		lines := strings.Split(strings.TrimSpace(string(said)), "\n")
		return fmt.Errorf("apt-get %s: %w: %s", args[0], err, lines[len(lines)-1])
	}
	return nil
}
