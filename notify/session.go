package notify

import (
	"context"
	"errors"
	"io"
	"net"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"
	"github.com/jackc/pgx/v5/pgproto3"
)

// session is the one connection of a link, or the memory of what became of it. Whoever holds the link's slot owns it.
type session struct {
	conn      *pgconn.PgConn
	backend   string // pg_backend_pid() where LISTEN ran
	pooled    bool
	opened    time.Time
	listening map[string]bool            // channels listened on, LISTEN committed
	refused   map[string]*refusedChannel // channels that cannot be
	fresh     []map[*Listener][]string   // channels listened on whose handlers are not told yet

	past

	proof    string // channel of the proofs
	token    string // of the note under way
	sentAt   time.Time
	arrived  bool // it came back
	nextBeat time.Time
	late     int // heartbeats in a row for which no note could be sent
	beat     *beat

	waiting    bool      // for notifications, and nothing else
	identity   string    // of the server and database, by the latest note of its own; empty: unknown
	lookFrom   time.Time // no sooner is a note of another listener of use
	heardAt    time.Time // the latest that is
	heardClock int64     // its stamp's
	lookAt     time.Time // when to look where publishers' notes go; zero: nothing was heard
	look       *look
}

// past is what outlives a connection.
type past struct {
	next      time.Time       // no attempt before
	attempt   int             // in a row without a connection that lived
	unheard   int             // in a row, notes that were sent and did not come back
	statement <-chan struct{} // of the latest heartbeat: closed when it has ended
}

func (s *session) close() {
	if s.conn == nil {
		return
	}
	closeConn(s.conn)
	*s = session{past: s.past}
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

// connect dials with the configuration of Direct or of the pool, for what listens.
func (k *link) connect(ctx context.Context, onNotification pgconn.NotificationHandler) (*pgconn.PgConn, error) {
	if k.direct != nil {
		cfg := k.direct.Copy()
		if k.cfg.DirectBeforeConnect != nil {
			if err := k.cfg.DirectBeforeConnect(ctx, cfg); err != nil {
				return nil, err
			}
		}
		return dial(ctx, cfg, onNotification)
	}
	return k.connectAsPool(ctx, onNotification)
}

// connectAsPool dials with the pool's configuration: the way of those who notify.
func (k *link) connectAsPool(ctx context.Context, onNotification pgconn.NotificationHandler) (*pgconn.PgConn, error) {
	pc := k.pool.Config()
	cfg := pc.ConnConfig.Copy()
	if pc.BeforeConnect != nil {
		if err := pc.BeforeConnect(ctx, cfg); err != nil {
			return nil, err
		}
	}
	return dial(ctx, cfg, onNotification)
}

// maxMessage is the longest message that a listener takes: a notification has less than 8000 bytes, and an error some hundred.
const maxMessage = 1 << 20

func dial(ctx context.Context, cfg *pgx.ConnConfig, onNotification pgconn.NotificationHandler) (*pgconn.PgConn, error) {
	// pgx's own handler appends to a slice that only WaitForNotification empties; ours keeps nothing.
	cfg.OnNotification = onNotification
	// Waiting is interrupted all the time here. A handler that sends cancel requests would cancel whoever has the server.
	cfg.BuildContextWatcherHandler = func(c *pgconn.PgConn) ctxwatch.Handler {
		return &pgconn.DeadlineContextWatcherHandler{Conn: c.Conn()}
	}
	// A connection that breaks makes pgconn dial once more, to cancel the query that might be running. None of ours is
	// worth it, and after a restart it would be a second connection attempt of everybody, at once and without jitter.
	var connected atomic.Bool
	dialOnce := cfg.DialFunc
	cfg.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		if connected.Load() {
			return nil, errors.New("notify: no cancel requests")
		}
		return dialOnce(ctx, network, addr)
	}
	build := cfg.BuildFrontend
	if build == nil {
		build = pgproto3.NewFrontend
	}
	cfg.BuildFrontend = func(r io.Reader, w io.Writer) *pgproto3.Frontend {
		f := build(r, w)
		f.SetMaxBodyLen(maxMessage)
		return f
	}
	conn, err := pgconn.ConnectConfig(ctx, &cfg.Config)
	connected.Store(true)
	return conn, err
}

// one runs SQL by the simple protocol, several statements being one transaction, and returns the single value of its last
// result with rows.
func one(ctx context.Context, conn *pgconn.PgConn, sql string) (string, error) {
	results := conn.Exec(ctx, sql)
	value, found := "", false
	for results.NextResult() {
		rr := results.ResultReader()
		rows, last := 0, ""
		for rr.NextRow() { // all that come are read, and one is kept
			if rows++; rows == 1 && len(rr.Values()) == 1 {
				last = string(rr.Values()[0])
			} else {
				rows = 2
			}
		}
		if rows == 1 {
			value, found = last, true
		}
	}
	if err := results.Close(); err != nil {
		return "", err
	}
	if !found {
		return "", errors.New("the server returned no value")
	}
	return value, nil
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
			return &refusal{state: Isolated, reason: why, remedy: k.remedyForSharing(), settled: true}
		}
	}
	s.backend = backend
	if s.proof = proofChannel; s.pooled {
		s.proof = newProofChannel()
	}
	if err := k.listen(early, s); err != nil {
		return k.listenRefused(s, err)
	}
	late, cancelLate := context.WithTimeout(ctx, k.cfg.HeartbeatTimeout*9/20)
	defer cancelLate()
	return k.prove(late, s)
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
