// Package filelock gives processes of this machine exclusive turns.
package filelock

import (
	"fmt"
	"os"
	"path/filepath"
)

// Dir returns the directory that the processes of one user have in common.
func Dir() string {
	cache, err := os.UserCacheDir()
	if err != nil {
		cache = os.TempDir() // no home
	}
	return filepath.Join(cache, "bounceproof-testenv")
}

// Lock waits for the lock of the given name. It is released by unlock, or by the end of the process.
func Lock(name string) (unlock func(), err error) {
	if err := os.MkdirAll(Dir(), 0o755); err != nil {
		return nil, fmt.Errorf("testenv: %w", err)
	}
	f, err := os.OpenFile(filepath.Join(Dir(), name+".lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("testenv: %w", err)
	}
	if err := lock(f); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("testenv: lock %s: %w", f.Name(), err)
	}
	return func() { _ = f.Close() }, nil // closing releases it
}
