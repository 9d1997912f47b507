//go:build unix

package sandbox

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"strconv"
	"syscall"
	"time"
)

// account is the user servers run as. The zero value is the current user.
type account struct {
	switched bool
	uid, gid int
}

// unprivileged returns the account for servers: PostgreSQL refuses to run as root.
func unprivileged() (account, error) {
	if os.Geteuid() != 0 {
		return account{}, nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, err1 := strconv.Atoi(u.Uid)
		gid, err2 := strconv.Atoi(u.Gid)
		if err := errors.Join(err1, err2); err != nil {
			return account{}, fmt.Errorf("testenv: user %s: %w", name, err)
		}
		return account{switched: true, uid: uid, gid: gid}, nil
	}
	return account{}, errors.New("testenv: root cannot run PostgreSQL, and there is neither a user postgres nor nobody")
}

func (a account) own(path string) error {
	if !a.switched {
		return nil
	}
	return os.Chown(path, a.uid, a.gid)
}

// runAs makes cmd run as a, in a session of its own: Ctrl-C in a terminal must not reach the servers, or they
// would be gone before the tests that report about them.
func (a account) runAs(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if a.switched {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uint32(a.uid), Gid: uint32(a.gid)} //nolint:gosec // ids from the system
	}
}

var signals = map[string]syscall.Signal{
	"HUP": syscall.SIGHUP, "INT": syscall.SIGINT, "QUIT": syscall.SIGQUIT, "TERM": syscall.SIGTERM,
	"KILL": syscall.SIGKILL, "STOP": syscall.SIGSTOP, "CONT": syscall.SIGCONT,
}

func signalProcess(p *os.Process, name string) error {
	sig, ok := signals[name]
	if !ok {
		return fmt.Errorf("testenv: unknown signal %q", name)
	}
	err := p.Signal(sig)
	if errors.Is(err, os.ErrProcessDone) {
		return nil
	}
	return err
}

// stopProcess ends p: SIGQUIT lets a postmaster take its children along at once, SIGKILL ends the rest.
func stopProcess(p *Process) {
	_ = p.Signal("CONT")
	_ = p.Signal("QUIT")
	select {
	case <-p.Done():
		return
	case <-time.After(5 * time.Second):
	}
	_ = p.Signal("KILL")
	<-p.Done()
}

// detach makes cmd survive the signals that end this process and its terminal.
func detach(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} }
