package engine

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/ory/dockertest/v3/docker"

	"github.com/bounceproof/bounceproof/testenv/internal/filelock"
	"github.com/bounceproof/bounceproof/testenv/internal/suite"
)

const repository = "bounceproof-testenv"

// WorkDir is an empty directory in every image, for the server that runs there. A volume that is mounted there inherits its owner and
// mode, a tmpfs (by runc) its mode. Its path is part of the recipe, so a new one would build all images anew.
const WorkDir = "/box"

// dockerfile finishes every image, whatever its base: the directory for servers, and a shell for exec.
const dockerfile = `FROM %s
RUN install -d -o postgres -g postgres -m 1777 ` + WorkDir + `
LABEL %s
CMD ["sleep", "infinity"]
`

// Image is a built image.
type Image struct {
	Repository, Tag string
	Postgres        string // 15.18
	PgBouncer       string // 1.18.0
}

// Version returns the version of p in the image.
func (i Image) Version(p suite.Program) string {
	if p == suite.PgBouncer {
		return i.PgBouncer
	}
	return i.Postgres
}

// tag names the image of a suite. It changes with the recipe, so that an old image is not taken for a new one.
func tag(s suite.Suite) string {
	sum := sha256.Sum256([]byte(dockerfile + debianDockerfile + strings.Join(mmdebstrapArgs(s.Name), "\n")))
	return s.Name + "-" + hex.EncodeToString(sum[:6])
}

// Has returns the image of a suite if it is built.
func (e *Engine) Has(s suite.Suite) (Image, bool) {
	img, err := e.Pool.Client.InspectImage(repository + ":" + tag(s))
	if err != nil || img.Config == nil {
		return Image{}, false
	}
	return Image{
		Repository: repository, Tag: tag(s),
		Postgres:  img.Config.Labels[labelPostgres],
		PgBouncer: img.Config.Labels[labelPgBouncer],
	}, true
}

// failureMemory is how long a failed build keeps other processes from trying the same.
const failureMemory = 10 * time.Minute

// Failed returns the error of a recent build of s that failed, nil if there was none.
func (e *Engine) Failed(s suite.Suite) error {
	name := filepath.Join(filelock.Dir(), tag(s)+".failed")
	info, err := os.Stat(name)
	if err != nil || time.Since(info.ModTime()) > failureMemory {
		return nil
	}
	said, err := os.ReadFile(name)
	if err != nil {
		return nil
	}
	return errors.New(strings.TrimSpace(string(said)))
}

// Forget forgets a recent failure of s.
func (e *Engine) Forget(s suite.Suite) {
	_ = os.Remove(filepath.Join(filelock.Dir(), tag(s)+".failed"))
}

// Ensure returns the image of a suite and builds it first if need be, which takes half a minute to two. Processes that
// want the same image at once wait for the one that builds it.
func (e *Engine) Ensure(ctx context.Context, s suite.Suite) (Image, error) {
	if img, ok := e.Has(s); ok {
		return img, nil
	}
	unlock, err := filelock.Lock(tag(s))
	if err != nil {
		return Image{}, err
	}
	defer unlock()
	if img, ok := e.Has(s); ok { // built while we waited
		return img, nil
	}
	if err := e.Failed(s); err != nil {
		return Image{}, err
	}
	img, err := e.build(ctx, s)
	if err != nil {
		_ = os.WriteFile(filepath.Join(filelock.Dir(), tag(s)+".failed"), []byte(err.Error()), 0o600)
		return Image{}, err
	}
	return img, nil
}

func (e *Engine) build(ctx context.Context, s suite.Suite) (Image, error) {
	base := repository + ":" + s.Name + "-base"
	fromRegistry := e.buildFromRegistry(ctx, s, base)
	if fromRegistry != nil {
		if err := e.importDebian(ctx, s, base); err != nil {
			return Image{}, fmt.Errorf("no image for Debian %s: %w; before that %w", s.Name, err, fromRegistry)
		}
	}
	defer func() { _ = e.Pool.Client.RemoveImage(base) }() // only its name goes: the image is the parent of ours
	img, err := e.versions(ctx, base)
	if err != nil {
		return Image{}, err
	}
	labels := fmt.Sprintf("%s=%s %s=%s %s=%s", labelSuite, s.Name, labelPostgres, img.Postgres, labelPgBouncer, img.PgBouncer)
	img.Repository, img.Tag = repository, tag(s)
	return img, e.dockerBuild(ctx, img.Repository+":"+img.Tag, fmt.Sprintf(dockerfile, base, labels))
}

