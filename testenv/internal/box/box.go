// Package box gives one server of the test environment a place to run: a container of a Debian suite's image, or
// a directory and local processes. Everything a box holds goes away with the process that opened it, however
// that process ends.
package box

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

// Options says what kind of box is wanted.
type Options struct {
	Program suite.Program
	Version string
	// Durable asks for storage that survives a crash of the machine (a volume, a disk) in place of memory.
	Durable bool
}

// Box is the place of one server. Its fields do not change.
type Box struct {
	// Name is unique among all boxes of all processes.
	Name string
	// Kind is "container" or "process".
	Kind string
	// Version is what the program itself says: "15.18", "1.18.0".
	Version string
	// Dir is an empty directory that belongs to the box, as programs in the box see it.
	Dir string
	// ListenHost and ListenPort are where the server in the box has to listen.
	ListenHost string
	ListenPort int
	// Host and Port are where this process reaches the server.
	Host string
	Port int

	bin     string
	place   place
	private bool   // the box is a container with a network of its own
	address string // and this is where other such containers reach it

	closeOnce sync.Once
	closeErr  error
}

// place is what the runtimes differ in.
type place interface {
	// write creates or replaces a file in the box's directory.
	write(ctx context.Context, name string, data []byte) error
	// start runs a program as an unprivileged user. Its output goes to log.
	start(ctx context.Context, name string, log io.Writer, argv []string) (*Process, error)
	// close removes everything.
	close(ctx context.Context) error
}

// Open returns a new box for o. The error is an *UnavailableError when this machine cannot provide it.
func Open(ctx context.Context, o Options) (*Box, error) {
	return open(ctx, o)
}

// Available reports why Open would not return a box, nil if it would as far as one can say without
// building an image.
func Available(ctx context.Context, p suite.Program, version string) error {
	_, err := find(ctx, Options{Program: p, Version: version})
	return err
}

// AddressFor returns the host and port at which a program in peer reaches the server in b.
func (b *Box) AddressFor(peer *Box) (host string, port int) {
	switch {
	case b.private && peer.private:
		return b.address, b.ListenPort
	case peer.private:
		return "host.docker.internal", b.Port // what Docker Desktop calls the machine
	default:
		return b.Host, b.Port
	}
}

// Bin returns the path of one of the server package's programs, such as initdb or pgbouncer.
func (b *Box) Bin(program string) string { return path.Join(b.bin, program) }

// Path returns the path of a file in the box's directory.
func (b *Box) Path(name string) string { return path.Join(b.Dir, name) }

// Write creates or replaces a file in the box's directory.
func (b *Box) Write(ctx context.Context, name string, data []byte) error {
	return b.place.write(ctx, name, data)
}

// Run runs a program to its end. A failure holds what the program wrote.
func (b *Box) Run(ctx context.Context, name string, argv ...string) error {
	var log Log
	p, err := b.place.start(ctx, name, &log, argv)
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

// Start starts a server. name is unique among the programs that run in the box at the same time.
func (b *Box) Start(ctx context.Context, name string, log io.Writer, argv ...string) (*Process, error) {
	return b.place.start(ctx, name, log, argv)
}

// Close ends what runs in the box and removes it.
func (b *Box) Close(ctx context.Context) error {
	b.closeOnce.Do(func() { b.closeErr = b.place.close(ctx) })
	return b.closeErr
}

// Process is a program that runs in a box.
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

// ErrPortTaken says that somebody else took the box's port first. A new box has another one.
var ErrPortTaken = errors.New("the port was taken meanwhile")

// HasPostgresLibrary reports whether a library for shared_preload_libraries is installed with the server.
func (b *Box) HasPostgresLibrary(name string) bool {
	if b.Kind == "container" {
		return true // Debian's package brings all of contrib
	}
	_, err := os.Stat(path.Join(b.bin, "..", "lib", name+".so"))
	return err == nil
}

var serial atomic.Int64

// nextName returns a name that no other box has.
func (r run) nextName(p suite.Program, version string) string {
	return fmt.Sprintf("bounceproof-%s-%s-%s-%d", r.id, strings.ToLower(string(p)), version, serial.Add(1))
}
