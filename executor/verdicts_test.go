package executor_test

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/internal/pgscript"
	"github.com/bounceproof/bounceproof/prepare"
)

// judgedSQL is what fails in the tests here; judgedCopy is how CopyFrom describes the table.
const (
	judgedSQL  = "insert into t values ($1) returning n"
	judgedCopy = `select "n" from "t"`
)

// judged is an error for each reason, and the step at which it comes.
var judged = map[fallback.Reason]struct {
	step pgscript.Step
	err  *pgproto3.ErrorResponse
}{
	fallback.ReasonNone:           {pgscript.Execute, pgscript.ServerError("23505", "duplicate key", "_bt_check_unique")},
	fallback.ReasonCancelled:      {pgscript.Execute, pgscript.ServerError("57014", "canceling statement due to user request", "ProcessInterrupts")},
	fallback.ReasonNotSent:        {pgscript.Bind, pgscript.PoolerError("client_idle_timeout")},
	fallback.ReasonUnknown:        {pgscript.Execute, pgscript.PoolerError("server conn crashed?")},
	fallback.ReasonPoolerPrepared: {pgscript.Bind, pgscript.PoolerError("prepared statement did not exist")},
	fallback.ReasonPoolerBusy:     {pgscript.Bind, pgscript.PoolerError("query_wait_timeout")},
	fallback.ReasonStatementMode:  {pgscript.Bind, pgscript.PoolerError("transaction blocks not allowed in statement pooling mode")},
	fallback.ReasonConfig:         {pgscript.Bind, pgscript.PoolerError("bouncer config error")},
	fallback.ReasonTxLost:         {pgscript.Bind, pgscript.PoolerError("transaction timeout")},
	fallback.ReasonPreparedLost: {
		pgscript.Bind, pgscript.ServerError("26000", `prepared statement "PGBOUNCER_1" does not exist`, "FetchPreparedStatement"),
	},
	fallback.ReasonStalePlan:  {pgscript.Bind, pgscript.ServerError("0A000", "cached plan must not change result type", "RevalidateCachedQuery")},
	fallback.ReasonStaleShape: {pgscript.Bind, pgscript.ServerError("08P01", "bind message has 1 result formats but query has 2 columns", "PortalSetResultFormat")},
	fallback.ReasonSplitBatch: {pgscript.Execute, pgscript.ServerError("34000", `portal "" does not exist`, "exec_execute_message")},
	fallback.ReasonTxAborted:  {pgscript.Bind, pgscript.ServerError("25P02", "current transaction is aborted", "exec_bind_message")},
	fallback.ReasonServer: {pgscript.Bind, &pgproto3.ErrorResponse{
		Severity: "FATAL", SeverityUnlocalized: "FATAL", Code: "57P01", Message: "terminating connection", Routine: "ProcessInterrupts",
	}},
}

// judgedPath is a way to the statement that fails.
type judgedPath struct {
	name string
	copy bool // it is COPY's description that fails
	run  func(ctx context.Context, ex *executor.Executor) error
}

func judgedBatch(n int) *pgx.Batch {
	b := &pgx.Batch{}
	for range n - 1 {
		b.Queue("select $1", prepare.Stable, 5)
	}
	b.Queue(judgedSQL, prepare.Stable, 1)
	return b
}

// judgedPaths are all ways; the order is that of the columns of outcomes.
var judgedPaths = []judgedPath{
	{"alone", false, func(ctx context.Context, ex *executor.Executor) error {
		_, err := ex.Exec(ctx, judgedSQL, prepare.Stable, 1)
		return err
	}},
	{"first of Begin", false, func(ctx context.Context, ex *executor.Executor) error { return judgedBegin(ctx, ex, false) }},
	{"later in Begin", false, func(ctx context.Context, ex *executor.Executor) error { return judgedBegin(ctx, ex, true) }},
	{"later in InTx", false, func(ctx context.Context, ex *executor.Executor) error {
		return ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
			if _, err := tx.Exec(ctx, "select $1", prepare.Stable, 5); err != nil {
				return err
			}
			_, err := tx.Exec(ctx, judgedSQL, prepare.Stable, 1)
			return err
		})
	}},
	{"batch", false, func(ctx context.Context, ex *executor.Executor) error {
		return ex.SendBatch(ctx, judgedBatch(2)).Close()
	}},
	{"batch, after a result", false, func(ctx context.Context, ex *executor.Executor) error {
		br := ex.SendBatch(ctx, judgedBatch(2))
		_, first := br.Exec()
		_, second := br.Exec()
		return errors.Join(first, second, br.Close())
	}},
	{"batch in InTx", false, func(ctx context.Context, ex *executor.Executor) error {
		return ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error { return tx.SendBatch(ctx, judgedBatch(2)).Close() })
	}},
	{"COPY", true, func(ctx context.Context, ex *executor.Executor) error {
		_, err := ex.CopyFrom(ctx, pgx.Identifier{"t"}, []string{"n"}, pgx.CopyFromRows([][]any{{1}}))
		return err
	}},
	{"queue", false, func(ctx context.Context, ex *executor.Executor) error {
		return ex.InTx(ctx, pgx.TxOptions{}, func(_ context.Context, tx executor.Tx) error { return tx.Queue(judgedSQL, prepare.Stable, 1) })
	}},
	{"queue with COMMIT", false, func(ctx context.Context, ex *executor.Executor) error {
		return ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
			if _, err := tx.Exec(ctx, "select $1", prepare.Stable, 5); err != nil {
				return err
			}
			return tx.Queue(judgedSQL, prepare.Stable, 1)
		})
	}},
	{"Guard", false, nil}, // a pool of its own
}

