package sandbox

// RunDir returns the directory of this process's run, whose name ends with its id.
func RunDir() (string, error) {
	r, err := currentRun()
	return r.dir, err
}

const (
	RunPrefix = runPrefix
	DiskDir   = diskDir
)
