package main

import (
	"errors"
	"os"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/bounceproof/bounceproof/internal/connstring"
)

// envURL is the environment variable with the connection string, where none is given.
const envURL = "DATABASE_URL"

// What is said of the string itself is package connstring's, which repeats nothing of it.
var (
	errEmpty = errors.New("the connection string is empty: the variable that it was taken from is not set, or set to nothing; " +
		"write postgres://user@host:port/database, or leave it out for " + envURL + ", or PGHOST and its like")
	errEmptyEnv = errors.New(envURL + " is set to nothing; set it to postgres://user@host:port/database, or unset it for PGHOST and its like")
	errNothing  = errors.New("there is no connection string, and neither " + envURL + " nor PGHOST nor its like is set; " +
		"give postgres://user@host:port/database, or \"host=/var/run/postgresql\" for this machine's own server")
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
	return connstring.Parse(s)
}

// noArgs refuses arguments without repeating them: what stands in the wrong place is most likely a connection string.
func noArgs(_ *cobra.Command, args []string) error {
	if len(args) > 0 {
		return errors.New("this command takes no such argument; a connection string goes into --url or " + envURL)
	}
	return nil
}
