package executor_test

import (
	"bytes"
	"context"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/testenv/place"
)

// lockedBuffer is a buffer that pgconn's goroutines may write to.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *lockedBuffer) take() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	defer l.b.Reset()
	return l.b.String()
}

// CopyFrom behind a pooler watches the trace of the connection. Who traces it already gets every message, during the copy and after it.
func TestCopyFromLeavesATraceAlone(t *testing.T) {
	t.Parallel()
	for _, opts := range []pgproto3.TracerOptions{{}, {SuppressTimestamps: true}} {
		st := place.New(place.TransactionRaw, "1.18", "15").Start(t)
		trace := &lockedBuffer{}
		pool := newPool(t, st.URL, maxConns(1), func(cfg *pgxpool.Config) {
			cfg.AfterConnect = func(_ context.Context, c *pgx.Conn) error {
				c.PgConn().Frontend().Trace(trace, opts)
				return nil
			}
		})
		ex := newExecutor(t, pool, executor.Config{})
		if _, err := ex.Exec(t.Context(), "create table copied (n int)"); err != nil {
			t.Fatal(err)
		}
		if _, err := ex.Topology(t.Context()); err != nil {
			t.Fatal(err)
		}
		trace.take()
		for range 2 {
			n, err := ex.CopyFrom(t.Context(), pgx.Identifier{"copied"}, []string{"n"}, pgx.CopyFromRows([][]any{{1}, {2}}))
			if n != 2 || err != nil {
				t.Fatal(n, err)
			}
			text := trace.take()
			for _, message := range []string{"F\tQuery\t", "B\tCopyInResponse\t", "F\tCopyDone\t", "B\tCommandComplete\t", "B\tReadyForQuery\t"} {
				if !bytes.Contains([]byte(text), []byte(message)) {
					t.Errorf("%+v: no %q in the trace of a copy:\n%s", opts, message, text)
				}
			}
		}
		if _, err := ex.Exec(t.Context(), "select 1"); err != nil {
			t.Fatal(err)
		}
		if text := trace.take(); !bytes.Contains([]byte(text), []byte("B\tDataRow\t")) {
			t.Errorf("%+v: after a copy the trace has ended:\n%s", opts, text)
		}
	}
}
