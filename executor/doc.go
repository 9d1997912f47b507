// Package executor stands on a pgxpool.Pool so that prepared statements work, and stay fast, whatever stands between the program and PostgreSQL.
//
//	ex, err := executor.NewPool(ctx, poolConfig, executor.Config{})
//	defer ex.Close(ctx)
//	err = ex.QueryRow(ctx, "select email from users where id = $1", prepare.Stable, 42).Scan(&email)
//
// # What it promises
//
// A statement that is marked prepare.Stable, or used often enough, is sent by name where names hold: on a direct connection, in session
// pooling, and behind a pooler that tracks statements. Elsewhere it is sent unprepared, with the same bytes: encoding and decoding follow the
// server's types in both. Which it is, the executor finds out by itself ([Executor.Topology]), and notices when it changes.
//
// When a pooler loses a statement the caller sees nothing outside a transaction: the statement is run again, once, because it provably did
// not execute. Within a transaction [Executor.InTx] runs its function again, once; a plain Begin gets [*PreparedStatementError]. What may have
// executed is never run again. A COMMIT without an answer is [ErrCommitUnknown]. On a [Conn] the same holds as long as its connection lives.
//
// A panic of the caller's own (rewriters, arguments, scanners, tracers, functions, sources of CopyFrom) goes on, and leaves no connection behind.
//
// Rows are decoded by the description that came with them, so a migration never makes a query lie.
//
// # What it costs
//
// On a direct connection as many allocations as bare pgx, 11 for a select by key. Behind a pooler the columns come with each execution, which is
// four more. No round trip more than pgx, but for three: the look at what the pool leads to, at most 14 once and again after a downgrade; learning a
// text once, where pgx does so on every connection; and learning it again, every five minutes, when a migration shows, and after arguments that
// cannot be encoded. A transaction begins with its first statement's round trip; what is queued with [Tx] rides with COMMIT.
//
// # Where it stands
//
// An [Executor] has a pool's methods, but for Acquire and AcquireFunc, which give a [Conn] of its own, AcquireAllIdle, which it lacks, and Close,
// which takes a context. A Conn has all methods of a pool's Conn. Code that asks for an interface takes either, as sqlc's and scany's does, and a
// transaction stands where a pgx.Tx does, as in River's InsertTx. Code that names *pgxpool.Pool gets [Executor.Pool], which [NewPool] guards.
//
// # Limits
//
// The executor chooses how statements are sent: DefaultQueryExecMode of the pool counts only for what goes past it. An explicit
// QueryExecMode argument counts always.
//
// Names that were prepared with pgx.Conn.Prepare, in AfterConnect for instance, are not looked up: pass the text. Those of
// Tx.Prepare are. Session state does not
// survive a transaction pooler with this package either: SET without LOCAL, advisory locks of the session, LISTEN (see package notify),
// temporary tables, WITH HOLD cursors. Results of a batch that were handed out cannot be taken back, so a batch that fails after its first
// result reports the error.
package executor
