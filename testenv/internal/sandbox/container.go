package sandbox

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"time"

	"github.com/ory/dockertest/v3"
	"github.com/ory/dockertest/v3/docker"

	"github.com/bounceproof/bounceproof/testenv/internal/engine"
	"github.com/bounceproof/bounceproof/testenv/internal/suite"
)

// buildTimeout bounds the building of an image.
const buildTimeout = 8 * time.Minute

// containerRuntime opens sandboxes in containers of one suite.
type containerRuntime struct {
	engine *engine.Engine
	suite  suite.Suite
}

// findContainer returns the runtime if an engine answers and the suite's image is there or can be tried.
func findContainer(p suite.Program, version string) (*containerRuntime, error) {
	s, ok := suite.Of(p, version)
	if !ok {
		return nil, fmt.Errorf("no Debian suite brings %s %s", p, version)
	}
	e, err := engine.Connect()
	if err != nil {
		return nil, err
	}
	img, ok := e.Has(s)
	if !ok {
		if err := e.Failed(s); err != nil {
			return nil, err
		}
		return &containerRuntime{engine: e, suite: s}, nil
	}
	return &containerRuntime{engine: e, suite: s}, rightVersion(img, s, p)
}

// rightVersion guards against a suite that has moved on, as one does that is not released yet.
func rightVersion(img engine.Image, s suite.Suite, p suite.Program) error {
	if got := img.Version(p); !isVersion(got, s.Version(p)) {
		return fmt.Errorf("debian %s brings %s %s now, not %s (testenv/internal/suite)", s.Name, p, got, s.Version(p))
	}
	return nil
}

// engineMarker is a file in the run's directory that tells the watchdog to look for containers.
const engineMarker = "engine"

func (c *containerRuntime) open(ctx context.Context, o Options) (*Sandbox, error) {
	img, ok := c.engine.Has(c.suite)
	if !ok {
		return nil, fmt.Errorf("testenv: the image of Debian %s has vanished", c.suite.Name)
	}
	r, err := currentRun()
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(r.dir, engineMarker), nil, 0o600); err != nil {
		return nil, fmt.Errorf("testenv: %w", err)
	}
	sb := &Sandbox{
		Name: r.nextName(o.Program, o.Version), Kind: "container", Version: img.Version(o.Program),
		Dir: engine.WorkDir, ListenHost: loopback, Host: loopback, bin: "/usr/sbin",
	}
	if o.Program == suite.Postgres {
		sb.bin = "/usr/lib/postgresql/" + o.Version + "/bin"
	}
	if !c.engine.HostNetwork {
		sb.ListenHost, sb.ListenPort = "*", containerPort
	} else if sb.ListenPort, err = freePort(); err != nil {
		return nil, err
	}
	sb.Port = sb.ListenPort
	pl, err := c.run(ctx, sb, r, img, o)
	if err != nil {
		return nil, fmt.Errorf("testenv: container %s: %w", sb.Name, err)
	}
	sb.backend = pl
	return sb, nil
}

// prepare builds the image if need be.
func (c *containerRuntime) prepare(ctx context.Context, o Options) error {
	ctx, cancel := context.WithTimeout(ctx, buildTimeout)
	defer cancel()
	img, err := c.engine.Ensure(ctx, c.suite)
	if err != nil {
		return err
	}
	return rightVersion(img, c.suite, o.Program)
}

// containerPort is where servers listen in a container with a network of its own.
const containerPort = 5432

// run starts the container that is b. Its main program only waits: servers are started in it by exec, so that one can be
// killed and started again while its data, in memory, stays.
func (c *containerRuntime) run(ctx context.Context, sb *Sandbox, r run, img engine.Image, o Options) (_ *container, err error) {
	labels := map[string]string{engine.LabelRun: r.id}
	pl := &container{client: c.engine.Pool.Client, id: sb.Name}
	defer func() {
		if err != nil {
			_ = pl.close(context.WithoutCancel(ctx))
		}
	}()
	if o.Durable {
		_, err := c.engine.Pool.Client.CreateVolume(docker.CreateVolumeOptions{Name: sb.Name, Labels: labels, Context: ctx})
		if err != nil {
			return nil, err
		}
		pl.volume = sb.Name
	}
	port := docker.Port(strconv.Itoa(containerPort) + "/tcp")
	opts := &dockertest.RunOptions{
		Name: sb.Name, Repository: img.Repository, Tag: img.Tag, User: "postgres", Labels: labels,
		Cmd: []string{"sleep", "infinity"},
	}
	if !c.engine.HostNetwork {
		opts.ExposedPorts = []string{string(port)}
	}
	res, err := c.engine.Pool.RunWithOptions(opts, func(hc *docker.HostConfig) {
		hc.PublishAllPorts = false
		hc.Init = true // reaps what a killed server leaves
		hc.ShmSize = 1 << 30
		if c.engine.HostNetwork {
			hc.NetworkMode = "host"
		} else {
			hc.PortBindings = map[docker.Port][]docker.PortBinding{port: {{HostIP: loopback}}}
		}
		if o.Durable {
			hc.Mounts = []docker.HostMount{{Type: "volume", Source: pl.volume, Target: engine.WorkDir}}
		} else {
			// The layer of a container is several times slower than memory.
			hc.Tmpfs = map[string]string{engine.WorkDir: "rw,mode=1777"}
		}
	})
	if err != nil {
		return nil, err
	}
	if !c.engine.HostNetwork {
		sb.private = true
		sb.address = res.Container.NetworkSettings.IPAddress
		if sb.Port, err = strconv.Atoi(res.GetPort(string(port))); err != nil {
			return nil, fmt.Errorf("published port: %w", err)
		}
	}
	return pl, nil
}

