package executor_test

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/internal/logrec"
	"github.com/bounceproof/bounceproof/internal/pgscript"
	"github.com/bounceproof/bounceproof/prepare"
)

// A proxy like Pgpool-II in streaming replication mode passes the server's process id on and answers a Close before its turn.
func TestAProxyThatAnswersACloseAtOnceWorks(t *testing.T) {
	t.Parallel()
	s, _ := newScripted(t, pgscript.Options{Script: pgscript.Script{CloseFirst: true}}, executor.Config{})
	top, err := s.ex.Topology(t.Context())
	if err != nil || !top.Pooled() || !strings.Contains(strings.Join(top.Evidence, "; "), "out of order") {
		t.Error("taken for a direct connection:", top, err)
	}
	for range 3 {
		tag, err := s.ex.Exec(t.Context(), insertRow, prepare.Stable, 1)
		if err != nil || tag.RowsAffected() != 1 {
			t.Error(tag, err)
		}
	}
	for range 3 {
		if err := s.ex.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
			_, err := tx.Exec(ctx, insertRow+" on conflict do nothing", prepare.Stable, 1)
			return err
		}); err != nil {
			t.Error(err)
		}
	}
	if n := s.b.Committed(insertRow); n != 3 {
		t.Errorf("executed %d times", n)
	}
	// The control: in the middle of a group, as it would stand on a direct connection, such a Close is out of order.
	conn, err := s.pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	p := conn.Conn().PgConn().StartPipeline(t.Context())
	p.SendQueryParams("select 1", nil, nil, nil, nil)
	p.SendDeallocate("x")
	_ = p.Sync()
	if _, err := p.GetResults(); err == nil {
		t.Error("the script does not do what it is for")
	}
	_ = p.Close()
}

// On what was taken for a direct connection an answer out of order is evidence against names: there is one error, one warning, and names are not
// taken up again.
func TestAnAnswerOutOfOrderEndsNamesOnADirectConnection(t *testing.T) {
	t.Parallel()
	var log logrec.Recorder
	s, _ := newScripted(t, pgscript.Options{}, executor.Config{Logger: log.Logger()})
	run := func() error {
		_, err := s.ex.Exec(t.Context(), insertRow, prepare.Stable, 1)
		return err
	}
	if err := run(); err != nil {
		t.Fatal(err)
	}
	s.b.Reset()
	s.b.Insert(1, &pgproto3.CloseComplete{})
	err := run()
	var disorder *fallback.AnswerError
	if !errors.As(err, &disorder) || !disorder.Executes || !strings.Contains(err.Error(), "may have been executed") {
		t.Error(err)
	}
	if n := s.b.Committed(insertRow); n != 1 {
		t.Errorf("executed %d times", n)
	}
	s.b.Reset()
	for range 3 {
		if err := run(); err != nil {
			t.Error(err)
		}
	}
	if sent := pgscript.Strings(s.b.Sent()); slices.ContainsFunc(sent, func(m string) bool { return strings.HasPrefix(m, "Bind bp_") }) {
		t.Error("names are used again:", sent)
	}
	if n := s.b.Committed(insertRow); n != 3 {
		t.Errorf("executed %d times", n)
	}
	if warnings := log.At(slog.LevelWarn); len(warnings) != 1 || !strings.Contains(log.All(), "answers out of order") {
		t.Error(log.All())
	}
}
