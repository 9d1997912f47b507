package postgres

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/testenv/internal/sandbox"
	"github.com/bounceproof/bounceproof/testenv/internal/suite"
)

// Superuser is the role that URL and NewDatabase connect as, with [Password].
const Superuser = "postgres"

// Server is a running PostgreSQL. It is safe for concurrent use; Stop, Kill and Restart are for Dedicated servers.
type Server struct {
	version string
	name    string // its cluster_name, by which it is told from a stranger on the same port
	options Options
	sandbox *sandbox.Sandbox
	log     *sandbox.Log

	mu   sync.Mutex // guards proc, and is held while the server starts or stops
	proc *sandbox.Process
}

// launch opens a sandbox, makes a cluster in it and starts the server. A port that is taken meanwhile costs another try.
func launch(o Options) (*Server, error) {
	var err error
	for range 5 {
		var s *Server
		if s, err = tryLaunch(o); err == nil {
			return s, nil
		}
		if !errors.Is(err, sandbox.ErrPortTaken) {
			break
		}
	}
	return nil, err
}

func tryLaunch(o Options) (_ *Server, err error) {
	b, err := sandbox.Open(context.Background(), sandbox.Options{Program: suite.Postgres, Version: o.Version, Durable: o.Durable})
	if err != nil {
		return nil, err
	}
	s := &Server{version: o.Version, name: b.Name, options: o, sandbox: b, log: new(sandbox.Log)}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close())
		}
	}()
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	if err := b.Write(ctx, "password", []byte(Password()+"\n")); err != nil {
		return nil, err
	}
	// The locale exists everywhere and sorts the same everywhere.
	err = b.Run(ctx, "initdb", b.Bin("initdb"), "--pgdata", b.Path("data"), "--username", Superuser, "--pwfile", b.Path("password"),
		"--auth", "scram-sha-256", "--encoding", "UTF8", "--locale", "C", "--no-sync")
	if err != nil {
		return nil, fmt.Errorf("testenv: PostgreSQL %s: %w", o.Version, err)
	}
	preload := b.HasPostgresLibrary("pg_stat_statements")
	conf := configuration(s.name, b.ListenHost, b.ListenPort, preload, o)
	if err := b.Write(ctx, "postgresql.conf", []byte(conf)); err != nil {
		return nil, err
	}
	if err := b.Write(ctx, "pg_hba.conf", []byte(hostBased)); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.startLocked(ctx); err != nil {
		return nil, err
	}
	// initdb of 13 takes no more than 99 bytes, so not the verifier itself.
	if err := s.exec("alter role " + Superuser + " password '" + verifier(Password()) + "'"); err != nil {
		return nil, err
	}
	return s, nil
}

func (s *Server) startLocked(ctx context.Context) error {
	for {
		p, err := s.sandbox.Start(ctx, "postgres", s.log, s.sandbox.Bin("postgres"),
			"-D", s.sandbox.Path("data"),
			"--config-file="+s.sandbox.Path("postgresql.conf"),
			"--hba-file="+s.sandbox.Path("pg_hba.conf"))
		if err != nil {
			return fmt.Errorf("testenv: PostgreSQL %s: %w", s.version, err)
		}
		s.proc = p
		mark := s.log.Mark()
		err = s.awaitReady(ctx, p)
		if err == nil {
			return nil
		}
		said := s.log.Since(mark)
		switch {
		case strings.Contains(said, "Address already in use"):
			return fmt.Errorf("testenv: PostgreSQL %s: %w", s.version, sandbox.ErrPortTaken)
		case strings.Contains(said, "pre-existing shared memory block") && ctx.Err() == nil:
			// Backends of a killed postmaster are still on their way out.
			time.Sleep(20 * time.Millisecond)
			continue
		}
		return fmt.Errorf("testenv: PostgreSQL %s did not start: %w\n%s", s.version, err, sandbox.Tail(said, 30))
	}
}

