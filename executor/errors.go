package executor

import (
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/fallback"
)

var (
	// ErrClosed is returned by every method of a closed executor that would send something, and when the pool underneath was closed; then puddle.ErrClosedPool is in
	// the chain too.
	ErrClosed = errors.New("executor: closed")

	// ErrReleased is returned by the methods of a [Conn] that was released or hijacked. Nothing was sent.
	ErrReleased = errors.New("executor: the connection was released")

	// ErrTxOpen is returned by Begin, BeginTx, InTx and a batch with BeginTx of a [Conn] that is in a transaction already. Nothing was sent. End
	// that transaction first, or begin a nested one with its own Begin.
	ErrTxOpen = errors.New("executor: a transaction is open on this connection (end it first, or nest with its own Begin)")

	// ErrCommitUnknown is in the chain of the error of a Commit that was sent and never answered: the transaction may or may not have
	// committed. The cause is in the chain too. Never run such a transaction again without looking.
	ErrCommitUnknown = errors.New("executor: the outcome of COMMIT is unknown")

	// ErrStatementMode is returned behind a pooler in statement mode for a transaction that needs BEGIN. Nothing ran. Run the statements
	// one by one, use a transaction that only queues, or set the pooler's pool_mode to transaction.
	ErrStatementMode = errors.New("executor: the pooler is in statement mode and allows no transaction blocks " +
		"(set pool_mode = transaction, or run the statements one by one)")
)

// ValueTooLongError reports a value for CopyFrom that is longer than PostgreSQL stores. Nothing of its row was sent, and nothing of the COPY is stored.
type ValueTooLongError struct {
	// Column is the name of the column.
	Column string
	// Length is that of the value as it would be sent, in bytes, and Limit the longest that there can be.
	Length, Limit int
}

// Error says where, and how much.
func (e *ValueTooLongError) Error() string {
	return fmt.Sprintf("executor: the value for column %q has %d bytes, at most %d can be sent", e.Column, e.Length, e.Limit)
}

// PoolerBusyError reports that a pooler had no server connection for a request or a new connection: its queue was full for longer than
// query_wait_timeout, it takes no more clients, cannot reach its server, or is shutting down (PgBouncer's janitor.c, objects.c and client.c; all
// are 08P01 there, so the text decides). Nothing of the request was executed, and in a transaction nothing of the transaction; it is safe to
// try again, after a pause.
//
// The *pgconn.PgError is reachable with errors.As.
type PoolerBusyError struct {
	// Advice says what the pooler lacked, and what to do about it.
	Advice string
	// Err is the pooler's error.
	Err error
}

// Error says what happened and what to do.
func (e *PoolerBusyError) Error() string {
	return fmt.Sprintf("executor: %s; nothing was executed, it is safe to try again: %v", e.Advice, e.Err)
}

// Unwrap returns Err.
func (e *PoolerBusyError) Unwrap() error { return e.Err }

// poolerBusy gives the error of a busy pooler the form that its caller can act on, and returns any other as it is. What such an error says of the
// request does not depend on where it stood.
func poolerBusy(err error) error {
	v := fallback.Classify(err, fallback.Context{})
	var typed *PoolerBusyError
	if v.Reason != fallback.ReasonPoolerBusy || errors.As(err, &typed) {
		return err
	}
	return &PoolerBusyError{Advice: v.Advice(), Err: err}
}

// PreparedStatementError reports a statement that did not execute, and that the executor could not run again unseen: a pooler, or another client,
// lost or replaced a prepared statement, or a migration overtook a plan or a description. That is so inside a transaction, in a batch of which
// results have been handed out (nothing of the batch stands), and, for what was lost, under On.
//
// The *pgconn.PgError is reachable with errors.As.
type PreparedStatementError struct {
	// Reason says what was lost: fallback.ReasonPreparedLost, ReasonPoolerPrepared, ReasonStalePlan or ReasonStaleShape.
	Reason fallback.Reason
	// Name is the statement's name on the server, empty for one that was sent without a name; never its SQL.
	Name string
	// InTx is true when the transaction is lost with it: run the whole transaction again.
	InTx bool
	// Err is the server's or the pooler's error.
	Err error
}

// Error says what happened and what to do.
func (e *PreparedStatementError) Error() string {
	remedy := "nothing was executed, run it again (PreparedStatements auto does so by itself where it can)"
	if e.InTx {
		remedy = "nothing of the transaction was committed, run it again (InTx does so by itself)"
	}
	what := "statement"
	if e.Name != "" {
		what = "prepared statement " + e.Name
	}
	return fmt.Sprintf("executor: %s: %s: %v; %s", what, e.Reason, e.Err, remedy)
}

// Unwrap returns Err.
func (e *PreparedStatementError) Unwrap() error { return e.Err }

// HookError reports that the pool could give no connection because one of its hooks (AfterConnect, PrepareConn, BeforeAcquire) used a prepared
// statement past the executor, which the pooler in between mixed up with another client's. pgx names statements of its own there: Conn.LoadType,
// Conn.LoadTypes and every Query with arguments do. Nothing of the caller's ran.
//
// The *pgconn.PgError is reachable with errors.As.
type HookError struct {
	// Name is the statement's name; "" if the error does not say it.
	Name string
	// Err is the server's error.
	Err error
}

// pgxNames begins the names that pgx gives to statements by itself (its internal/stmtcache).
const pgxNames = "stmtcache_"

// hookError takes an error of the pool's Acquire.
func hookError(err error) error {
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) || pgErr.Code != "42P05" && pgErr.Code != "26000" { // duplicate_prepared_statement, invalid_sql_statement_name
		return err
	}
	_, name, _ := strings.Cut(pgErr.Message, `"`) // translated messages may quote otherwise; then it is not known
	name, _, _ = strings.Cut(name, `"`)
	return &HookError{Name: name, Err: err}
}

// Error says what happened and what to do.
func (e *HookError) Error() string {
	remedy := "make the pool with executor.NewPool, or call executor.Guard on its configuration"
	if e.Name != "" && !strings.HasPrefix(e.Name, pgxNames) {
		remedy = "do not prepare by name in the pool's hooks: pass the text, with prepare.Stable, where it is used"
	}
	return fmt.Sprintf("executor: a hook of the pool used a prepared statement past the executor: %v; %s", e.Err, remedy)
}

// Unwrap returns Err.
func (e *HookError) Unwrap() error { return e.Err }
