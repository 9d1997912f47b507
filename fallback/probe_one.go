package fallback

import (
	"bytes"
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/internal/pgxinternals"
)

// ProbeOne finds out what a single connection shows that is open already, where the server or the pooler has none left for [Probe]. The
// connection must be idle and outside of a transaction, and can be used afterwards unless it was lost. It costs one round trip on a direct
// connection, else two.
//
// A direct connection is proven by it. Of a pooler it shows whether it tracks statements; for how long a client keeps its server is
// left open unless PgBouncer tracks, which it does only where it shares servers. Then the result is Partial.
func ProbeOne(ctx context.Context, conn *pgconn.PgConn) (Topology, error) {
	defer pgxinternals.LimitMessages(conn.Frontend(), maxMessage)()
	rows, err := readText(conn.ExecParams(ctx, "select pg_catalog.pg_backend_pid()", nil, nil, nil, nil))
	if err != nil {
		return Topology{}, fmt.Errorf("fallback: probe of one connection: %w", err)
	}
	if len(rows) != 1 || len(rows[0]) != 1 {
		return Topology{}, errors.New("fallback: probe of one connection: pg_backend_pid() gave no row")
	}
	backend := parsePID(rows[0][0])
	switch backend {
	case 0:
		return Topology{}, fmt.Errorf("fallback: probe of one connection: pg_backend_pid() gave %q", rows[0][0])
	case conn.PID():
		return directTopology(backend), nil
	}
	p := newProbe(conn.PID(), backend)
	p.note("there was no connection for a closer look")
	name, text := probeStatement()
	pipe := conn.StartPipeline(ctx)
	pipe.SendPrepare(name, text, nil)
	pipe.SendQueryParams(namesText, [][]byte{[]byte(text)}, nil, nil, nil)
	pipe.SendDeallocate(name)
	err = pipe.Sync()
	for err == nil {
		var res any
		if res, err = pipe.GetResults(); res == nil {
			break
		}
		if rr, ok := res.(*pgconn.ResultReader); ok {
			rows, err = readText(rr)
		}
		if _, ok := res.(*pgconn.PipelineSync); ok {
			break
		}
	}
	if closeErr := pipe.Close(); err == nil {
		err = closeErr
	}
	if err != nil {
		p.note("asking for prepared statements failed")
	} else {
		p.judgeNames(name, rows)
	}
	if p.top.Mode == ModeUnknown && p.top.Pooler == PoolerPgBouncer {
		p.sharesBecauseItTracks()
	}
	p.top.Partial = true
	return p.top, nil
}

// readText reads all rows of a result. What an answer does not have is read, and not kept.
func readText(rr *pgconn.ResultReader) ([][][]byte, error) {
	var rows [][][]byte
	n := 0
	for rr.NextRow() {
		if n++; n > maxRows {
			continue
		}
		values := rr.Values()
		row := make([][]byte, len(values))
		for i, v := range values {
			if v != nil {
				row[i] = bytes.Clone(v)
			}
		}
		rows = append(rows, row)
	}
	_, err := rr.Close()
	if err == nil && n > maxRows {
		err = errTooMuch
	}
	return rows, err
}
