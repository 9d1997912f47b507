package sandbox

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
)

// runPrefix begins the names of the directories of runs.
const runPrefix = "bounceproof-testenv-"

// diskDir is a directory for temporary files that no system keeps in memory.
const diskDir = "/var/tmp"

// pidSuffix ends the names of the files that hold the process ids of local servers.
const pidSuffix = ".pid"

// run is what this process has in common with its watchdog: an id that labels its containers, and a directory.
type run struct {
	id  string
	dir string
	// watchdog is the pipe to the watchdog, open for as long as this process lives. nil in the watchdog itself.
	watchdog io.Closer
}

// currentRun returns the run of this process. The first call starts its watchdog.
var currentRun = sync.OnceValues(func() (run, error) {
	var random [6]byte
	_, _ = rand.Read(random[:]) // never fails
	id := hex.EncodeToString(random[:])
	r := run{id: id, dir: filepath.Join(os.TempDir(), runPrefix+id)}
	// Servers run as another user, so they must be able to pass through; what is inside is closed.
	if err := os.Mkdir(r.dir, 0o711); err != nil {
		return run{}, fmt.Errorf("testenv: %w", err)
	}
	if err := os.Chmod(r.dir, 0o711); err != nil { // whatever the umask
		return run{}, fmt.Errorf("testenv: %w", err)
	}
	var err error
	if r.watchdog, err = startWatchdog(r); err != nil {
		return run{}, fmt.Errorf("testenv: watchdog: %w", err)
	}
	return r, nil
})

// durableDir returns a path for a directory on a disk, and makes the watchdog remove it as well.
func (r run) durableDir(name string) (string, error) {
	if _, err := os.Stat(diskDir); err != nil {
		return filepath.Join(r.dir, name), nil
	}
	disk := filepath.Join(diskDir, filepath.Base(r.dir))
	if err := os.MkdirAll(disk, 0o711); err != nil {
		return "", fmt.Errorf("testenv: %w", err)
	}
	if err := os.Chmod(disk, 0o711); err != nil {
		return "", fmt.Errorf("testenv: %w", err)
	}
	return filepath.Join(disk, name), nil
}

// dirs returns the directories the run may have made.
func (r run) dirs() []string {
	return []string{r.dir, filepath.Join(diskDir, filepath.Base(r.dir))}
}
