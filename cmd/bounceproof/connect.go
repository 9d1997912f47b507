package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"regexp"
	"slices"
	"strings"
	"unicode"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"
)

// envURL is the environment variable with the connection string, where none is given.
const envURL = "DATABASE_URL"

// Nothing here says anything of the string itself, not even what pgx says is wrong with it: with a slash or an at sign in a password
// that is a piece of the password. Only what cannot be one is named: a key, a scheme that is known, the file of a certificate.
var (
	errConnString = errors.New("the connection string cannot be parsed; it is postgres://user:password@host:port/database or " +
		"\"host=... port=... dbname=... user=...\", and in the first form special characters of the password are written as %XX")
	errAtSign = errors.New("the connection string has an @, a / or a ? too many, most likely in the password; " +
		"there they are written as %40, %2F and %3F")
	errHost = errors.New("the host in the connection string is no name of a host; if that is a piece of the password, " +
		"write its special characters as %XX: @ as %40, : as %3A, / as %2F")
	errEmpty = errors.New("the connection string is empty: the variable that it was taken from is not set, or set to nothing; " +
		"write postgres://user@host:port/database, or leave it out for " + envURL + ", or PGHOST and its like")
	errEmptyEnv = errors.New(envURL + " is set to nothing; set it to postgres://user@host:port/database, or unset it for PGHOST and its like")
	errNothing  = errors.New("there is no connection string, and neither " + envURL + " nor PGHOST nor its like is set; " +
		"give postgres://user@host:port/database, or \"host=/var/run/postgresql\" for this machine's own server")
	errJDBC = errors.New("jdbc: is for Java; leave it out: postgres://user:password@host:port/database")
)

// poolConfig returns the configuration of a pool for a connection string, or if none was given for DATABASE_URL. With neither, it is
// PostgreSQL's own environment variables (PGHOST and so on) that count, as everywhere in pgx, provided that there are any: nobody means
// this machine's socket by forgetting to set a variable.
func poolConfig(given bool, s string) (*pgxpool.Config, error) {
	env, inEnv := os.LookupEnv(envURL)
	switch {
	case given && strings.TrimSpace(s) == "":
		return nil, errEmpty
	case given:
	case inEnv && strings.TrimSpace(env) == "":
		return nil, errEmptyEnv
	case inEnv:
		s = env
	case !slices.ContainsFunc([]string{"PGHOST", "PGPORT", "PGDATABASE", "PGUSER", "PGSERVICE"}, func(name string) bool { return os.Getenv(name) != "" }):
		return nil, errNothing
	}
	if err := checkForm(s); err != nil {
		return nil, err
	}
	cfg, err := pgxpool.ParseConfig(s)
	if err != nil {
		return nil, parseError(err)
	}
	for _, t := range targets(cfg) {
		if !isHost(t.host) {
			return nil, errHost
		}
	}
	for name := range cfg.ConnConfig.RuntimeParams {
		if !parameterName.MatchString(name) {
			return nil, errConnString
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
	return errConnString
}

// noArgs refuses arguments without repeating them: what stands in the wrong place is most likely a connection string.
func noArgs(_ *cobra.Command, args []string) error {
	if len(args) > 0 {
		return errors.New("this command takes no such argument; a connection string goes into --url or " + envURL)
	}
	return nil
}
