//go:build unix

package sandbox_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/ory/dockertest/v3/docker"

	"github.com/bounceproof/bounceproof/testenv/internal/engine"
	"github.com/bounceproof/bounceproof/testenv/internal/sandbox"
	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

const childEnv = "BOUNCEPROOF_TEST_CHILD"

// TestMain turns the test binary into the child of TestNothingSurvivesTheProcess.
func TestMain(m *testing.M) {
	if how := os.Getenv(childEnv); how != "" {
		child(how)
	}
	os.Exit(m.Run())
}

// child starts servers, says where they are, and ends in the given way, or waits for its end.
func child(how string) {
	tb := standIn{}
	s := postgres.Start(tb, postgres.Options{Dedicated: true, Durable: how == "exit"})
	b := pgbouncer.Start(tb, s, pgbouncer.Options{})
	dir, err := sandbox.RunDir()
	if err != nil {
		tb.Fatalf("%v", err)
	}
	fmt.Println("SERVERS", s.URL("postgres"), b.URL("postgres"), dir)
	_, _ = bufio.NewReader(os.Stdin).ReadString('\n') // the parent has looked
	switch how {
	case "panic":
		panic("as a test may")
	case "exit":
		os.Exit(3)
	}
	select {}
}

// standIn is a TB outside of any test: its cleanups never run.
type standIn struct{}

func (standIn) Helper()                    {}
func (standIn) Name() string               { return "child" }
func (standIn) Failed() bool               { return false }
func (standIn) Cleanup(func())             {}
func (standIn) Logf(f string, a ...any)    { fmt.Printf(f+"\n", a...) }
func (t standIn) Skipf(f string, a ...any) { fmt.Println("SKIP"); t.Fatalf(f, a...) }
func (standIn) Fatalf(f string, a ...any) {
	fmt.Printf(f+"\n", a...)
	os.Exit(1)
}

func TestNothingSurvivesTheProcess(t *testing.T) {
	t.Parallel()
	for _, runtime := range []string{"process", "container"} {
		for _, how := range []string{"SIGKILL", "SIGINT to the process group", "panic", "exit"} {
			t.Run(runtime+"/"+how, func(t *testing.T) {
				t.Parallel()
				testEnd(t, runtime, how)
			})
		}
	}
}

func testEnd(t *testing.T, runtime, how string) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), exe)
	cmd.Env = append(os.Environ(), childEnv+"="+how, "TESTENV_RUNTIME="+runtime, "TESTENV_KEEP=")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // as a shell does for what Ctrl-C ends
	cmd.Stderr = io.Discard                               // the panic
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	direct, pooled, dir := awaitServers(t, stdout)
	id := strings.TrimPrefix(filepath.Base(dir), sandbox.RunPrefix)

	// The control: all is there while the child lives.
	for _, url := range []string{direct, pooled} {
		if err := ping(t.Context(), url); err != nil {
			t.Fatalf("%s: %v", url, err)
		}
	}
	if _, err := os.Stat(dir); err != nil {
		t.Fatal(err)
	}
	if n := containers(t, id); runtime == "container" && n < 2 {
		t.Fatalf("the engine has %d containers and volumes of the run, want at least 2", n)
	}

	switch how {
	case "SIGKILL":
		err = syscall.Kill(cmd.Process.Pid, syscall.SIGKILL)
	case "SIGINT to the process group":
		err = syscall.Kill(-cmd.Process.Pid, syscall.SIGINT)
	default:
		_, err = stdin.Write([]byte("\n"))
	}
	if err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()

	deadline := time.Now().Add(20 * time.Second)
	for {
		left := leftovers(t, id, dir, direct, pooled)
		if left == "" {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("20 s after the end there is still: %s", left)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

func awaitServers(t *testing.T, stdout io.Reader) (direct, pooled, dir string) {
	t.Helper()
	var said strings.Builder
	lines := bufio.NewScanner(stdout)
	for lines.Scan() {
		if rest, ok := strings.CutPrefix(lines.Text(), "SERVERS "); ok {
			f := strings.Fields(rest)
			return f[0], f[1], f[2]
		}
		said.WriteString(lines.Text() + "\n")
	}
	if strings.HasPrefix(said.String(), "SKIP") && os.Getenv("TESTENV_REQUIRE") != "all" {
		t.Skip(said.String())
	}
	t.Fatalf("the child started no servers: %s", said.String())
	return
}

func leftovers(t *testing.T, id, dir, direct, pooled string) string {
	t.Helper()
	if ping(t.Context(), direct) == nil {
		return "PostgreSQL at " + direct
	}
	if ping(t.Context(), pooled) == nil {
		return "PgBouncer at " + pooled
	}
	for _, d := range []string{dir, filepath.Join(sandbox.DiskDir, filepath.Base(dir))} {
		if _, err := os.Stat(d); err == nil {
			return "the directory " + d
		}
	}
	// The process table knows what has no port any more.
	if out, _ := exec.CommandContext(t.Context(), "ps", "-eo", "args").Output(); strings.Contains(string(out), dir) {
		return "a process"
	}
	if n := containers(t, id); n > 0 {
		return fmt.Sprintf("%d containers or volumes", n)
	}
	return ""
}

func ping(ctx context.Context, url string) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(ctx) }()
	_, err = conn.Exec(ctx, "select 1")
	return err
}

// containers counts the containers and volumes of a run.
func containers(t *testing.T, id string) int {
	t.Helper()
	e, err := engine.Connect()
	if err != nil {
		return 0
	}
	filter := map[string][]string{"label": {engine.LabelRun + "=" + id}}
	cs, err := e.Pool.Client.ListContainers(docker.ListContainersOptions{All: true, Filters: filter})
	if err != nil {
		t.Fatal(err)
	}
	vs, err := e.Pool.Client.ListVolumes(docker.ListVolumesOptions{Filters: filter})
	if err != nil {
		t.Fatal(err)
	}
	return len(cs) + len(vs)
}