// buildFromRegistry builds the base from Debian's image in a registry.
func (e *Engine) buildFromRegistry(ctx context.Context, s suite.Suite, base string) error {
	if err := e.pull(ctx, "debian", s.Name+"-slim"); err != nil {
		return err
	}
	return e.dockerBuild(ctx, base, fmt.Sprintf(debianDockerfile, s.Name, mirrors()[0], s.Name))
}

// registryPatience is how long a registry may take to answer. A machine without one often waits for a timeout.
const registryPatience = 8 * time.Second

// pull pulls an image. Once the registry has answered the download may take its time.
func (e *Engine) pull(ctx context.Context, repository, tag string) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	timer := time.AfterFunc(registryPatience, func() { cancel(errors.New("the registry did not answer in time")) })
	defer timer.Stop()
	progress := writerFunc(func(p []byte) (int, error) {
		timer.Stop()
		return len(p), nil
	})
	err := e.Pool.Client.PullImage(docker.PullImageOptions{Repository: repository, Tag: tag, OutputStream: progress, Context: ctx},
		docker.AuthConfiguration{})
	if err != nil {
		return fmt.Errorf("pull %s:%s: %w", repository, tag, errors.Join(err, context.Cause(ctx)))
	}
	return nil
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// dockerBuild builds an image from a Dockerfile without a context.
func (e *Engine) dockerBuild(ctx context.Context, name, file string) error {
	var buildContext, out bytes.Buffer
	w := tar.NewWriter(&buildContext)
	if err := w.WriteHeader(&tar.Header{Name: "Dockerfile", Mode: 0o644, Size: int64(len(file))}); err != nil {
		return err
	}
	if _, err := w.Write([]byte(file)); err != nil {
		return err
	}
	if err := w.Close(); err != nil {
		return err
	}
	err := e.Pool.Client.BuildImage(docker.BuildImageOptions{
		Name: name, Dockerfile: "Dockerfile", InputStream: &buildContext, OutputStream: &out,
		RmTmpContainer: true, ForceRmTmpContainer: true, NetworkMode: "host", Context: ctx,
	})
	if err != nil {
		return fmt.Errorf("build %s: %w\n%s", name, err, lastLines(out.String(), 10))
	}
	return nil
}

var versionPattern = regexp.MustCompile(`PostgreSQL\) ([0-9.a-z]+)(?s:.*)PgBouncer ([0-9.]+)`)

// versions asks the programs in an image for their versions.
func (e *Engine) versions(ctx context.Context, image string) (Image, error) {
	c := e.Pool.Client
	ctr, err := c.CreateContainer(docker.CreateContainerOptions{
		Config: &docker.Config{
			Image:  image,
			Cmd:    []string{"sh", "-c", "/usr/lib/postgresql/*/bin/postgres --version; /usr/sbin/pgbouncer --version"},
			User:   "postgres",
			Labels: map[string]string{LabelRun: "build"}, // so that make clean finds it if this process dies
		},
		HostConfig: &docker.HostConfig{NetworkMode: "none"},
		Context:    ctx,
	})
	if err != nil {
		return Image{}, err
	}
	defer func() {
		_ = c.RemoveContainer(docker.RemoveContainerOptions{ID: ctr.ID, Force: true, Context: context.WithoutCancel(ctx)})
	}()
	if err := c.StartContainerWithContext(ctr.ID, nil, ctx); err != nil {
		return Image{}, err
	}
	if _, err := c.WaitContainerWithContext(ctr.ID, ctx); err != nil {
		return Image{}, err
	}
	var out bytes.Buffer
	err = c.Logs(docker.LogsOptions{Container: ctr.ID, Stdout: true, Stderr: true, OutputStream: &out, ErrorStream: &out, Context: ctx})
	if err != nil {
		return Image{}, err
	}
	m := versionPattern.FindStringSubmatch(out.String())
	if m == nil {
		return Image{}, fmt.Errorf("the programs in %s do not say their versions: %s", image, out.String())
	}
	return Image{Postgres: m[1], PgBouncer: m[2]}, nil
}

func lastLines(s string, n int) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}
