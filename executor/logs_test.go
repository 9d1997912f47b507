package executor_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/internal/logrec"
	"github.com/bounceproof/bounceproof/internal/pgscript"
	"github.com/bounceproof/bounceproof/prepare"
)

// The words that must stay out of every log: they stand in SQL, arguments, payloads, and what servers quote of them.
const (
	secretSQL     = "secret_column"
	secretArg     = "secret argument"
	secretPayload = "secret payload"
)

// leaks returns the lines that hold a secret.
func leaks(r *logrec.Recorder) []string {
	var out []string
	for line := range strings.Lines(r.All()) {
		if strings.Contains(line, "secret") {
			out = append(out, line)
		}
	}
	return out
}

// TestLogsKeepSecrets makes everything fail that can, in every way, with servers that quote what they were given.
func TestLogsKeepSecrets(t *testing.T) {
	// Not parallel: what is logged to the default logger counts as well.
	log := &logrec.Recorder{}
	usual := slog.Default()
	slog.SetDefault(log.Logger())
	defer slog.SetDefault(usual)

	quote := func(e *pgproto3.ErrorResponse) *pgproto3.ErrorResponse {
		quoted := *e
		if quoted.Routine != "" {
			quoted.Message += " (" + secretArg + ")"
		}
		quoted.Detail = "Key (" + secretSQL + ")=(" + secretArg + ") already exists."
		quoted.Hint, quoted.Where = secretSQL, ""
		quoted.InternalQuery, quoted.ColumnName = "", secretSQL
		return &quoted
	}
	const sql = "insert into t (" + secretSQL + ") values ($1::text)"
	name := prepare.Name(sql, []uint32{25}, "")
	failures := []*pgproto3.ErrorResponse{
		pgscript.ServerError("26000", `prepared statement "`+name+`" does not exist`, "FetchPreparedStatement"),
		pgscript.ServerError("42P05", `prepared statement "`+name+`" already exists`, "StorePreparedStatement"),
		pgscript.ServerError("23505", "duplicate key", "_bt_check_unique"),
		pgscript.ServerError("42601", "syntax error at or near "+secretSQL, "scanner_yyerror"),
		pgscript.ServerError("26000", "unnamed prepared statement does not exist", "exec_bind_message"),
		pgscript.ServerError("0A000", "cached plan must not change result type", "RevalidateCachedQuery"),
		pgscript.ServerError("08P01", "bind message supplies 1 parameters, but prepared statement \"\" requires 3", "exec_bind_message"),
		pgscript.ServerError("22P03", "incorrect binary data format in bind parameter 1", "exec_bind_message"),
		fatal("57P01", "terminating connection due to administrator command"),
		pgscript.PoolerError("prepared statement did not exist"),
		pgscript.PoolerError("prepared statement name is already in use"),
		pgscript.PoolerError("query_wait_timeout"),
		pgscript.PoolerError("query timeout"),
		pgscript.PoolerError("client_idle_timeout"),
		pgscript.PoolerError("transaction blocks not allowed in statement pooling mode"),
		pgscript.PoolerError("something about " + secretArg),
	}
	attempts, downgrades := 0, int64(0)
	for _, sc := range scenes {
		for _, policy := range []executor.PreparedStatements{sc.policy, executor.On, executor.Off} {
			for _, failure := range failures {
				for _, step := range []pgscript.Step{pgscript.Parse, pgscript.Bind, pgscript.Execute, pgscript.Sync} {
					o := sc.o
					o.Servers = 1 // nothing is lost but what is failed here
					s, end := newScripted(t, o, executor.Config{
						PreparedStatements: policy, Logger: slog.Default(),
						Trace: &executor.Trace{
							Changed: func(c executor.Change) {
								slog.LogAttrs(t.Context(), slog.LevelInfo, "changed", slog.Any("topology", c.Topology), slog.String("reason", c.Reason.String()), slog.String("sqlstate", c.SQLState), slog.String("statement", c.Statement))
							},
							Retried: func(r fallback.Reason, name string) {
								slog.LogAttrs(t.Context(), slog.LevelInfo, "retried", slog.Any("reason", r), slog.String("name", name))
							},
						},
					}, maxConns(2))
					for range 2 {
						if _, err := s.ex.Exec(t.Context(), sql, prepare.Stable, secretArg); err != nil {
							t.Fatal(err)
						}
					}
					fail := func() {
						s.b.Define(sql, pgscript.Statement{Params: []uint32{25}, Tag: "INSERT 0 1", Fail: pgscript.FailTimes(step, 2, quote(failure))})
					}
					fail()
					_, _ = s.ex.Exec(t.Context(), sql, prepare.Stable, secretArg)
					fail()
					_ = s.ex.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
						tx.Queue(sql, prepare.Stable, secretArg)
						_, err := tx.Exec(ctx, sql, prepare.Stable, secretArg)
						return err
					})
					fail()
					var b pgx.Batch
					b.Queue(sql, prepare.Stable, secretArg)
					_ = s.ex.SendBatch(t.Context(), &b).Close()
					_, _ = s.ex.Exec(t.Context(), sql, prepare.Stable, struct{ Secret string }{secretArg}) // cannot be encoded
					_, _ = s.ex.CopyFrom(t.Context(), pgx.Identifier{secretSQL}, []string{secretSQL}, pgx.CopyFromRows([][]any{{secretArg}}))
					attempts++
					downgrades += s.ex.Stats().Downgrades
					end()
				}
			}
		}
	}

	// A server that cannot be reached, or refuses the login, while the pooler is being looked at and while there is something to send.
	cfg, err := pgxpool.ParseConfig("postgres://user:secret_password@in-memory:5432/db?sslmode=disable")
	if err != nil {
		t.Fatal(err)
	}
	b := pgscript.New(t, pgscript.Options{})
	b.Use(cfg.ConnConfig)
	b.Refuse(true)
	pool, err := pgxpool.NewWithConfig(context.Background(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	ex, err := executor.New(pool, executor.Config{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := ex.Topology(t.Context()); err == nil {
		t.Error("no error")
	}
	if err := ex.Notify("channel", secretPayload); err != nil {
		t.Error(err)
	}
	done, cancel := context.WithCancel(t.Context())
	cancel()
	_ = ex.Close(done)

	if leaking := leaks(log); len(leaking) != 0 {
		t.Errorf("%d lines of the log hold a secret, such as\n%s", len(leaking), leaking[0])
	}
	// Negative control: there was something to log, and a secret would have been found.
	text := log.All()
	for _, want := range []string{"WARN ", "INFO ", "prepared statements are not used any more", "cannot tell whether prepared statements work", "bp_", "26000"} {
		if !strings.Contains(text, want) {
			t.Errorf("nothing was logged of %s", want)
		}
	}
	slog.LogAttrs(t.Context(), slog.LevelDebug, "control", slog.Any("error", &pgconn.PgError{Message: secretArg}))
	if len(leaks(log)) == 0 {
		t.Error("the check does not see a secret")
	}
	t.Logf("%d failing executors, %d downgrades, %d lines", attempts, downgrades, strings.Count(text, "\n"))
}

// Errors are for the caller, and say everything; what the executor adds to them says nothing of SQL.
func TestErrorsOfItsOwnKeepSecrets(t *testing.T) {
	t.Parallel()
	for _, err := range []error{
		&executor.PreparedStatementError{Name: "bp_1", Err: errors.New("cause")},
		executor.ErrClosed, executor.ErrCommitUnknown, executor.ErrStatementMode,
	} {
		if text := fmt.Sprint(err); !strings.HasPrefix(text, "executor: ") || strings.Contains(text, "select") {
			t.Error(text)
		}
	}
}
