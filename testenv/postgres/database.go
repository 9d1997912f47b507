package postgres

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
)

// Database is an empty database of one test.
type Database struct {
	Name string
	URL  string // direct, not through a pooler
}

// template0 allows no connections, so nothing can ever stand in the way of a clone, or be left in one.
const template = "template0"

var databases atomic.Int64

// NewDatabase clones a database for the test. It is dropped in a cleanup, with whoever is still connected to it; if
// the test has failed it stays, and its URL is logged.
func (s *Server) NewDatabase(tb TB) *Database {
	tb.Helper()
	name := databaseName(tb.Name(), databases.Add(1))
	ident := pgx.Identifier{name}.Sanitize()
	if err := s.exec("create database " + ident + " template " + template); err != nil {
		tb.Fatalf("testenv: %v", err)
		return nil
	}
	db := &Database{Name: name, URL: s.URL(name)}
	tb.Cleanup(func() {
		if tb.Failed() {
			tb.Logf("testenv: the database is kept until the tests end (TESTENV_KEEP=1: until you remove it): %s", db.URL)
			return
		}
		if err := s.exec("drop database if exists " + ident + " with (force)"); err != nil && !s.ended() {
			tb.Logf("testenv: %v", err)
		}
	})
	return db
}

func (s *Server) exec(sql string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	return s.admin(ctx, func(conn *pgx.Conn) error {
		if _, err := conn.Exec(ctx, sql); err != nil {
			return fmt.Errorf("%s: %w", sql, err)
		}
		return nil
	})
}

// ended reports whether the server is down, by a test that stopped it.
func (s *Server) ended() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.proc == nil || s.proc.Ended()
}

// databaseName makes a name from a test's that is legal, telling, and unique by its number.
func databaseName(test string, n int64) string {
	var b strings.Builder
	for _, r := range strings.ToLower(test) {
		if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' {
			b.WriteRune(r)
		} else {
			b.WriteByte('_')
		}
	}
	suffix := fmt.Sprintf("_%d", n)
	const limit = 63 // bytes in a PostgreSQL identifier
	return b.String()[:min(b.Len(), limit-len(suffix))] + suffix
}
