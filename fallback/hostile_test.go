package fallback_test

import (
	"context"
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/internal/pgscript"
)

// maxTaken is what a look at a hostile server may allocate in all, and maxSent what it may read.
const (
	maxTaken = 64 << 20
	maxSent  = 16 << 20
)

// hugeHeader announces a message of 1 GiB, the longest that pgx takes by itself.
func hugeHeader(typ byte) []byte { return []byte{typ, 0x3f, 0xff, 0xff, 0xff} }

// A server that sends rows, notices or settings without an end, or announces a message of 1 GiB: the look ends, and takes little memory.
// Not parallel: it counts what the process allocates.
func TestAHostileServerDoesNotTakeTheMemory(t *testing.T) {
	kilobyte := make([]byte, 1024)
	rows := pgscript.Bytes(&pgproto3.ParseComplete{}, &pgproto3.BindComplete{})
	for name, f := range map[string]*pgscript.Flood{
		"rows":               {Head: rows, Chunk: pgscript.Bytes(&pgproto3.DataRow{Values: [][]byte{kilobyte}})},
		"small rows":         {Head: rows, Chunk: pgscript.Bytes(&pgproto3.DataRow{Values: [][]byte{nil}})},
		"a row of 1 GiB":     {Head: append(rows, hugeHeader('D')...), Chunk: kilobyte},
		"an error of 1 GiB":  {Head: hugeHeader('E'), Chunk: kilobyte},
		"a notice of 1 GiB":  {Head: hugeHeader('N'), Chunk: kilobyte},
		"notices":            {Chunk: pgscript.Bytes(&pgproto3.NoticeResponse{Severity: "NOTICE", Message: string(kilobyte)})},
		"settings":           {Chunk: pgscript.Bytes(&pgproto3.ParameterStatus{Name: "a", Value: string(kilobyte)})},
		"settings at login":  {Login: true, Head: pgscript.Bytes(&pgproto3.AuthenticationOk{}), Chunk: pgscript.Bytes(&pgproto3.ParameterStatus{Name: "a", Value: string(kilobyte)})},
		"1 GiB at login":     {Login: true, Head: hugeHeader('R'), Chunk: kilobyte},
		"1 GiB behind login": {Login: true, Head: append(pgscript.Bytes(&pgproto3.AuthenticationOk{}), hugeHeader('S')...), Chunk: kilobyte},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := floodConfig(t, f)
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			before := allocated()
			_, err := fallback.Probe(ctx, fallback.Dialer(func(context.Context) (*pgconn.Config, error) { return &cfg.Config, nil }))
			taken := allocated() - before
			if err == nil || ctx.Err() != nil || taken > maxTaken || f.Sent.Load() > maxSent {
				t.Errorf("error %v, %d bytes allocated, %d bytes read", err, taken, f.Sent.Load())
			}
			if f.Login {
				return
			}
			// On a connection of the program's own, which a dial function of its own may be, and ProbeOne always is.
			conn, err := pgconn.ConnectConfig(ctx, &floodConfig(t, f).Config)
			if err != nil {
				t.Fatal(err)
			}
			short, cancelShort := context.WithTimeout(ctx, 500*time.Millisecond) // ends what is endless and needs no memory
			defer cancelShort()
			before = allocated()
			_, err = fallback.ProbeOne(short, conn)
			if kept := allocated() - before; err == nil || (name[:2] == "a " || name[:3] == "an ") && kept > maxTaken {
				t.Errorf("ProbeOne: error %v, %d bytes allocated", err, kept)
			}
			_ = conn.Close(short)
		})
	}
}

// The control: pgx alone takes the memory for the header.
func TestAHeaderAloneTakesPgxsMemory(t *testing.T) {
	f := &pgscript.Flood{Head: hugeHeader('E'), Chunk: make([]byte, 1024)}
	conn, err := pgconn.ConnectConfig(t.Context(), &floodConfig(t, f).Config)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	before := allocated()
	_ = conn.Exec(ctx, "select 1").Close()
	if taken := allocated() - before; taken < maxTaken {
		t.Errorf("%d bytes: is the limit still needed?", taken)
	}
}

func floodConfig(t *testing.T, f *pgscript.Flood) *pgx.ConnConfig {
	t.Helper()
	cfg, err := pgx.ParseConfig(pgscript.URL)
	if err != nil {
		t.Fatal(fmt.Errorf("the flood: %w", err))
	}
	cfg.LookupFunc = func(_ context.Context, host string) ([]string, error) { return []string{host}, nil }
	cfg.DialFunc = f.Dial
	return cfg
}

func allocated() uint64 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.TotalAlloc
}
