package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/bounceproof/bounceproof/testenv/internal/engine"
)

// watchdogEnv carries the run to the watchdog: id and directory.
const watchdogEnv = "BOUNCEPROOF_TESTENV_WATCHDOG"

// The watchdog is a second run of the same executable, which the environment variable turns into one before
// main begins. It waits for the end of its standard input, whose other end only this process holds, so it comes
// to its work whether this process returns, panics, or is killed.
func init() { //nolint:gochecknoinits // see above: it must come before any test or main
	spec, ok := os.LookupEnv(watchdogEnv)
	if !ok {
		return
	}
	id, dir, _ := strings.Cut(spec, ":")
	_, _ = io.Copy(io.Discard, os.Stdin)
	if os.Getenv("TESTENV_KEEP") != "" {
		os.Exit(0)
	}
	if err := (run{id: id, dir: dir}).sweep(); err != nil {
		os.Exit(1)
	}
	os.Exit(0)
}

// startWatchdog returns the pipe at whose end the watchdog comes to its work.
func startWatchdog(r run) (io.Closer, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(exe) //nolint:noctx // it has to outlive everything here
	cmd.Env = append(os.Environ(), watchdogEnv+"="+r.id+":"+r.dir)
	cmd.Dir = os.TempDir() // not in the way of whoever removes the directory of the test
	// No standard output: go test waits until nobody holds its own any more.
	pipe, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	detach(cmd)
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	go func() { _ = cmd.Wait() }()
	return pipe, nil
}

// sweep ends and removes whatever the run has left.
func (r run) sweep() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for _, dir := range r.dirs() {
		pidFiles, _ := filepath.Glob(filepath.Join(dir, "*", "*"+pidSuffix)) // the only error is a bad pattern
		for _, f := range pidFiles {
			killFromFile(ctx, f)
		}
	}
	var err error
	if _, used := os.Stat(filepath.Join(r.dir, engineMarker)); used == nil {
		var e *engine.Engine
		if e, err = engine.Connect(); err == nil {
			err = e.RemoveRun(ctx, r.id)
		}
	}
	for _, dir := range r.dirs() {
		// A server may still be writing its last file.
		var last error
		for range 20 {
			if last = os.RemoveAll(dir); last == nil {
				break
			}
			time.Sleep(50 * time.Millisecond)
		}
		err = errors.Join(err, last)
	}
	return err
}

// killFromFile ends the process whose id stands in a file, if it is still the one that was started there: its
// command line names the directory, which nobody else's does.
func killFromFile(ctx context.Context, file string) {
	data, err := os.ReadFile(file)
	if err != nil {
		return
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(data)))
	if err != nil {
		return
	}
	ours := func() bool { return strings.Contains(commandLine(ctx, pid), filepath.Dir(file)) }
	p, err := os.FindProcess(pid)
	if err != nil || !ours() {
		return
	}
	_ = signalProcess(p, "CONT")
	_ = signalProcess(p, "QUIT")
	for deadline := time.Now().Add(5 * time.Second); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		if !ours() {
			return
		}
	}
	_ = signalProcess(p, "KILL")
}

// commandLine returns the command line of a process, empty if there is none.
func commandLine(ctx context.Context, pid int) string {
	if line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)); err == nil {
		return string(line)
	}
	out, _ := exec.CommandContext(ctx, "ps", "-p", strconv.Itoa(pid), "-o", "args=").Output() // without /proc
	return string(out)
}

// Sweep removes what this process has opened, at once and with its errors; without it the watchdog does so when the
// process has ended. No sandbox may be used or opened afterwards.
func Sweep() error {
	r, err := currentRun()
	if err != nil {
		return err
	}
	if err := r.sweep(); err != nil {
		return fmt.Errorf("testenv: %w", err)
	}
	return nil
}

// SweepAll removes what all runs on this machine have left, also of those that are still going on.
func SweepAll(ctx context.Context) error {
	var errs []error
	if e, err := engine.Connect(); err == nil {
		errs = append(errs, e.RemoveAll(ctx))
	}
	for _, base := range []string{os.TempDir(), diskDir} {
		dirs, _ := filepath.Glob(filepath.Join(base, runPrefix+"*")) // the only error is a bad pattern
		for _, dir := range dirs {
			id := strings.TrimPrefix(filepath.Base(dir), runPrefix)
			errs = append(errs, (run{id: id, dir: filepath.Join(os.TempDir(), filepath.Base(dir))}).sweep())
		}
	}
	return errors.Join(errs...)
}
