// Package connstring reads connection strings, for the library and the command alike. No error of it holds a piece of what it was given: with a
// slash, an at sign or a space in a password a piece of the password stands where something else is expected, and pgx's own errors repeat that.
package connstring

import (
	"errors"
	"fmt"
	"io/fs"
	"regexp"
	"slices"
	"strings"
	"unicode"

	"github.com/jackc/pgx/v5/pgxpool"
)

// Only what cannot be a piece of a password is named: a key, a scheme that is known, the file of a certificate.
var (
	errUnreadable = errors.New("the connection string cannot be parsed; it is postgres://user:password@host:port/database or " +
		"\"host=... port=... dbname=... user=...\", and in the first form special characters of the password are written as %XX")
	errAtSign = errors.New("the connection string has an @, a / or a ? too many, most likely in the password; " +
		"there they are written as %40, %2F and %3F")
	errHost = errors.New("the host in the connection string is no name of a host; if that is a piece of the password, " +
		"write its special characters as %XX: @ as %40, : as %3A, / as %2F")
	errJDBC = errors.New("jdbc: is for Java; leave it out: postgres://user:password@host:port/database")
)

// Parse reads a connection string as pgxpool.ParseConfig does, PG… variables included, and refuses what that would read in another way than was meant.
// An error says what is wrong in words of its own, and wraps none of pgx's, whose fields hold the whole string. Safe for concurrent use.
func Parse(s string) (*pgxpool.Config, error) {
	if err := checkForm(s); err != nil {
		return nil, err
	}
	cfg, err := pgxpool.ParseConfig(s)
	if err != nil {
		return nil, parseError(err)
	}
	hosts := []string{cfg.ConnConfig.Host}
	for _, f := range cfg.ConnConfig.Fallbacks {
		hosts = append(hosts, f.Host)
	}
	for _, host := range hosts {
		if !isHost(host) {
			return nil, errHost
		}
	}
	for name := range cfg.ConnConfig.RuntimeParams {
		if !parameterName.MatchString(name) {
			return nil, errUnreadable
		}
	}
	return cfg, nil
}

// parameterName is what a parameter can be called; another one is a piece of something else.
var parameterName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_.$]*$`)

// foreign are schemes of other things, which people have in variables of the same name.
var foreign = []string{"mysql", "mariadb", "mssql", "sqlserver", "oracle", "sqlite", "sqlite3", "mongodb", "redis", "http", "https", "cockroachdb", "pgsql", "psql", "postgre"}

// checkForm refuses what pgx would read in another way than was meant.
func checkForm(s string) error {
	s = strings.TrimSpace(s)
	if strings.HasPrefix(s, "jdbc:") {
		return errJDBC
	}
	rest, isURL := strings.CutPrefix(s, "postgres://")
	if !isURL {
		rest, isURL = strings.CutPrefix(s, "postgresql://")
	}
	if !isURL {
		scheme, _, found := strings.Cut(s, "://")
		scheme = strings.ToLower(scheme)
		dialect, _, _ := strings.Cut(scheme, "+")
		switch {
		case !found:
		case dialect == "postgres" || dialect == "postgresql":
			return errors.New("the connection string begins with the name of a driver, or in capitals; it begins with postgres:// or postgresql:// here")
		case slices.Contains(foreign, dialect):
			return fmt.Errorf("the connection string begins with %s://; PostgreSQL's begins with postgres:// or postgresql://", dialect)
		}
		return nil
	}
	// User and password end at the first @, unless a slash comes before it: so in pgx as in libpq.
	if i := strings.IndexAny(rest, "@/"); i >= 0 && rest[i] == '@' {
		rest = rest[i+1:]
	}
	place, query, _ := strings.Cut(rest, "?")
	if strings.Contains(place, "@") {
		return errAtSign
	}
	for pair := range strings.SplitSeq(query, "&") {
		if key, _, _ := strings.Cut(pair, "="); strings.Contains(pair, "@") && !slices.Contains(mayHaveAt, key) {
			return errAtSign
		}
	}
	return nil
}

// mayHaveAt are the parameters of a URL in whose values an @ is nothing unusual.
var mayHaveAt = []string{"user", "password", "sslpassword", "application_name", "dbname", "krbspn"}

// isHost reports whether a text can be a host's name, an address, or the directory of a socket.
func isHost(s string) bool {
	if strings.HasPrefix(s, "/") || len(s) > 2 && s[1] == ':' && s[2] == '\\' { // an absolute path, on Windows too
		return !strings.Contains(s, "@")
	}
	return s != "" && !strings.ContainsFunc(s, func(r rune) bool {
		return !unicode.IsLetter(r) && !unicode.IsDigit(r) && !strings.ContainsRune("-._:%", r)
	})
}

// parseErrors are pgx's words, and what they mean for people. The first that is found counts.
var parseErrors = []struct{ words, mean string }{
	{"invalid sslmode", "sslmode is disable, allow, prefer, require, verify-ca or verify-full"},
	{"sslmode is invalid", "sslmode is disable, allow, prefer, require, verify-ca or verify-full"},
	{"sslcert\" and \"sslkey", "sslcert and sslkey go together: name both files, or neither"},
	{"sslpassword", "the key in sslkey is encrypted, and sslpassword does not open it"},
	{"unable to decrypt key", "the key in sslkey is encrypted, and sslpassword does not open it"},
	{"failed to decode sslkey", "the file in sslkey holds no key in PEM form"},
	{"unable to add CA", "the file in sslrootcert holds no certificate in PEM form"},
	{"unable to load cert", "the files in sslcert and sslkey do not belong together, or are not in PEM form"},
	{"failed to configure TLS", "sslmode, sslcert, sslkey or sslrootcert cannot be used as they are"},
	{"invalid sslcertmode", "sslcertmode is disable, allow or require"},
	{"invalid connect_timeout", "connect_timeout is a whole number of seconds"},
	{"port numbers to", "there are other numbers of ports than of hosts; give one port, or one for each host"},
	{"invalid port", "the port is a number from 1 to 65535; if it is a piece of the password, special characters are written as %XX there"},
	{"failed to read service", "the service is not in the service file, or the file cannot be read: check service, PGSERVICE and PGSERVICEFILE"},
	{"target_session_attrs", "target_session_attrs is any, read-write, read-only, primary, standby or prefer-standby"},
	{"protocol_version", "min_protocol_version and max_protocol_version are 3.0, 3.2 or latest, the lower one first"},
	{"channel_binding", "channel_binding is disable, prefer or require"},
	{"require_auth", "require_auth names none, password, md5, scram-sha-256, gss or oauth"},
	{"pool_max_conns too small", "pool_max_conns is 1 or more"},
	{"_conns", "pool_max_conns, pool_min_conns and pool_min_idle_conns are whole numbers"},
	{"pool_", "pool_max_conn_lifetime and its like are durations such as 30m"},
	{"unterminated quoted string", "a ' in the connection string is not closed; in a password it is written as \\'"},
	{"missing \"=\"", "a value with a space is put between ' and ': password='...'"},
}

// parseError says what is wrong with a connection string in words of its own.
func parseError(err error) error {
	if file, ok := errors.AsType[*fs.PathError](err); ok {
		return fmt.Errorf("the connection string (or its PG… variables) names the file %q, which cannot be read: %w; correct sslrootcert, sslcert or sslkey", file.Path, file.Err)
	}
	for _, e := range parseErrors {
		if strings.Contains(err.Error(), e.words) {
			return errors.New("the connection string (or a PG… variable) cannot be used: " + e.mean)
		}
	}
	return errUnreadable
}
