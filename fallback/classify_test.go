package fallback_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"syscall"
	"testing"

	"github.com/bounceproof/bounceproof/fallback"
)

// Every row of what PostgreSQL and the poolers are known to say.
func TestClassify(t *testing.T) {
	t.Parallel()
	notExist := `prepared statement "` + ours + `" does not exist`
	exists := `prepared statement "` + ours + `" already exists`
	supplies := `bind message supplies 2 parameters, but prepared statement "` + ours + `" requires 1`
	tests := []struct {
		name string
		err  error
		c    fallback.Context
		want verdict
	}{
		// PostgreSQL: the prepared statement.
		{"26000 of our name", server("26000", notExist, "FetchPreparedStatement"), named(raw), lost},
		{"26000 of our name, direct", server("26000", notExist, "FetchPreparedStatement"), named(direct), lost},
		{"26000 translated", server("26000", `vorbereitete Anweisung »`+ours+`« existiert nicht`, "FetchPreparedStatement"), named(session), lost},
		{
			"26000 of another name", server("26000", `prepared statement "mine" does not exist`, "FetchPreparedStatement"), named(raw), own,
		},
		{"26000 renamed by PgBouncer", server("26000", `prepared statement "PGBOUNCER_17" does not exist`, "FetchPreparedStatement"), named(tracking), lost},
		{"26000 renamed by PgCat", server("26000", `prepared statement "PGCAT_3" does not exist`, "FetchPreparedStatement"), named(tracking), lost},
		{"26000 renamed by pg_doorman", server("26000", `prepared statement "DOORMAN_9" does not exist`, "FetchPreparedStatement"), named(tracking), lost},
		{
			"26000 renamed, but the request had no name", server("26000", `prepared statement "PGBOUNCER_17" does not exist`, "FetchPreparedStatement"),
			fallback.Context{Strategy: fallback.Unprepared, Topology: tracking, Alive: true},
			own,
		},
		{"26000 in a transaction's first group", server("26000", notExist, "FetchPreparedStatement"), with(named(raw), phase(fallback.PhaseBegin)), lost},
		{
			"26000 inside a transaction", server("26000", notExist, "FetchPreparedStatement"), with(named(raw), phase(fallback.PhaseInside)),
			change(lost, action(fallback.RerunTx)),
		},
		{
			"26000 beside COMMIT", server("26000", notExist, "FetchPreparedStatement"), with(named(raw), phase(fallback.PhaseCommit)),
			change(lost, action(fallback.RerunTx)),
		},
		{
			"26000 of a shared name is a miss", server("26000", notExist, "FetchPreparedStatement"), with(named(raw), strategy(fallback.Shared)),
			change(change(lost, action(fallback.Reparse)), evidence(no)),
		},
		{"26000 raised in PL/pgSQL", where(server("26000", notExist, "exec_stmt_raise"), "PL/pgSQL function f() line 1 at RAISE"), named(raw), own},
		{
			"26000 of EXECUTE in a function", where(server("26000", notExist, "FetchPreparedStatement"), "SQL statement \"execute x\"\nPL/pgSQL function f() line 1 at EXECUTE"),
			named(raw), own,
		},
		{"42P05 of our name", server("42P05", exists, "StorePreparedStatement"), named(raw), lost},
		{"42P05 of a shared name", server("42P05", exists, "StorePreparedStatement"), with(named(raw), strategy(fallback.Shared)), lost},
		{"42P05 of another name", server("42P05", `prepared statement "mine" already exists`, "StorePreparedStatement"), named(raw), own},
		{
			"26000 unnamed at Bind", server("26000", "unnamed prepared statement does not exist", "exec_bind_message"), named(raw),
			change(lost, evidence(no)),
		},
		{
			"26000 unnamed at Describe", server("26000", "unnamed prepared statement does not exist", "exec_describe_statement_message"), named(raw),
			change(lost, evidence(no)),
		},
		// PostgreSQL: the shape of the request.
		{"08P01 parameters, ours are right", server("08P01", supplies, "exec_bind_message"), named(raw), change(change(stale, action(fallback.RunUnprepared)), evidence(yes))},
		{
			"08P01 parameters, ours are wrong", server("08P01", supplies, "exec_bind_message"),
			with(named(raw), func(c *fallback.Context) { c.ParamOIDs = []uint32{20} }), own,
		},
		{"08P01 result formats, ours", server("08P01", "bind message has 3 result formats but query has 2 columns", "PortalSetResultFormat"), named(tracking), stale},
		{"08P01 result formats, the caller's", server("08P01", "bind message has 5 result formats but query has 3 columns", "PortalSetResultFormat"), named(tracking), own},
		{"08P01 raised in PL/pgSQL", where(server("08P01", supplies, "exec_stmt_raise"), "PL/pgSQL function f() line 1 at RAISE"), named(raw), own},
		{"08P01 short parameter", where(server("08P01", "insufficient data left in message", "pq_copymsgbytes"), "unnamed portal parameter $1"), named(tracking), stale},
		{
			"08P01 short parameter, nothing learnt", where(server("08P01", "insufficient data left in message", "pq_copymsgbytes"), "unnamed portal parameter $1"),
			with(named(tracking), func(c *fallback.Context) { c.Learnt = false }), own,
		},
		{"22P03", where(server("22P03", "incorrect binary data format in bind parameter 1", "exec_bind_message"), "unnamed portal parameter $1"), named(direct), stale},
		{"22P03 translated", where(server("22P03", "falsches Binärformat im Parameter 1", "exec_bind_message"), "Parameter $1 des unbenannten Portals"), named(direct), stale},
		{"22P03 raised in PL/pgSQL", where(server("22P03", "x", "exec_stmt_raise"), "PL/pgSQL function f() line 1 at RAISE"), named(direct), own},
		{"22P02 of a parameter", where(server("22P02", "invalid input syntax", "pg_strtoint64"), "unnamed portal parameter $1 = '...'"), named(direct), stale},
		{"22P02 of a parameter with its value", where(server("22P02", "invalid input syntax", "pg_strtoint64"), `unnamed portal parameter $1 = 'say "x"'`), named(direct), stale},
		{"22P02 of a row", where(server("22P02", "invalid input syntax", "pg_strtoint64"), ""), named(direct), own},
		{"22P02 of COPY", where(server("22P02", "invalid input syntax", "pg_strtoint64"), `COPY t, line 1, column id: "x $1"`), named(direct), own},
		{"22P02 in a function", where(server("22P02", "invalid input syntax", "pg_strtoint64"), "PL/pgSQL function a$1(text) line 1 while casting return value"), named(direct), own},
		{"XX000 of a type of ours that is gone", server("XX000", "cache lookup failed for type 20", "getBaseTypeAndTypmod"), named(direct), stale},
		{"XX000 of another type", server("XX000", "cache lookup failed for type 21", "getBaseTypeAndTypmod"), named(direct), own},
		{"42883 of a column whose type changed", at(server("42883", "operator does not exist: text = bigint", "op_error"), 24), named(direct), stale},
		{"42804 of a column whose type changed", at(server("42804", "COALESCE types text and bigint cannot be matched", "select_common_type"), 19), named(direct), stale},
		{"42883 at run time", server("42883", `function "nope()" does not exist`, "regprocedurein"), named(direct), own},
		{
			"42883 the first time", at(server("42883", "operator does not exist: text = bigint", "op_error"), 24),
			with(named(direct), func(c *fallback.Context) { c.Learnt = false }), own,
		},
		{
			"42883 in a function", func() error {
				e := where(at(server("42883", "operator does not exist", "op_error"), 3), "PL/pgSQL function h(bigint) line 1 at RETURN")
				e.InternalQuery = "'x'::text = x"
				return e
			}(), named(direct), own,
		},
		{
			"26000 of a pooler's name, shared", server("26000", `prepared statement "PGBOUNCER_2" does not exist`, "FetchPreparedStatement"),
			with(named(raw), strategy(fallback.Shared)),
			verdict{fallback.ReasonPreparedLost, fallback.No, fallback.Alive, fallback.RunUnprepared, yes},
		},
		{
			"26000 of a pooler's name that the text itself says", server("26000", `prepared statement "PGBOUNCER_2" does not exist`, "FetchPreparedStatement"),
			with(named(tracking), func(c *fallback.Context) { c.Text = `execute "PGBOUNCER_2"` }), own,
		},
		{
			"0A000 direct", server("0A000", "cached plan must not change result type", "RevalidateCachedQuery"), named(direct),
			verdict{fallback.ReasonStalePlan, fallback.No, fallback.Alive, fallback.RunUnprepared, no},
		},
		{
			"0A000 tracked", server("0A000", "cached plan must not change result type", "RevalidateCachedQuery"), named(tracking),
			verdict{fallback.ReasonStalePlan, fallback.No, fallback.Alive, fallback.RunUnprepared, no},
		},
		{
			"0A000 shared", server("0A000", "cached plan must not change result type", "RevalidateCachedQuery"), with(named(raw), strategy(fallback.Shared)),
			verdict{fallback.ReasonStalePlan, fallback.No, fallback.Alive, fallback.Reparse, no},
		},
		{
			"0A000 inside a transaction", server("0A000", "cached plan must not change result type", "RevalidateCachedQuery"), with(named(tracking), phase(fallback.PhaseInside)),
			verdict{fallback.ReasonStalePlan, fallback.No, fallback.Alive, fallback.RerunTx, no},
		},
		{"0A000 of something else", server("0A000", "cannot insert into a view", "rewriteTargetView"), named(tracking), own},
		{
			"34000 of the unnamed portal", server("34000", `portal "" does not exist`, "exec_execute_message"), named(raw),
			verdict{fallback.ReasonSplitBatch, fallback.No, fallback.Alive, fallback.Return, no},
		},
		{"34000 of a cursor", server("34000", `cursor "c" does not exist`, "PerformPortalFetch"), named(raw), own},
		{
			"25P02", server("25P02", "current transaction is aborted, commands ignored until end of transaction block", "exec_bind_message"),
			with(named(raw), phase(fallback.PhaseInside)),
			verdict{fallback.ReasonTxAborted, fallback.No, fallback.Alive, fallback.Return, no},
		},
		// PostgreSQL: the caller's own.
		{"42P18", server("42P18", "could not determine data type of parameter $1", "variable_coerce_param_hook"), named(raw), own},
		{"42601", at(server("42601", "cannot insert multiple commands into a prepared statement", "exec_parse_message"), 1), named(raw), own},
		{"42P01", at(server("42P01", `relation "t" does not exist`, "parserOpenTable"), 15), named(tracking), own},
		{"23505", server("23505", "duplicate key value violates unique constraint", "_bt_check_unique"), named(raw), own},
		{"40001 in a transaction", server("40001", "could not serialize access", "x"), with(named(raw), phase(fallback.PhaseInside)), change(own, executed(fallback.No))},
		{"40001 at COMMIT", server("40001", "could not serialize access", "x"), with(named(raw), phase(fallback.PhaseCommit)), change(own, executed(fallback.No))},
		{"23503 deferred to COMMIT", server("23503", "violates foreign key constraint", "ri_ReportViolation"), with(named(raw), phase(fallback.PhaseCommit)), change(own, executed(fallback.No))},
		{"57014 of a statement timeout, or of another client's cancel", server("57014", "canceling statement due to user request", "ProcessInterrupts"), named(raw), own},
		{
			"57014 of our own cancel", server("57014", "canceling statement due to user request", "ProcessInterrupts"),
			with(named(raw), func(c *fallback.Context) { c.CtxErr = context.Canceled }),
			verdict{fallback.ReasonCancelled, fallback.Maybe, fallback.Alive, fallback.Return, no},
		},
		{
			"57014 of our own cancel at COMMIT", server("57014", "canceling statement due to user request", "ProcessInterrupts"),
			with(named(raw), func(c *fallback.Context) { c.CtxErr, c.Phase = context.Canceled, fallback.PhaseCommit }),
			verdict{fallback.ReasonCancelled, fallback.No, fallback.Alive, fallback.Return, no},
		},
		// PostgreSQL: the end of a connection.
		{"57P01", dying(server("57P01", "terminating connection due to administrator command", "ProcessInterrupts")), named(direct), change(unknown, reason(fallback.ReasonServer))},
		{
			"57P01 at COMMIT", dying(server("57P01", "terminating connection due to administrator command", "ProcessInterrupts")), with(named(direct), phase(fallback.PhaseCommit)),
			change(unknown, reason(fallback.ReasonServer)),
		},
		{"57P02", dying(server("57P02", "terminating connection because of crash of another server process", "quickdie")), named(direct), change(unknown, reason(fallback.ReasonServer))},
		{
			"57P03 at login", connectFailure(dying(server("57P03", "the database system is starting up", "ProcessStartupPacket"))), named(direct),
			change(busy, reason(fallback.ReasonServer)),
		},
		{"53300 at login", connectFailure(dying(server("53300", "sorry, too many clients already", "ProcessStartupPacket"))), named(direct), change(busy, reason(fallback.ReasonServer))},
		{"28P01 at login", connectFailure(dying(server("28P01", "password authentication failed for user", "auth_failed"))), named(direct), config},
		{"3D000 at login", connectFailure(dying(server("3D000", `database "x" does not exist`, "InitPostgres"))), named(direct), config},
		{"57P05", dying(server("57P05", "terminating connection due to idle-session timeout", "ProcessInterrupts")), named(direct), verdict{fallback.ReasonNotSent, fallback.No, fallback.Dead, fallback.RunElsewhere, no}},
		{
			"25P03", dying(server("25P03", "terminating connection due to idle-in-transaction timeout", "ProcessInterrupts")), with(named(direct), phase(fallback.PhaseInside)),
			verdict{fallback.ReasonTxLost, fallback.No, fallback.Dead, fallback.Return, no},
		},
		{
			"25P04 at COMMIT", dying(server("25P04", "terminating connection due to transaction timeout", "ProcessInterrupts")), with(named(direct), phase(fallback.PhaseCommit)),
			verdict{fallback.ReasonTxLost, fallback.Maybe, fallback.Dead, fallback.Return, no},
		},
		{"XX000 FATAL", dying(server("XX000", "out of luck", "x")), named(direct), unknown},
		// No answer at all.
		{"EOF", io.ErrUnexpectedEOF, with(named(raw), func(c *fallback.Context) { c.Alive = false }), unknown},
		{"reset", syscall.ECONNRESET, with(named(raw), func(c *fallback.Context) { c.Alive = false }), unknown},
		{
			"not sent",
			safe{errors.New("conn closed")},
			with(named(raw), func(c *fallback.Context) { c.Alive = false }),
			verdict{fallback.ReasonNotSent, fallback.No, fallback.Dead, fallback.RunElsewhere, no},
		},
		{
			"not sent, inside a transaction",
			safe{errors.New("conn closed")},
			with(named(raw), func(c *fallback.Context) { c.Alive, c.Phase = false, fallback.PhaseInside }),
			verdict{fallback.ReasonNotSent, fallback.No, fallback.Dead, fallback.Return, no},
		},
		{
			"42883 of a query inside another", func() error {
				e := at(server("42883", "operator does not exist", "op_error"), 3)
				e.InternalQuery = "select 1"
				return e
			}(), named(direct), own,
		},
		{"context done in flight", context.Canceled, with(named(raw), deadContext), change(unknown, reason(fallback.ReasonCancelled))},
		{
			"context done before anything was sent",
			safe{context.Canceled},
			with(named(raw), deadContext),
			verdict{fallback.ReasonCancelled, fallback.No, fallback.Dead, fallback.Return, no},
		},
		{"connection refused", connectError, named(raw), change(busy, reason(fallback.ReasonNotSent))},
		{"an argument that cannot be encoded", errors.New("unable to encode"), named(raw), own},
		// PgBouncer: prepared statements.
		{"did not exist", bouncer("prepared statement did not exist"), named(tracking), poolerLost},
		{"already in use", bouncer("prepared statement name is already in use"), named(tracking), poolerLost},
		{"did not exist, inside", bouncer("prepared statement did not exist"), with(named(tracking), phase(fallback.PhaseInside)), change(poolerLost, action(fallback.RerunTx))},
		{
			"did not exist, but the request had no name", bouncer("prepared statement did not exist"),
			fallback.Context{Strategy: fallback.Unprepared, Topology: tracking},
			change(poolerLost, evidence(no)),
		},
		// PgBouncer: busy.
		{"query_wait_timeout", bouncer("query_wait_timeout"), named(raw), busy},
		{"query_wait_timeout as ERROR with the socket closed behind it", pooler("ERROR", "08P01", "query_wait_timeout"), with(named(raw), func(c *fallback.Context) { c.Alive = false }), busy},
		{"query_wait_timeout known only to OnPgError", recorded(pooler("ERROR", "08P01", "query_wait_timeout")), with(named(raw), closed), busy},
		{"query_timeout", bouncer("query_timeout"), named(raw), busy},
		{"max_client_conn", connectFailure(bouncer("no more connections allowed (max_client_conn)")), named(raw), busy},
		{"max_db_client_connections", connectFailure(bouncer("client connections exceeded (max_db_client_connections)")), named(raw), busy},
		{"max_user_client_connections", connectFailure(bouncer("client connections exceeded (max_user_client_connections)")), named(raw), busy},
		{"cannot connect", bouncer("pgbouncer cannot connect to server"), named(raw), busy},
		{"login failing", bouncer("server login has been failing, try again later (server_login_retry)"), named(raw), busy},
		{"login failing, cached", bouncer("server login has been failing, cached error: connect failed (server_login_retry)"), named(raw), busy},
		{"client_login_timeout", connectFailure(bouncer("client_login_timeout")), named(raw), busy},
		{"client_login_timeout, server down", connectFailure(bouncer("client_login_timeout (server down)")), named(raw), busy},
		{"server shutting down", bouncer("server shutting down"), named(raw), busy},
		{"pooler is shutting down", connectFailure(bouncer("pooler is shutting down")), named(raw), busy},
		// PgBouncer: configuration.
		{"no such database", connectFailure(bouncer("no such database: x")), named(raw), config},
		{"no such user", connectFailure(bouncer("no such user")), named(raw), config},
		{"disabled", connectFailure(bouncer(`database "x" is disabled`)), named(raw), config},
		{"disabled, 1.15", connectFailure(pooler("ERROR", "08P01", "database does not allow connections: x")), named(raw), config},
		{"login rejected", connectFailure(bouncer("login rejected")), named(raw), config},
		{"SASL", connectFailure(bouncer("SASL authentication failed")), named(raw), config},
		{"password", connectFailure(bouncer("password authentication failed")), named(raw), config},
		{"config error", connectFailure(bouncer("bouncer config error")), named(raw), config},
		{"startup parameter", connectFailure(bouncer("unsupported startup parameter: statement_timeout")), named(raw), config},
		{"startup parameter in options", connectFailure(bouncer("unsupported startup parameter in options: search_path")), named(raw), config},
		{"options", connectFailure(bouncer("unsupported options startup parameter: only '-c config=val' and '--config=val' are allowed")), named(raw), config},
		{"invalid server parameter", bouncer("invalid server parameter"), named(raw), config},
		{"PQexec", bouncer("PQexec disallowed"), named(raw), config},
		{"admin console", pooler("ERROR", "08P01", "extended query protocol not supported by admin console"), with(named(raw), func(c *fallback.Context) { c.Alive = false }), config},
		{"admin console, 1.15", bouncer("unsupported pkt type: 80"), named(raw), config},
		{"bad packet", bouncer("bad packet"), named(raw), config},
		{"the server's own refusal", pooler("FATAL", "28P01", `password authentication failed for user "x"`), named(raw), config},
		{"the server's own refusal, other words", pooler("FATAL", "28000", "no pg_hba.conf entry"), named(raw), config},
		// PgBouncer: transactions and the unknown.
		{"transaction blocks", bouncer("transaction blocks not allowed in statement pooling mode"), with(named(statement), phase(fallback.PhaseBegin)), noStatement},
		{
			"transaction blocks, 1.15, known only to OnPgError",
			recorded(pooler("ERROR", "08P01", "transaction blocks not allowed in statement pooling mode")),
			with(named(session), closed), noStatement,
		},
		{
			"idle transaction timeout", bouncer("idle transaction timeout"), with(named(raw), phase(fallback.PhaseInside)),
			verdict{fallback.ReasonTxLost, fallback.No, fallback.Dead, fallback.Return, no},
		},
		{
			"transaction timeout", bouncer("transaction timeout"), with(named(raw), phase(fallback.PhaseInside)),
			verdict{fallback.ReasonTxLost, fallback.No, fallback.Dead, fallback.Return, no},
		},
		{
			"transaction timeout at COMMIT", bouncer("transaction timeout"), with(named(raw), phase(fallback.PhaseCommit)),
			verdict{fallback.ReasonTxLost, fallback.Maybe, fallback.Dead, fallback.Return, no},
		},
		{"client_idle_timeout", bouncer("client_idle_timeout"), named(raw), verdict{fallback.ReasonNotSent, fallback.No, fallback.Dead, fallback.RunElsewhere, no}},
		{"client_idle_timeout inside", bouncer("client_idle_timeout"), with(named(raw), phase(fallback.PhaseInside)), unknown},
		{"query timeout", bouncer("query timeout"), named(raw), unknown},
		{"server conn crashed?", bouncer("server conn crashed?"), named(raw), unknown},
		{"database removed", bouncer("database removed"), named(raw), unknown},
		{"admin forced disconnect", bouncer("admin forced disconnect"), named(raw), unknown},
		{"suspend_timeout", bouncer("suspend_timeout"), named(raw), unknown},
		{"broken Parse packet", bouncer("broken Parse packet"), named(raw), unknown},
		{"broken Bind packet", bouncer("broken Bind packet"), named(raw), unknown},
		{"failed to parse packet", bouncer("failed to parse packet"), named(raw), unknown},
		{"unknown pkt", bouncer("unknown pkt"), named(raw), unknown},
		{"out of memory", bouncer("out of memory"), named(raw), unknown},
		{"08P01 alone", bouncer("something new"), named(raw), unknown},
		{"something new at login", connectFailure(bouncer("something new")), named(raw), change(busy, reason(fallback.ReasonNotSent))},
		// Other poolers.
		{"Odyssey 26000", pooler("ERROR", "26000", `prepared statement "x" does not exist`), named(tracking), change(poolerLost, afterwards(fallback.Alive))},
		{"Odyssey 42P05", pooler("ERROR", "42P05", `prepared statement "x" already exists`), named(tracking), change(poolerLost, afterwards(fallback.Alive))},
		{"PgCat", pooler("FATAL", "58000", `prepared statement "x" does not exist`), named(tracking), poolerLost},
		{"PgCat busy", pooler("FATAL", "58000", "could not get connection from the pool - AllServersDown"), named(raw), busy},
		{"Supavisor 26000", pooler("FATAL", "26000", `prepared statement "x" does not exist`), named(tracking), poolerLost},
		{"Supavisor 42P05", pooler("FATAL", "42P05", "whatever it says"), named(tracking), poolerLost},
		{"Supavisor busy", pooler("FATAL", "XX000", "Max client connections reached"), named(raw), busy},
		{"Supavisor busy, with a code", pooler("FATAL", "XX000", "(EMAXCONNSESSION) max clients reached in session mode - max clients are limited to pool_size: 15"), named(raw), busy},
		// A pooler where there was none.
		{"busy pooler on a direct connection", bouncer("query_wait_timeout"), named(direct), change(busy, evidence(yes))},
		{"unknown text on a direct connection", bouncer("something new"), named(direct), unknown},
		// A server that does not say which routine made an error.
		{"23505 without a routine", pooler("ERROR", "23505", "duplicate key"), named(direct), own},
		{"25P02 raised in PL/pgSQL", where(server("25P02", "x", "exec_stmt_raise"), "PL/pgSQL function f() line 1 at RAISE"), named(direct), own},
		// Nothing.
		{"nil", nil, named(raw), own},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			for _, err := range wrappings(tt.err) {
				v := fallback.Classify(err, tt.c)
				got := verdict{v.Reason, v.Executed, v.Connection, v.Action, v.Evidence}
				if err == nil {
					got.executed = fallback.Maybe
				}
				if got != tt.want {
					t.Errorf("%v\n got %v, evidence %v\nwant %v", err, v, v.Evidence, fmt.Sprint(tt.want))
				}
			}
		})
	}
}
