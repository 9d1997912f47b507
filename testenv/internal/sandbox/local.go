package sandbox

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"

	"github.com/bounceproof/bounceproof/testenv/internal/suite"
)

// local is an installed server package.
type local struct {
	bin     string // directory of its programs
	version string // as the program says it
}

var (
	localMu    sync.Mutex // guards localKnown
	localKnown = map[suite.Program][]local{}
)

// binDirs are where packages put their programs, beside the PATH.
var binDirs = map[suite.Program][]string{
	suite.Postgres: {
		"/usr/lib/postgresql/*/bin",         // Debian
		"/usr/pgsql-*/bin",                  // PostgreSQL's own RPMs
		"/opt/homebrew/opt/postgresql*/bin", // Homebrew
		"/usr/local/opt/postgresql*/bin",
	},
	suite.PgBouncer: {"/usr/sbin", "/usr/local/sbin", "/opt/homebrew/bin", "/usr/local/bin"},
}

var versionPattern = regexp.MustCompile(`\d+\.\d+(\.\d+)?|\d+(beta|rc)\d+`)

// installed lists the installed versions of p. It looks once.
func installed(ctx context.Context, p suite.Program) []local {
	localMu.Lock()
	defer localMu.Unlock()
	if ls, ok := localKnown[p]; ok {
		return ls
	}
	program := "postgres"
	if p == suite.PgBouncer {
		program = "pgbouncer"
	}
	var dirs []string
	if found, err := exec.LookPath(program); err == nil {
		if target, err := filepath.EvalSymlinks(found); err == nil {
			dirs = append(dirs, filepath.Dir(target))
		}
	}
	for _, pattern := range binDirs[p] {
		matches, _ := filepath.Glob(pattern) // the only error is a bad pattern
		dirs = append(dirs, matches...)
	}
	var ls []local
	seen := map[string]bool{}
	for _, dir := range dirs {
		if seen[dir] {
			continue
		}
		seen[dir] = true
		out, err := exec.CommandContext(ctx, filepath.Join(dir, program), "--version").Output()
		if err != nil {
			continue
		}
		first, _, _ := strings.Cut(string(out), "\n")
		if v := versionPattern.FindString(first); v != "" {
			ls = append(ls, local{bin: dir, version: v})
		}
	}
	localKnown[p] = ls
	return ls
}

func findLocal(ctx context.Context, p suite.Program, version string) (local, error) {
	ls := installed(ctx, p)
	var have []string
	for _, l := range ls {
		if isVersion(l.version, version) {
			return l, nil
		}
		have = append(have, l.version)
	}
	if len(have) == 0 {
		return local{}, fmt.Errorf("no %s is installed", p)
	}
	return local{}, fmt.Errorf("installed is %s %s", p, strings.Join(have, ", "))
}

// isVersion reports whether full is version or one of its minor releases: 15.18 is 15, 1.18.0 is 1.18.
func isVersion(full, version string) bool {
	return full == version || strings.HasPrefix(full, version+".")
}

// Installed returns the versions of p that are installed on this machine.
func Installed(ctx context.Context, p suite.Program) []string {
	var vs []string
	for _, l := range installed(ctx, p) {
		vs = append(vs, l.version)
	}
	return vs
}

// ForgetInstalled makes the next look at what is installed a new one.
func ForgetInstalled() {
	localMu.Lock()
	defer localMu.Unlock()
	clear(localKnown)
}

func (local) prepare(context.Context, Options) error { return nil }

// open makes a directory for the server, owned by the user it will run as.
func (l local) open(_ context.Context, o Options) (*Sandbox, error) {
	r, err := currentRun()
	if err != nil {
		return nil, err
	}
	user, err := unprivileged()
	if err != nil {
		return nil, err
	}
	port, err := freePort()
	if err != nil {
		return nil, err
	}
	name := r.nextName(o.Program, o.Version)
	dir := filepath.Join(r.dir, name)
	if o.Durable {
		// A temporary directory may be a tmpfs, which no fsync makes durable.
		if dir, err = r.durableDir(name); err != nil {
			return nil, err
		}
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, fmt.Errorf("testenv: %w", err)
	}
	if err := user.own(dir); err != nil {
		return nil, fmt.Errorf("testenv: %w", err)
	}
	return &Sandbox{
		Name: name, Kind: "process", Version: l.version, Dir: dir, bin: l.bin,
		ListenHost: loopback, ListenPort: port,
		Host: loopback, Port: port,
		backend: &processes{dir: dir, user: user},
	}, nil
}

const loopback = "127.0.0.1"

// processes runs a sandbox's programs on this machine.
type processes struct {
	dir  string
	user account

	mu      sync.Mutex // guards running
	running map[string]*Process
}

func (ps *processes) write(_ context.Context, name string, data []byte) error {
	path := filepath.Join(ps.dir, name)
	if err := os.WriteFile(path, data, 0o600); err != nil {
		return fmt.Errorf("testenv: %w", err)
	}
	return ps.user.own(path)
}

// start runs argv through a shell that first writes its process id, which becomes the program's, to a file:
// from there the watchdog knows it, without a moment in which a crash of this process would leave it unknown.
func (ps *processes) start(_ context.Context, name string, log io.Writer, argv []string) (*Process, error) {
	pidFile := filepath.Join(ps.dir, name+pidSuffix)
	args := append([]string{"-c", `echo $$ >"$0" && exec "$@"`, pidFile}, argv...)
	// Not CommandContext: a server outlives the context of the call that started it.
	cmd := exec.Command("/bin/sh", args...) //nolint:noctx // see above
	cmd.Dir = ps.dir
	cmd.Stdout, cmd.Stderr = log, log
	ps.user.runAs(cmd)
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("testenv: %w", err)
	}
	p := &Process{done: make(chan struct{})}
	p.signal = func(sig string) error { return signalProcess(cmd.Process, sig) }
	go func() {
		p.err = cmd.Wait()
		_ = os.Remove(pidFile)
		close(p.done)
	}()
	ps.mu.Lock()
	defer ps.mu.Unlock()
	if ps.running == nil {
		ps.running = map[string]*Process{}
	}
	ps.running[name] = p
	return p, nil
}

func (ps *processes) close(context.Context) error {
	ps.mu.Lock()
	running := ps.running
	ps.running = nil
	ps.mu.Unlock()
	for _, p := range running {
		if p.Ended() {
			continue
		}
		stopProcess(p)
	}
	return os.RemoveAll(ps.dir)
}
