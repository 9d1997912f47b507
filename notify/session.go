package notify

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"
)

// session is the one connection of a link, or the memory of what became of it. Whoever holds the link's slot owns it.
type session struct {
	conn      *pgconn.PgConn
	backend   string // pg_backend_pid() where LISTEN ran
	pooled    bool
	listening map[string]bool // channels listened on, LISTEN committed
	opened    time.Time

	attempt int           // in a row without a connection that lived
	wait    time.Duration // before the next one

	proof        string // channel of the proofs, of this connection alone
	token        string // of the note under way
	sentAt       time.Time
	arrived      bool      // it came back
	lastReceived time.Time // the last notification on a channel listened on
	nextBeat     time.Time
	beat         *beat

	statement <-chan struct{} // of the latest heartbeat: closed when it has ended; may outlive the connection
}

func (s *session) close() {
	if s.conn == nil {
		return
	}
	closeConn(s.conn)
	*s = session{attempt: s.attempt, wait: s.wait, opened: s.opened, statement: s.statement}
}

// closeConn closes a connection and leaves nothing of it behind.
func closeConn(conn *pgconn.PgConn) {
	// Terminate need not arrive: a dead network must not hold up the next attempt.
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	_ = conn.Close(ctx)
	// After an error it is closed already, and a goroutine of pgconn's waits up to 15s for the server to close it too.
	_ = conn.Conn().Close()
	<-conn.CleanupDone()
}

// refusal is why an attempt did not end in a proven connection.
type refusal struct {
	state   State
	reason  string
	err     error
	settled bool // not a matter of trying again soon
}

// connect dials with the configuration of Direct or of the pool.
func (k *link) connect(ctx context.Context, onNotification pgconn.NotificationHandler) (*pgconn.PgConn, error) {
	var cfg *pgx.ConnConfig
	if k.direct != nil {
		cfg = k.direct.Copy()
	} else {
		pc := k.pool.Config()
		cfg = pc.ConnConfig.Copy()
		if pc.BeforeConnect != nil {
			if err := pc.BeforeConnect(ctx, cfg); err != nil {
				return nil, err
			}
		}
	}
	// pgx's own handler appends to a slice that only WaitForNotification empties; ours keeps nothing.
	cfg.OnNotification = onNotification
	// Waiting is interrupted all the time here. A handler that sends cancel requests would cancel whoever has the server.
	cfg.BuildContextWatcherHandler = func(c *pgconn.PgConn) ctxwatch.Handler {
		return &pgconn.DeadlineContextWatcherHandler{Conn: c.Conn()}
	}
	// A connection that breaks makes pgconn dial once more, to cancel the query that might be running. None of ours is
	// worth it, and after a restart it would be a second connection attempt of everybody, at once and without jitter.
	var connected atomic.Bool
	dial := cfg.DialFunc
	cfg.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		if connected.Load() {
			return nil, errors.New("notify: no cancel requests")
		}
		return dial(ctx, network, addr)
	}
	conn, err := pgconn.ConnectConfig(ctx, &cfg.Config)
	connected.Store(true)
	return conn, err
}

// one runs SQL by the simple protocol, several statements being one transaction, and returns the single value of its last
// result with rows.
func one(ctx context.Context, conn *pgconn.PgConn, sql string) (string, error) {
	results, err := conn.Exec(ctx, sql).ReadAll()
	if err != nil {
		return "", err
	}
	for i := len(results) - 1; i >= 0; i-- {
		if rows := results[i].Rows; len(rows) == 1 && len(rows[0]) == 1 {
			return string(rows[0][0]), nil
		}
	}
	return "", errors.New("the server returned no value")
}

const backendSQL = `select pg_catalog.pg_backend_pid()`

