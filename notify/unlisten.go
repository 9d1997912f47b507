package notify

import (
	"context"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

const (
	// unlistenTries is how often a statement is sent in the hope of meeting the right server.
	unlistenTries = 8
	// unlistenPins is how many of a pooler's servers are held at once, for the moment it takes to find the right one.
	unlistenPins = 8
)

// unlisten gives a pooler's server connection back as it was. What remains there would be sent to whoever is given that
// server next, until server_lifetime ends it, and pgx keeps notifications that nobody reads for ever.
//
// Behind transaction mode a statement lands where the pooler likes, usually on the server used last. So after a few tries
// each wrong server is held in a transaction, and the next connection is given another one. All of it takes a tenth of
// HeartbeatTimeout at most, and is given up when a server has to be waited for.
func (k *link) unlisten(s *session) {
	if !s.pooled || len(s.listening) == 0 || s.conn.IsClosed() {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), k.cfg.HeartbeatTimeout/10)
	defer cancel()
	var sql strings.Builder
	for channel := range s.listening {
		sql.WriteString("unlisten " + pgx.Identifier{channel}.Sanitize() + "; ")
	}
	sql.WriteString(backendSQL)
	for range unlistenTries {
		if backend, err := one(ctx, s.conn, sql.String()); err != nil || backend == s.backend {
			return
		}
	}
	var pins []*pgconn.PgConn
	defer func() {
		for _, pin := range pins {
			closeConn(pin) // rolls back
		}
	}()
	for range unlistenPins {
		pin, err := k.connect(ctx, nil)
		if err != nil {
			return
		}
		pins = append(pins, pin)
		backend, err := one(ctx, pin, "begin; "+sql.String())
		if err != nil {
			return // statement mode, or no server free
		}
		if backend == s.backend {
			_, _ = pin.Exec(ctx, "commit").ReadAll()
			return
		}
	}
}