func judgedBegin(ctx context.Context, ex *executor.Executor, later bool) error {
	tx, err := ex.Begin(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }()
	if later {
		if _, err := tx.Exec(ctx, "select $1", prepare.Stable, 5); err != nil {
			return err
		}
	}
	if _, err := tx.Exec(ctx, judgedSQL, prepare.Stable, 1); err != nil {
		return err
	}
	return tx.Commit(ctx)
}

// outcomeOf says what a caller got: nothing (it was run again unseen), a typed error, or the server's own. lost+ is a lost transaction that may be
// run again.
func outcomeOf(err error) string {
	var lost *executor.PreparedStatementError
	var pooler *executor.PoolerBusyError
	var pgErr *pgconn.PgError
	switch {
	case err == nil:
		return "-"
	case errors.As(err, &lost) && lost.InTx:
		return "lost+"
	case errors.As(err, &lost):
		return "lost"
	case errors.As(err, &pooler):
		return "busy"
	case errors.Is(err, executor.ErrStatementMode):
		return "mode"
	case errors.Is(err, executor.ErrCommitUnknown):
		return "unknown"
	case errors.As(err, &pgErr) && strings.Contains(pgErr.Hint, "safe to try again"):
		return "hint"
	case errors.As(err, &pgErr):
		return "own"
	case errors.Is(err, context.Canceled):
		return "ctx"
	default:
		return "bare " + err.Error()
	}
}

// outcomes is what a caller gets, by the reason of the verdict, in the order of judgedPaths:
//
//   - no error: it was run again unseen
//     lost     *PreparedStatementError: run it again; lost+ with InTx: run the transaction again
//     busy     *PoolerBusyError: nothing was executed; hint: the same in the Hint of pgx's error
//     mode     ErrStatementMode
//     unknown  ErrCommitUnknown
//     own      the server's or the pooler's error as it came; ctx: the context's, without the server's
//     a|b      either: whether the answer or the end of the context is seen first
var outcomes = map[fallback.Reason]string{
	//                             alone first later  intx  batch read  batch-tx copy queue commit guard
	fallback.ReasonNone:           "own   own   own    own   own   own   own      own  own   own    own",
	fallback.ReasonCancelled:      "ctx|own ctx|own ctx|own ctx|own ctx|own ctx|own ctx|own ctx|own unknown|own unknown|own ctx|own",
	fallback.ReasonNotSent:        "-     -     own    own   -     own   own      own  -     unknown own",
	fallback.ReasonUnknown:        "own   own   own    own   own   own   own      own  unknown unknown own",
	fallback.ReasonPoolerPrepared: "-     -     lost+  -     -     lost  -        own  -     -      own",
	fallback.ReasonPoolerBusy:     "busy  busy  busy   busy  busy  busy  busy     busy busy  busy   hint",
	fallback.ReasonStatementMode:  "own   mode  mode   mode  own   own   mode     own  mode  mode   own",
	fallback.ReasonConfig:         "own   own   own    own   own   own   own      own  own   own    own",
	fallback.ReasonTxLost:         "own   own   own    own   own   own   own      own  unknown unknown own",
	fallback.ReasonPreparedLost:   "-     -     lost+  -     -     lost  -        own  -     -      own",
	fallback.ReasonStalePlan:      "-     -     lost+  -     -     lost  -        own  -     -      own",
	fallback.ReasonStaleShape:     "-     -     lost+  -     -     lost  -        own  -     -      own",
	fallback.ReasonSplitBatch:     "own   own   own    own   own   own   own      own  own   own    own",
	fallback.ReasonTxAborted:      "own   own   own    own   own   own   own      own  own   own    own",
	fallback.ReasonServer:         "own   own   own    own   own   own   own      own  unknown unknown own",
}

