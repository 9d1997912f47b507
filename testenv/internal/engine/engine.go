// Package engine finds a Docker engine and builds the images of the test environment in it.
package engine

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"sync"
	"time"

	"github.com/ory/dockertest/v3"
	"github.com/ory/dockertest/v3/docker"
)

// Labels mark everything that the test environment makes, and are all it removes by.
const (
	LabelRun       = "bounceproof.testenv.run"       // containers and volumes: the run that made them
	labelSuite     = "bounceproof.testenv.suite"     // images
	labelPostgres  = "bounceproof.testenv.postgres"  // images: the version as the program says it
	labelPgBouncer = "bounceproof.testenv.pgbouncer" // likewise
)

// Engine is a Docker engine that answered.
type Engine struct {
	Pool *dockertest.Pool
	// HostNetwork says that a container can share the network of this machine. A published port has a proxy in its
	// path, which costs two thirds of the throughput of small queries.
	HostNetwork bool
}

// Connect returns the engine that DOCKER_HOST or the default socket leads to. It asks once per process.
func Connect() (*Engine, error) { return connect() }

var connect = sync.OnceValues(func() (*Engine, error) {
	pool, err := dockertest.NewPool("")
	if err != nil {
		return nil, fmt.Errorf("no Docker engine: %w", err)
	}
	// A socket that is there answers at once; an address behind a firewall never does.
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
	defer cancel()
	if err := pool.Client.PingWithContext(ctx); err != nil {
		return nil, fmt.Errorf("no Docker engine answers: %w", err)
	}
	info, err := pool.Client.Info()
	if err != nil {
		return nil, fmt.Errorf("no Docker engine answers: %w", err)
	}
	if info.OSType != "linux" {
		return nil, fmt.Errorf("the Docker engine runs %s containers, not Linux ones", info.OSType)
	}
	// Docker Desktop's engine lives in a virtual machine, whose network would be shared.
	host := runtime.GOOS == "linux" && info.OperatingSystem != "Docker Desktop" && isLocal(pool.Client)
	if os.Getenv("TESTENV_NETWORK") == "publish" {
		host = false
	}
	return &Engine{Pool: pool, HostNetwork: host}, nil
})

// isLocal reports whether the engine is reached through a socket of this machine.
func isLocal(c *docker.Client) bool {
	const unix = "unix://"
	e := c.Endpoint()
	return len(e) > len(unix) && e[:len(unix)] == unix
}

// RemoveRun removes the containers and volumes of a run.
func (e *Engine) RemoveRun(ctx context.Context, id string) error {
	return e.remove(ctx, LabelRun+"="+id)
}

// RemoveAll removes the containers and volumes of all runs, also of those that are still going on.
func (e *Engine) RemoveAll(ctx context.Context) error { return e.remove(ctx, LabelRun) }

func (e *Engine) remove(ctx context.Context, label string) error {
	filter := map[string][]string{"label": {label}}
	var last error
	// The engine may still be at work for a process that was killed: look until twice there was nothing.
	for quiet := 0; quiet < 2 && ctx.Err() == nil; {
		cs, err := e.Pool.Client.ListContainers(docker.ListContainersOptions{All: true, Filters: filter, Context: ctx})
		if err != nil {
			return err
		}
		for _, c := range cs {
			last = e.Pool.Client.RemoveContainer(docker.RemoveContainerOptions{ID: c.ID, Force: true, RemoveVolumes: true, Context: ctx})
		}
		vs, err := e.Pool.Client.ListVolumes(docker.ListVolumesOptions{Filters: filter, Context: ctx})
		if err != nil {
			return err
		}
		for _, v := range vs {
			last = e.Pool.Client.RemoveVolumeWithOptions(docker.RemoveVolumeOptions{Name: v.Name, Force: true, Context: ctx})
		}
		if len(cs)+len(vs) > 0 {
			quiet = 0
			continue
		}
		last = nil
		quiet++
		time.Sleep(100 * time.Millisecond)
	}
	if last != nil {
		return last
	}
	return ctx.Err()
}
