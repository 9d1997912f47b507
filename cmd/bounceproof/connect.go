package main

import (
	"cmp"
	"errors"
	"os"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"
)

// envURL is the environment variable with the connection string, where none is given.
const envURL = "DATABASE_URL"

// errConnString says nothing of the string itself, not even what pgx says is wrong with it: with a slash or an at sign in a
// password that is a piece of the password.
var errConnString = errors.New("the connection string cannot be parsed; it is postgres://user:password@host:port/database or " +
	"\"host=... port=... dbname=... user=...\", and in the first form special characters of the password are written as %XX")

// poolConfig returns the configuration of a pool for a connection string, or for DATABASE_URL if it is empty. With neither, it is
// PostgreSQL's own environment variables (PGHOST and so on) that count, as everywhere in pgx.
func poolConfig(url string) (*pgxpool.Config, error) {
	cfg, err := pgxpool.ParseConfig(cmp.Or(url, os.Getenv(envURL)))
	if err != nil {
		return nil, errConnString
	}
	return cfg, nil
}

// noArgs refuses arguments without repeating them: what stands in the wrong place is most likely a connection string.
func noArgs(_ *cobra.Command, args []string) error {
	if len(args) > 0 {
		return errors.New("this command takes no such argument; a connection string goes into --url or " + envURL)
	}
	return nil
}
