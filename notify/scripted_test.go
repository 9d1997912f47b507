package notify_test

import (
	"context"
	"errors"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/internal/pgscript"
	"github.com/bounceproof/bounceproof/notify"
)

// scripted is a scripted server, and the notify.Pool that leads to it: time-outs and failures happen in virtual time.
type scripted struct {
	*pgscript.Backend
	t    *testing.T
	born time.Time

	mu        sync.Mutex      // guards what follows
	dials     []time.Duration // when somebody connected, or tried
	down      bool            // nobody can connect
	silent    bool            // pg_notify is not answered, on all paths
	lost      bool            // the pool's pg_notify succeeds and does nothing
	execErr   error           // of the pool's statements
	listenErr string          // SQLSTATE of every LISTEN

	stalledListen bool // LISTEN is not answered

	discreet      bool // a statement that asks who the server is, is refused
	proofs, looks int  // statements of heartbeats on the pool
	plains        int  // of the notes, those that carry no stamp
}

func newScripted(t *testing.T, o pgscript.Options) *scripted {
	s := &scripted{Backend: pgscript.New(t, o), t: t, born: time.Now()}
	s.OnExecute(func(sql string) *pgproto3.ErrorResponse {
		s.mu.Lock()
		defer s.mu.Unlock()
		switch {
		case strings.HasPrefix(sql, "listen ") && s.listenErr != "":
			return pgscript.ServerError(s.listenErr, "no", "x")
		case strings.HasPrefix(sql, "listen ") && s.stalledListen:
			return pgscript.NoAnswer
		case strings.Contains(sql, "pg_notify") && s.silent:
			return pgscript.NoAnswer
		case strings.Contains(sql, "pg_notify") && s.lost:
			return pgscript.ServerError("XX000", "a note by a connection of its own would not get here either", "x")
		case strings.Contains(sql, "pg_notify") && s.execErr != nil:
			return pgscript.ServerError("54000", s.execErr.Error(), "asyncQueueAddEntries")
		}
		return nil
	})
	return s
}

func (s *scripted) with(change func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change()
}

func (s *scripted) dialled() []time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]time.Duration(nil), s.dials...)
}

// Exec is the pool's: it notifies, or looks where a note came from.
func (s *scripted) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	s.mu.Lock()
	lost := s.lost
	s.mu.Unlock()
	return s.execBy(ctx, lost, sql, args...)
}

// execBy is Exec of a pool of its own, which may lead elsewhere.
func (s *scripted) execBy(ctx context.Context, lost bool, sql string, args ...any) (pgconn.CommandTag, error) {
	s.mu.Lock()
	silent, down, err := s.silent, s.down, s.execErr
	notifies := !strings.HasPrefix(sql, "select where")
	switch asks := strings.Contains(sql, "postmaster"); {
	case asks && s.discreet:
		err = &pgconn.PgError{Code: "42501"}
	case asks && notifies:
		s.proofs++
	case asks:
		s.looks++
	case strings.HasPrefix(args[len(args)-2].(string), notify.ProofPrefix):
		s.plains++
	}
	s.mu.Unlock()
	if !notifies && !down {
		if identity, ok := args[1].(string); ok && !lost && s.Stamped(identity, args[2].(string), args[3].(string)) {
			return pgconn.NewCommandTag("SELECT 1"), nil
		}
		return pgconn.NewCommandTag("SELECT 0"), nil
	}
	if err != nil {
		return pgconn.CommandTag{}, err
	}
	if silent {
		<-ctx.Done()
		return pgconn.CommandTag{}, ctx.Err()
	}
	if down {
		return pgconn.CommandTag{}, errors.New("down")
	}
	if !lost {
		payload := args[len(args)-1].(string)
		if strings.Contains(sql, "postmaster") {
			payload += " " + s.Stamp()
		}
		s.Notify(args[len(args)-2].(string), payload)
	}
	return pgconn.CommandTag{}, nil
}

func (s *scripted) Config() *pgxpool.Config {
	cfg, err := pgxpool.ParseConfig(pgscript.URL)
	if err != nil {
		s.t.Fatal(err)
	}
	s.Use(cfg.ConnConfig)
	cfg.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.dials = append(s.dials, time.Since(s.born))
		if s.down {
			return nil, errors.New("connection refused")
		}
		return s.Dial(ctx, network, addr)
	}
	return cfg
}