// awaitReady returns when the server answers, or p has ended.
func (s *Server) awaitReady(ctx context.Context, p *sandbox.Process) error {
	for {
		err := s.identify(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-p.Done():
			return errors.New("the process ended")
		case <-ctx.Done():
			return errors.Join(ctx.Err(), err)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// identify connects and checks that it is this server that answers.
func (s *Server) identify(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	return s.admin(ctx, func(conn *pgx.Conn) error {
		var name string
		if err := conn.QueryRow(ctx, "select current_setting('cluster_name')", pgx.QueryExecModeExec).Scan(&name); err != nil {
			return err
		}
		if name != s.name {
			return fmt.Errorf("port %d belongs to cluster %q", s.sandbox.Port, name)
		}
		return nil
	})
}

// admin connects as the superuser for the duration of f.
func (s *Server) admin(ctx context.Context, f func(*pgx.Conn) error) error {
	conn, err := pgx.Connect(ctx, s.URL("postgres"))
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	return f(conn)
}

// URL returns the address of a database of the server, for pgx.Connect and pgxpool.New.
func (s *Server) URL(database string) string {
	u := url.URL{
		Scheme:   "postgres",
		User:     url.User(Superuser),
		Host:     net.JoinHostPort(s.sandbox.Host, strconv.Itoa(s.sandbox.Port)),
		Path:     "/" + database,
		RawQuery: "sslmode=disable&password=" + Password(),
	}
	return u.String()
}

// Version returns the major version, also when the options left it open.
func (s *Server) Version() string { return s.version }

// FullVersion returns the version as the server's binary says it, such as 15.18.
func (s *Server) FullVersion() string { return s.sandbox.Version }

// Runtime returns "container" or "process".
func (s *Server) Runtime() string { return s.sandbox.Kind }

// AddressFor returns the host and port at which a program in another sandbox reaches the server. It serves package
// pgbouncer.
func (s *Server) AddressFor(peer *sandbox.Sandbox) (host string, port int) {
	return s.sandbox.AddressFor(peer)
}

// Log returns what the server has logged so far.
func (s *Server) Log() string { return s.log.String() }

// AwaitLog waits until the server has logged text, and fails the test if that takes longer than ten seconds. Logs come
// through a pipe, so a line may lie a moment behind its event.
func (s *Server) AwaitLog(tb TB, text string) {
	tb.Helper()
	if !s.log.Await(text, 10*time.Second) {
		tb.Fatalf("testenv: not in the log: %q", text)
	}
}

// LogContains reports whether the server has logged text.
func (s *Server) LogContains(text string) bool { return strings.Contains(s.log.String(), text) }

// Stop shuts the server down at once but cleanly (a fast shutdown): open transactions are rolled back.
func (s *Server) Stop(tb TB) {
	tb.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.endLocked("INT"); err != nil {
		tb.Fatalf("%v", err)
	}
}

// Kill ends the postmaster with SIGKILL. Its backends end as soon as they notice. Restart brings the server back
// through crash recovery.
func (s *Server) Kill(tb TB) {
	tb.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.endLocked("KILL"); err != nil {
		tb.Fatalf("%v", err)
	}
}

// Restart stops the server if it runs and starts it again, on the same port and data.
func (s *Server) Restart(tb TB) {
	tb.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.endLocked("INT"); err != nil {
		tb.Fatalf("%v", err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	if err := s.startLocked(ctx); err != nil {
		tb.Fatalf("%v", err)
	}
}

func (s *Server) endLocked(signal string) error {
	if s.proc == nil || s.proc.Ended() {
		return nil
	}
	if err := s.proc.Signal(signal); err != nil {
		return fmt.Errorf("testenv: PostgreSQL %s: SIG%s: %w", s.version, signal, err)
	}
	select {
	case <-s.proc.Done():
		return nil
	case <-time.After(startTimeout):
		return fmt.Errorf("testenv: PostgreSQL %s still runs after SIG%s", s.version, signal)
	}
}

func (s *Server) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	return s.sandbox.Close(ctx)
}