// TestEveryVerdictHasAnOutcomeOnEveryPath plays an error of every reason on every path. A reason or a path without its outcome fails.
func TestEveryVerdictHasAnOutcomeOnEveryPath(t *testing.T) {
	t.Parallel()
	for reason := fallback.Reason(0); reason.String() != "invalid"; reason++ {
		if reason == fallback.ReasonDisorder {
			continue // no error of a server: TestAnAnswerBelongsToWhatWasSent has it, on each path and at each place
		}
		fail, ok := judged[reason]
		want := strings.Fields(outcomes[reason])
		if !ok || len(want) != len(judgedPaths) {
			t.Errorf("%v: an error: %t, outcomes: %d of %d", reason, ok, len(want), len(judgedPaths))
		}
		if !ok {
			continue
		}
		for i, path := range judgedPaths {
			if got := play(t, path, reason, fail.step, fail.err); i < len(want) && !slices.Contains(strings.Split(want[i], "|"), got) {
				t.Errorf("%v, %s: %s, want %s", reason, path.name, got, want[i])
			}
		}
	}
}

// play plays an error on a path, and returns what came of it. What holds for all of them is checked here: the error is of the reason in question,
// nothing is executed twice, and the pool works afterwards.
func play(t *testing.T, path judgedPath, reason fallback.Reason, step pgscript.Step, e *pgproto3.ErrorResponse) string {
	t.Helper()
	s, end := newScripted(t, pgscript.Options{Kind: pgscript.Tracked}, executor.Config{}, maxConns(2))
	defer end()
	run := path.run
	if run == nil {
		run = guarded(t, s)
	}
	// Twice, so that everything has been learnt and named.
	for range 2 {
		if err := run(t.Context(), s.ex); err != nil {
			t.Fatalf("%s: before: %v", path.name, err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	s.b.Reset()
	fired := false
	fail := pgscript.FailTimes(step, 1, e)
	st := pgscript.Statement{
		Params: []uint32{pgtype.Int4OID}, Columns: []pgscript.Column{{Name: "n", OID: pgtype.Int4OID}},
		Rows: func(args []string) [][]string { return [][]string{args} }, Tag: "INSERT 0 1",
	}
	sql := judgedSQL
	if path.copy {
		sql, st.Params, st.Tag, st.Rows = judgedCopy, nil, "SELECT 0", nil
		fail = pgscript.FailTimes(pgscript.Parse, 1, e)
	}
	st.Fail = func(at pgscript.Step) *pgproto3.ErrorResponse {
		err := fail(at)
		if err != nil {
			fired = true
			if reason == fallback.ReasonCancelled {
				cancel()
			}
		}
		return err
	}
	s.b.Define(sql, st)
	err := run(ctx, s.ex)
	if !fired {
		t.Errorf("%v, %s: the error was not played", reason, path.name)
	}
	n := s.b.Committed(judgedSQL) + s.b.Committed(judgedSQL+" /* bp:2 */")
	if n > 1 || err == nil && n != 1 && !path.copy {
		t.Errorf("%v, %s: committed %d times; %v", reason, path.name, n, err)
	}
	if reason != fallback.ReasonStatementMode { // it is remembered, and transactions are refused
		if err := s.sane(t.Context()); err != nil {
			t.Errorf("%v, %s: afterwards: %v", reason, path.name, err)
		}
	}
	return outcomeOf(err)
}

// guarded returns the statement on a guarded pool of the same backend.
func guarded(t *testing.T, s *scripted) func(ctx context.Context, _ *executor.Executor) error {
	t.Helper()
	cfg, err := pgxpool.ParseConfig(pgscript.URL)
	if err != nil {
		t.Fatal(err)
	}
	s.b.Use(cfg.ConnConfig)
	if err := executor.Guard(cfg, executor.Config{Logger: slog.New(slog.DiscardHandler)}); err != nil {
		t.Fatal(err)
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return func(ctx context.Context, _ *executor.Executor) error {
		var n int
		return pool.QueryRow(ctx, judgedSQL, 1).Scan(&n)
	}
}
