package executor_test

import (
	"context"
	"net"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/prepare"
	"github.com/bounceproof/bounceproof/testenv/place"
)

// largest is a connection that remembers the most that was written at once.
type largest struct {
	net.Conn
	n *atomic.Int64
}

func (c largest) Write(b []byte) (int, error) {
	c.n.Store(max(c.n.Load(), int64(len(b))))
	return c.Conn.Write(b)
}

// PgBouncer forwards a message that is longer than its buffer in pieces, and a piece of a COPY that has failed meanwhile reaches the next client.
func TestCopyDataFitsIntoAPoolersBuffer(t *testing.T) {
	t.Parallel()
	for _, p := range []place.Place{
		place.New(place.TransactionRaw, "1.18", "15"), place.New(place.TransactionTracked, "1.26", "18"), place.New(place.Direct, "", "15"),
	} {
		t.Run(p.String(), func(t *testing.T) {
			t.Parallel()
			r := p.Start(t)
			mustExec(t, connect(t, r.DB.URL), "create table copied (id int primary key, v text)")
			var most atomic.Int64
			pool := newPool(t, r.URL, maxConns(1), func(cfg *pgxpool.Config) {
				cfg.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
					c, err := new(net.Dialer).DialContext(ctx, network, addr)
					return largest{c, &most}, err
				}
			})
			ex := newExecutor(t, pool, executor.Config{})
			if _, err := ex.Exec(t.Context(), "select 1", prepare.Stable); err != nil { // an executor that has not looked yet expects a pooler
				t.Fatal(err)
			}
			most.Store(0)
			rows := make([][]any, 10_000)
			for i := range rows {
				rows[i] = []any{i, "a text that makes the row a little longer than it has to be"}
			}
			n, err := ex.CopyFrom(t.Context(), pgx.Identifier{"copied"}, []string{"id", "v"}, pgx.CopyFromRows(rows))
			if err != nil || n != int64(len(rows)) {
				t.Fatal(n, err)
			}
			if got := most.Load(); p.Mode == place.Direct && got < 10_000 || p.Mode != place.Direct && got > 4096 {
				t.Errorf("%d bytes at once", got)
			}
		})
	}
}
