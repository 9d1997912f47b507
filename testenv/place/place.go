// Package place names the ways from a program to a PostgreSQL server that the tests cover, and starts them.
//
// A Place is a mode, a version of the pooler and a version of the server. Another PostgreSQL or PgBouncer is one entry in
// testenv/internal/suite; another pooler is one entry for each of its modes in this package's table of modes.
package place

import (
	"fmt"

	"github.com/bounceproof/bounceproof/testenv/internal/suite"
	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
)

// Mode says what stands between the program and the server, and how it hands out server connections. It is the name that tests show.
type Mode string

// The modes.
const (
	// Direct is no pooler at all.
	Direct Mode = "direct"
	// Session gives a client one server connection for as long as it is connected. Names of statements are the client's own.
	Session Mode = "session"
	// TransactionRaw shares server connections between transactions and forwards names of statements as they are: a client meets other
	// clients' names, and misses its own.
	TransactionRaw Mode = "transaction raw"
	// TransactionTracked shares server connections between transactions and keeps track of names, so that a client finds its own.
	TransactionTracked Mode = "transaction tracked"
	// Statement shares server connections between statements, forwards names, and refuses BEGIN.
	Statement Mode = "statement"
	// StatementTracked is Statement that keeps track of names.
	StatementTracked Mode = "statement tracked"
)

// Modes returns all modes, Direct first.
func Modes() []Mode {
	all := make([]Mode, len(modes))
	for i, m := range modes {
		all[i] = m.mode
	}
	return all
}

// Place is a way from a program to a server.
type Place struct {
	Mode Mode
	// Bouncer is the version of the pooler as major.minor, one of pgbouncer.Versions. Empty means any, and with Direct none.
	Bouncer string
	// Server is the major version of PostgreSQL, one of postgres.Versions. Empty means any.
	Server string
}

// New returns a Place. It is the literal without the names of its fields, for tables of tests.
func New(m Mode, bouncer, server string) Place {
	return Place{Mode: m, Bouncer: bouncer, Server: server}
}

// String returns the place as a name of a test: "transaction raw, PgBouncer 1.18, PostgreSQL 15".
func (p Place) String() string {
	s := string(p.Mode)
	if m, ok := entryOf(p.Mode); ok && m.pooler != "" {
		s += ", " + named(m.pooler, p.Bouncer)
	}
	return s + ", " + named("PostgreSQL", p.Server)
}

func named(program, version string) string {
	if version == "" {
		return "any " + program
	}
	return program + " " + version
}

// SharesServers reports whether the server connection under a client changes between its transactions or statements.
func (p Place) SharesServers() bool { m, _ := entryOf(p.Mode); return m.shares }

// ForwardsNames reports whether the pooler shares servers and passes names of prepared statements on as they are, so that a client's next
// request may meet a server that does not know them.
func (p Place) ForwardsNames() bool { m, _ := entryOf(p.Mode); return m.shares && !m.tracks }

// RefusesBegin reports whether the pooler refuses transactions of more than one statement.
func (p Place) RefusesBegin() bool { m, _ := entryOf(p.Mode); return m.refusesBegin }

// check returns what is wrong with a place, nil if nothing is. Whether this machine has the versions is another question.
func (p Place) check() error {
	m, ok := entryOf(p.Mode)
	switch {
	case !ok:
		return fmt.Errorf("testenv: place: mode %q is not one of %q", p.Mode, Modes())
	case m.pooler == "" && p.Bouncer != "":
		return fmt.Errorf("testenv: place: %s has no pooler, so no version %s of one", p.Mode, p.Bouncer)
	case m.tracks && p.Bouncer != "" && !pgbouncer.Tracks(p.Bouncer):
		return fmt.Errorf("testenv: place: %s: this version cannot keep track of statements", p)
	}
	return nil
}

// Suites returns the place of each Debian suite in a mode, oldest first: the PostgreSQL and the PgBouncer that one release ships together.
// Suites whose PgBouncer does not have the mode are left out.
func Suites(m Mode) []Place {
	var places []Place
	for _, s := range suite.All {
		p := Place{Mode: m, Bouncer: s.PgBouncer, Server: s.Postgres}
		if m == Direct {
			p.Bouncer = ""
		}
		if p.check() == nil {
			places = append(places, p)
		}
	}
	return places
}

// OneOfEachKind returns the fewest places in which a client meets everything that poolers do to names of statements: none, forwarding, and
// keeping track.
func OneOfEachKind() []Place {
	return []Place{New(Direct, "", "15"), New(TransactionRaw, "1.18", "15"), New(TransactionTracked, "1.24", "17")}
}

// Matrix returns every mode of every suite, and crosses between the suites.
func Matrix() []Place {
	var places []Place
	for _, m := range Modes() {
		places = append(places, Suites(m)...)
	}
	return append(places, New(TransactionRaw, "1.15", "18"), New(Session, "1.15", "17"), New(TransactionRaw, "1.18", "17"),
		New(Statement, "1.18", "13"), New(TransactionTracked, "1.24", "13"), New(TransactionTracked, "1.24", "18"),
		New(TransactionTracked, "1.26", "15"), New(TransactionRaw, "1.26", "13"))
}
