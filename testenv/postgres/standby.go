package postgres

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/testenv/internal/sandbox"
	"github.com/bounceproof/bounceproof/testenv/internal/suite"
)

// NewStandby copies the server with pg_basebackup and starts the copy as a hot standby that streams from it, asynchronously. via, if not
// empty, is the host and port it streams through: a proxy of package proxy, whose black hole makes the standby fall behind. What the standby
// has received it replays before a promotion, so that only what did not reach it is lost. The standby ends with the test.
//
// settings are added to those of the server's options and win over them.
func (s *Server) NewStandby(tb TB, via string, settings map[string]string) *Server {
	tb.Helper()
	standby, err := s.launchStandby(via, settings)
	if err != nil {
		Unavailable(tb, err)
		return nil
	}
	tb.Cleanup(func() {
		if tb.Failed() {
			tb.Logf("PostgreSQL %s, standby on port %d, end of its log:\n%s", standby.version, standby.sandbox.Port, standby.log.Tail(40))
		}
		if err := standby.close(); err != nil {
			tb.Logf("testenv: closing PostgreSQL %s: %v", standby.version, err)
		}
	})
	return standby
}

func (s *Server) launchStandby(via string, settings map[string]string) (*Server, error) {
	var err error
	for range 5 {
		var standby *Server
		if standby, err = s.tryStandby(via, settings); err == nil {
			return standby, nil
		}
		if !errors.Is(err, sandbox.ErrPortTaken) {
			break
		}
	}
	return nil, err
}

func (s *Server) tryStandby(via string, settings map[string]string) (_ *Server, err error) {
	b, err := sandbox.Open(context.Background(), sandbox.Options{Program: suite.Postgres, Version: s.version, Durable: s.options.Durable})
	if err != nil {
		return nil, err
	}
	o := s.options
	o.Settings = maps.Clone(o.Settings)
	if o.Settings == nil {
		o.Settings = make(map[string]string)
	}
	maps.Copy(o.Settings, settings)
	standby := &Server{version: s.version, name: b.Name, options: o, sandbox: b, log: new(sandbox.Log)}
	defer func() {
		if err != nil {
			err = errors.Join(err, standby.close())
		}
	}()
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	host, port := s.AddressFor(b)
	if via != "" {
		h, p, err := net.SplitHostPort(via)
		if err != nil {
			return nil, fmt.Errorf("testenv: standby: %w", err)
		}
		host = h
		if port, err = strconv.Atoi(p); err != nil {
			return nil, fmt.Errorf("testenv: standby: %w", err)
		}
	}
	// Not on the command line, which every user of the machine can read. The standby reads it again whenever it connects.
	if err := b.Write(ctx, "pgpass", []byte("*:*:*:"+Superuser+":"+Password()+"\n")); err != nil {
		return nil, err
	}
	source := fmt.Sprintf("host=%s port=%d user=%s passfile=%s", host, port, Superuser, b.Path("pgpass"))
	// The file that makes it a standby, and where it streams from, are written by --write-recovery-conf.
	err = b.Run(ctx, "basebackup", b.Bin("pg_basebackup"), "--pgdata", b.Path("data"), "--dbname", source,
		"--write-recovery-conf", "--wal-method", "stream", "--checkpoint", "fast", "--no-sync")
	if err != nil {
		return nil, fmt.Errorf("testenv: PostgreSQL %s: %w", s.version, err)
	}
	preload := b.HasPostgresLibrary("pg_stat_statements")
	if err := b.Write(ctx, "postgresql.conf", []byte(configuration(standby.name, b.ListenHost, b.ListenPort, preload, o))); err != nil {
		return nil, err
	}
	if err := b.Write(ctx, "pg_hba.conf", []byte(hostBased)); err != nil {
		return nil, err
	}
	standby.mu.Lock()
	defer standby.mu.Unlock()
	if err := standby.startLocked(ctx); err != nil {
		return nil, err
	}
	return standby, nil
}

// AwaitStreaming waits until the standby has replayed everything that the primary had written when this was called.
func (s *Server) AwaitStreaming(tb TB, standby *Server) {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	var lsn string
	if err := s.ask(ctx, "select pg_current_wal_insert_lsn()::text", &lsn); err != nil {
		tb.Fatalf("testenv: %v", err)
		return
	}
	for {
		var there bool
		err := standby.ask(ctx, "select coalesce(pg_last_wal_replay_lsn() >= '"+lsn+"', false)", &there)
		if err == nil && there {
			return
		}
		select {
		case <-ctx.Done():
			tb.Fatalf("testenv: the standby did not reach %s: %v", lsn, err)
			return
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// Promote makes a standby a primary, on a timeline of its own, and returns when it takes writes. The former primary is not told.
func (s *Server) Promote(tb TB) {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	var done bool
	if err := s.ask(ctx, "select pg_promote(true, 60)", &done); err != nil || !done {
		tb.Fatalf("testenv: PostgreSQL %s was not promoted (%v)", s.version, err)
	}
}

// ask reads one value as the superuser.
func (s *Server) ask(ctx context.Context, sql string, into any) error {
	return s.admin(ctx, func(conn *pgx.Conn) error {
		if err := conn.QueryRow(ctx, sql, pgx.QueryExecModeExec).Scan(into); err != nil {
			return fmt.Errorf("%s: %w", sql, err)
		}
		return nil
	})
}
