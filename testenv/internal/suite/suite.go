// Package suite says which Debian suite brings which PostgreSQL and which PgBouncer.
package suite

import (
	"os"
	"strings"
)

// Suite is a Debian release. Its archive holds one PostgreSQL and one PgBouncer, so four suites give eight
// versions without building anything from source.
type Suite struct {
	Name      string // Debian's code name
	Postgres  string // major version of the package postgresql
	PgBouncer string // major.minor version of the package pgbouncer
}

// All holds the suites, oldest first.
var All = []Suite{
	{Name: "bullseye", Postgres: "13", PgBouncer: "1.15"},
	{Name: "bookworm", Postgres: "15", PgBouncer: "1.18"},
	{Name: "trixie", Postgres: "17", PgBouncer: "1.24"},
	{Name: "forky", Postgres: "18", PgBouncer: "1.26"},
}

// Program is one of the two programs a suite brings.
type Program string

// The programs.
const (
	Postgres  Program = "PostgreSQL"
	PgBouncer Program = "PgBouncer"
)

// Installable reports whether the suite's packages can be installed on this machine, which runs that suite.
func (s Suite) Installable() bool {
	data, err := os.ReadFile("/etc/os-release")
	return err == nil && strings.Contains(string(data), "\nVERSION_CODENAME="+s.Name+"\n")
}

// Version returns the version of p in s.
func (s Suite) Version(p Program) string {
	if p == PgBouncer {
		return s.PgBouncer
	}
	return s.Postgres
}

// Of returns the suite that brings p in the given version.
func Of(p Program, version string) (Suite, bool) {
	for _, s := range All {
		if s.Version(p) == version {
			return s, true
		}
	}
	return Suite{}, false
}

// Versions returns the versions of p in all suites, oldest first.
func Versions(p Program) []string {
	vs := make([]string, len(All))
	for i, s := range All {
		vs[i] = s.Version(p)
	}
	return vs
}