// establish connects, finds out what it is connected to, listens and proves delivery. It takes at most nine tenths of
// HeartbeatTimeout, one half of which is for the proof.
func (k *link) establish(ctx context.Context, s *session) *refusal {
	early, cancelEarly := context.WithTimeout(ctx, k.cfg.HeartbeatTimeout*9/20)
	defer cancelEarly()

	conn, err := k.connect(early, func(_ *pgconn.PgConn, n *pgconn.Notification) { k.received(s, n) })
	if err != nil {
		return &refusal{state: Disconnected, reason: "cannot connect", err: err}
	}
	s.conn, s.opened = conn, time.Now()
	backend, err := one(early, conn, backendSQL)
	if err != nil {
		return &refusal{state: Disconnected, reason: "no answer from the server", err: err}
	}
	// PgBouncer gives clients a pid of its own making (src/client.c, 8 random bytes as the cancel key); a server gives its own.
	s.pooled = backend != strconv.FormatUint(uint64(conn.PID()), 10)
	k.state.connected(s.pooled)
	if s.pooled {
		if why := k.shared(early, conn, backend); why != "" {
			return &refusal{state: Isolated, reason: why, settled: true}
		}
	}
	s.backend = backend
	s.proof = newProofChannel()
	if err := k.listen(early, s); err != nil {
		return k.listenRefused(s, err)
	}
	late, cancelLate := context.WithTimeout(ctx, k.cfg.HeartbeatTimeout*9/20)
	defer cancelLate()
	if refused := k.prove(late, s); refused != nil {
		return refused
	}
	k.proven(s)
	return nil
}

// shared looks for a server connection that is shared between clients, as in transaction mode, without leaving a LISTEN
// on it: with a second connection at hand, either the same server answers both, or the one that answers changes. Five
// interleaved rounds, for beside other clients a single one can miss it. That none is found says nothing; the note that is sent afterwards decides.
func (k *link) shared(ctx context.Context, a *pgconn.PgConn, backend string) (why string) {
	const mode = "the pooler hands out server connections per transaction (transaction or statement mode): LISTEN cannot work"
	// In session mode a second connection may have to wait for a free server: no evidence either.
	short, cancel := context.WithTimeout(ctx, k.cfg.HeartbeatTimeout/5)
	defer cancel()
	b, err := k.connect(short, nil)
	if err != nil {
		return ""
	}
	defer closeConn(b)
	var first string
	for range 5 {
		onB, err := one(short, b, backendSQL)
		if err != nil {
			return ""
		}
		onA, err := one(ctx, a, backendSQL)
		if err != nil {
			return ""
		}
		if first == "" {
			first = onB
		}
		if onA != backend || onB != first || onA == onB {
			return mode
		}
	}
	return ""
}

var errMoved = errors.New("another server connection answered: the pooler no longer keeps one per client")

// listen brings the session in line with what the running listeners want: one simple query, so one transaction, and the
// pid that ran it.
func (k *link) listen(ctx context.Context, s *session) error {
	want := k.wanted()
	want[s.proof] = true
	var sql strings.Builder
	for channel := range want {
		if !s.listening[channel] {
			sql.WriteString("listen " + pgx.Identifier{channel}.Sanitize() + "; ")
		}
	}
	for channel := range s.listening {
		if !want[channel] {
			sql.WriteString("unlisten " + pgx.Identifier{channel}.Sanitize() + "; ")
		}
	}
	if sql.Len() == 0 {
		return nil
	}
	backend, err := one(ctx, s.conn, sql.String()+backendSQL)
	if err != nil {
		return err
	}
	s.listening = want
	if backend != s.backend {
		s.backend = backend // where the LISTEN is to be undone
		return errMoved
	}
	return nil
}

func (k *link) listenRefused(s *session, err error) *refusal {
	var pgErr *pgconn.PgError
	switch {
	case errors.Is(err, errMoved):
		return &refusal{state: Isolated, reason: "LISTEN cannot work", err: err, settled: true}
	case errors.As(err, &pgErr) && !s.conn.IsClosed():
		// 58P01, for example: the queue holds an entry whose transaction status was vacuumed away (before the minor releases
		// of early 2026, and in all of 13). Or a standby.
		return &refusal{state: Isolated, reason: "the server refused LISTEN", err: err}
	default:
		return &refusal{state: Disconnected, reason: "cannot LISTEN", err: err}
	}
}

// wanted returns the channels of all running listeners.
func (k *link) wanted() map[string]bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	want := make(map[string]bool)
	for l := range k.listeners {
		for channel := range l.inboxes {
			want[channel] = true
		}
	}
	return want
}

// stillListens asks the session itself whether it is still the one that listens, when no note can be sent from elsewhere.
func (s *session) stillListens(ctx context.Context) error {
	answer, err := one(ctx, s.conn, `select pg_catalog.pg_backend_pid() || case when exists (
	select from pg_catalog.pg_listening_channels() as c where c = '`+s.proof+`') then '' else ' not listening' end`)
	if err != nil {
		return err
	}
	if answer != s.backend {
		return fmt.Errorf("%w or no longer listens", errMoved)
	}
	return nil
}
