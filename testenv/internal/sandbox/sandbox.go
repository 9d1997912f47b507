// Package sandbox gives one server of the test environment a place to run: a container of a Debian suite's image, or
// a directory and local processes. Everything a sandbox holds goes away with the process that opened it, however
// that process ends.
package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/bounceproof/bounceproof/testenv/internal/suite"
)

// Options says what kind of sandbox is wanted.
type Options struct {
	Program suite.Program
	Version string
	// Durable asks for storage that survives a crash of the machine (a volume, a disk) in place of memory.
	Durable bool
}

// Sandbox is where one server runs. Its fields do not change.
type Sandbox struct {
	// Name is unique among all sandboxes of all processes.
	Name string
	// Kind is "container" or "process".
	Kind string
	// Version is what the program itself says: "15.18", "1.18.0".
	Version string
	// Dir is an empty directory that belongs to the sandbox, as programs in the sandbox see it.
	Dir string
	// ListenHost and ListenPort are where the server in the sandbox has to listen.
	ListenHost string
	ListenPort int
	// Host and Port are where this process reaches the server.
	Host string
	Port int

	bin     string
	backend backend
	private bool   // the sandbox is a container with a network of its own
	address string // and this is where other such containers reach it

	closeOnce sync.Once
	closeErr  error
}

// backend is what the runtimes differ in.
type backend interface {
	// write creates or replaces a file in the sandbox's directory.
	write(ctx context.Context, name string, data []byte) error
	// start runs a program as an unprivileged user. Its output goes to log.
	start(ctx context.Context, name string, log io.Writer, argv []string) (*Process, error)
	// close removes everything.
	close(ctx context.Context) error
}

// Open returns a new sandbox for o. The error is an *UnavailableError when this machine cannot provide it.
func Open(ctx context.Context, o Options) (*Sandbox, error) {
	return open(ctx, o)
}

// Available reports why Open would not return a sandbox, nil if it would as far as one can say without
// building an image.
func Available(ctx context.Context, p suite.Program, version string) error {
	_, err := find(ctx, Options{Program: p, Version: version})
	return err
}

// AddressFor returns the host and port at which a program in peer reaches the server in b.
func (sb *Sandbox) AddressFor(peer *Sandbox) (host string, port int) {
	switch {
	case sb.private && peer.private:
		return sb.address, sb.ListenPort
	case peer.private:
		return "host.docker.internal", sb.Port // what Docker Desktop calls the machine
	default:
		return sb.Host, sb.Port
	}
}

// Bin returns the path of one of the server package's programs, such as initdb or pgbouncer.
func (sb *Sandbox) Bin(program string) string { return path.Join(sb.bin, program) }

// Path returns the path of a file in the sandbox's directory.
func (sb *Sandbox) Path(name string) string { return path.Join(sb.Dir, name) }

// Write creates or replaces a file in the sandbox's directory.
func (sb *Sandbox) Write(ctx context.Context, name string, data []byte) error {
	return sb.backend.write(ctx, name, data)
}

// Run runs a program to its end. A failure holds what the program wrote.
func (sb *Sandbox) Run(ctx context.Context, name string, argv ...string) error {
	var log Log
	p, err := sb.backend.start(ctx, name, &log, argv)
	if err != nil {
		return err
	}
	select {
	case <-p.Done():
	case <-ctx.Done():
		_ = p.Signal("KILL")
		return ctx.Err()
	}
	if p.err != nil {
		return fmt.Errorf("%s: %w\n%s", path.Base(argv[0]), p.err, log.Tail(20))
	}
	return nil
}

// Start starts a server. name is unique among the programs that run in the sandbox at the same time.
func (sb *Sandbox) Start(ctx context.Context, name string, log io.Writer, argv ...string) (*Process, error) {
	return sb.backend.start(ctx, name, log, argv)
}

// Close ends what runs in the sandbox and removes it.
func (sb *Sandbox) Close(ctx context.Context) error {
	sb.closeOnce.Do(func() { sb.closeErr = sb.backend.close(ctx) })
	return sb.closeErr
}

// Process is a program that runs in a sandbox.
type Process struct {
	signal func(name string) error
	done   chan struct{}
	err    error // set before done is closed
}

// Signal sends a signal, named as kill(1) does: "TERM", "KILL", "HUP".
func (p *Process) Signal(name string) error { return p.signal(name) }

// Done is closed when the program has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// Ended reports whether the program has ended.
func (p *Process) Ended() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// UnavailableError says why a version cannot be had on this machine.
type UnavailableError struct {
	Program suite.Program
	Version string
	Reason  string
	// Try is the command that would make it available.
	Try string
	// Err holds the errors behind Reason.
	Err error
}

func (e *UnavailableError) Unwrap() error { return e.Err }

func (e *UnavailableError) Error() string {
	return fmt.Sprintf("%s %s is not available here: %s; run: %s", e.Program, e.Version, e.Reason, e.Try)
}

// ErrPortTaken says that somebody else took the sandbox's port first. A new sandbox has another one.
var ErrPortTaken = errors.New("the port was taken meanwhile")

// HasPostgresLibrary reports whether a library for shared_preload_libraries is installed with the server.
func (sb *Sandbox) HasPostgresLibrary(name string) bool {
	if sb.Kind == "container" {
		return true // Debian's package brings all of contrib
	}
	_, err := os.Stat(path.Join(sb.bin, "..", "lib", name+".so"))
	return err == nil
}

var serial atomic.Int64

// nextName returns a name that no other sandbox has.
func (r run) nextName(p suite.Program, version string) string {
	return fmt.Sprintf("bounceproof-%s-%s-%s-%d", r.id, strings.ToLower(string(p)), version, serial.Add(1))
}
