//go:build !unix

package sandbox

import (
	"errors"
	"os"
	"os/exec"
)

// Elsewhere only containers are offered: what follows lets the package compile.

type account struct{}

func unprivileged() (account, error) {
	return account{}, errors.New("testenv: local processes need a Unix system; use containers")
}

func (account) own(string) error { return nil }

func (account) runAs(*exec.Cmd) {}

func signalProcess(p *os.Process, _ string) error { return p.Kill() }

func stopProcess(p *Process) {
	_ = p.Signal("KILL")
	<-p.Done()
}

func detach(*exec.Cmd) {}