// container is a sandbox in a container.
type container struct {
	client *docker.Client
	id     string
	volume string // empty without one
}

func (c *container) write(ctx context.Context, name string, data []byte) error {
	// Copying through the engine's API does not reach a tmpfs. The text goes through the standard input: every user of the machine can read
	// the command line. head does not wait for its end, which not every connection to an engine tells.
	e, err := c.client.CreateExec(docker.CreateExecOptions{
		Container: c.id, AttachStdin: true, AttachStdout: true, AttachStderr: true, Context: ctx,
		Cmd: []string{"sh", "-c", `umask 077 && head -c "$1" >"$0"`, path.Join(engine.WorkDir, name), strconv.Itoa(len(data))},
	})
	if err != nil {
		return fmt.Errorf("testenv: exec: %w", err)
	}
	var said Log
	err = c.client.StartExec(e.ID, docker.StartExecOptions{InputStream: bytes.NewReader(data), OutputStream: &said, ErrorStream: &said, Context: ctx})
	if err != nil {
		return fmt.Errorf("testenv: exec: %w", err)
	}
	code, err := c.exitCode(e.ID)
	if err == nil && code != 0 {
		err = fmt.Errorf("testenv: writing %s: exit status %d: %s", name, code, said.String())
	}
	return err
}

// exec runs a program to its end.
func (c *container) exec(ctx context.Context, log io.Writer, argv []string) (code int, err error) {
	e, err := c.client.CreateExec(docker.CreateExecOptions{
		Container: c.id, Cmd: argv, AttachStdout: true, AttachStderr: true, Context: ctx,
	})
	if err != nil {
		return 0, fmt.Errorf("testenv: exec: %w", err)
	}
	if err := c.client.StartExec(e.ID, docker.StartExecOptions{OutputStream: log, ErrorStream: log, Context: ctx}); err != nil {
		return 0, fmt.Errorf("testenv: exec: %w", err)
	}
	return c.exitCode(e.ID)
}

// exitCode returns the exit code of an exec whose output has ended.
func (c *container) exitCode(id string) (int, error) {
	for {
		info, err := c.client.InspectExec(id)
		if err != nil {
			return 0, fmt.Errorf("testenv: exec: %w", err)
		}
		if !info.Running {
			return info.ExitCode, nil
		}
		time.Sleep(5 * time.Millisecond) // its output has ended, so it is about to
	}
}

func (c *container) start(ctx context.Context, name string, log io.Writer, argv []string) (*Process, error) {
	pidFile := path.Join(engine.WorkDir, name+pidSuffix)
	e, err := c.client.CreateExec(docker.CreateExecOptions{
		Container: c.id, AttachStdout: true, AttachStderr: true, Context: ctx,
		Cmd: append([]string{"sh", "-c", `echo $$ >"$0" && exec "$@"`, pidFile}, argv...),
	})
	if err != nil {
		return nil, fmt.Errorf("testenv: exec: %w", err)
	}
	// No context: the program outlives the call that started it.
	attached, err := c.client.StartExecNonBlocking(e.ID, docker.StartExecOptions{OutputStream: log, ErrorStream: log})
	if err != nil {
		return nil, fmt.Errorf("testenv: exec: %w", err)
	}
	p := &Process{done: make(chan struct{})}
	p.signal = func(sig string) error {
		_, err := c.exec(context.Background(), io.Discard, []string{"sh", "-c", `kill -s "$1" "$(cat "$0")"`, pidFile, sig})
		return err
	}
	go func() {
		defer close(p.done)
		if p.err = attached.Wait(); p.err != nil {
			return
		}
		code, err := c.exitCode(e.ID)
		switch {
		case err != nil:
			p.err = err
		case code != 0:
			p.err = fmt.Errorf("exit status %d", code)
		}
	}()
	return p, nil
}

func (c *container) close(ctx context.Context) error {
	err := c.client.RemoveContainer(docker.RemoveContainerOptions{ID: c.id, Force: true, RemoveVolumes: true, Context: ctx})
	if c.volume != "" {
		if verr := c.client.RemoveVolumeWithOptions(docker.RemoveVolumeOptions{Name: c.volume, Force: true, Context: ctx}); err == nil {
			err = verr
		}
	}
	return err
}
