package notify_test

import (
	"context"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/internal/await"
	"github.com/bounceproof/bounceproof/internal/pgscript"
	"github.com/bounceproof/bounceproof/notify"
)

// floodPool leads to a hostile server, and sends nothing itself.
type floodPool struct{ cfg *pgxpool.Config }

func (p floodPool) Config() *pgxpool.Config { return p.cfg.Copy() }

func (p floodPool) Exec(context.Context, string, ...any) (pgconn.CommandTag, error) {
	return pgconn.CommandTag{}, context.DeadlineExceeded
}

// A server that sends rows without an end, or announces a message of 1 GiB, is no connection, and takes little memory. Not parallel: it counts what
// is live in the process.
func TestAHostileServerDoesNotTakeTheListenersMemory(t *testing.T) {
	kilobyte := make([]byte, 1024)
	columns := pgscript.Bytes(&pgproto3.RowDescription{Fields: []pgproto3.FieldDescription{{Name: []byte("a"), DataTypeOID: 25, DataTypeSize: -1}}})
	for name, f := range map[string]*pgscript.Flood{
		"rows":           {Head: columns, Chunk: pgscript.Bytes(&pgproto3.DataRow{Values: [][]byte{kilobyte}})},
		"a row of 1 GiB": {Head: append(columns, 'D', 0x3f, 0xff, 0xff, 0xff), Chunk: kilobyte},
		"1 GiB at login": {Login: true, Head: []byte{'R', 0x3f, 0xff, 0xff, 0xff}, Chunk: kilobyte},
	} {
		cfg, err := pgxpool.ParseConfig(pgscript.URL)
		if err != nil {
			t.Fatal(err)
		}
		cfg.ConnConfig.LookupFunc = func(_ context.Context, host string) ([]string, error) { return []string{host}, nil }
		cfg.ConnConfig.DialFunc = f.Dial
		var before, m runtime.MemStats
		runtime.ReadMemStats(&before)
		l := listen(t, floodPool{cfg}, notify.ListenerConfig{HeartbeatTimeout: time.Second, ReconnectMin: time.Hour, ReconnectMax: time.Hour})
		await.True(t, name+": the connection was given up", func() bool {
			runtime.ReadMemStats(&m)
			if m.HeapInuse > before.HeapInuse+(64<<20) {
				t.Fatalf("%s: %d bytes in use, %d before", name, m.HeapInuse, before.HeapInuse)
			}
			return l.State() == notify.Disconnected && strings.Contains(l.Status().Reason, "no answer") || strings.Contains(l.Status().Reason, "cannot connect")
		})
		if f.Sent.Load() == 0 {
			t.Errorf("%s: nothing was sent", name)
		}
	}
}
