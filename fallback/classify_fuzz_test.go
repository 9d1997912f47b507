package fallback_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/fallback"
)

// What holds for every error there may ever be.
func FuzzClassify(f *testing.F) {
	add := func(e *pgconn.PgError, phase, strategy uint8, flags uint16) {
		f.Add(e.Severity, e.Code, e.Message, e.Where, e.Routine, e.InternalQuery, e.Position, phase, strategy, flags)
	}
	for flags := range uint16(16) {
		for _, e := range []*pgconn.PgError{
			server("26000", `prepared statement "`+ours+`" does not exist`, "FetchPreparedStatement"),
			server("26000", `prepared statement "PGBOUNCER_1" does not exist`, "FetchPreparedStatement"),
			where(server("26000", ours, "exec_stmt_raise"), "PL/pgSQL function f() line 1 at RAISE"),
			server("42P05", ours, "StorePreparedStatement"),
			server("0A000", "cached plan must not change result type", "RevalidateCachedQuery"),
			server("08P01", "bind message supplies 2 parameters, but prepared statement \"x\" requires 1", "exec_bind_message"),
			server("08P01", "bind message has 3 result formats but query has 2 columns", "PortalSetResultFormat"),
			where(server("22P03", "incorrect binary data format in bind parameter 1", "exec_bind_message"), "unnamed portal parameter $1"),
			server("XX000", "cache lookup failed for type 20", "getBaseTypeAndTypmod"),
			at(server("42883", "operator does not exist", "op_error"), 7),
			server("34000", `portal "" does not exist`, "exec_execute_message"),
			server("25P02", "current transaction is aborted", "exec_bind_message"),
			dying(server("57P01", "terminating connection", "ProcessInterrupts")),
			dying(server("57P05", "terminating connection", "ProcessInterrupts")),
			server("23505", "duplicate key", "_bt_check_unique"),
			bouncer("prepared statement did not exist"), bouncer("query_wait_timeout"), bouncer("query timeout"),
			bouncer("client_idle_timeout"), bouncer("transaction timeout"), bouncer("(E) max clients reached"), bouncer(""),
			bouncer("transaction blocks not allowed in statement pooling mode"),
		} {
			add(e, uint8(flags)%5, uint8(flags/4)%4, flags*73)
		}
	}
	f.Fuzz(func(t *testing.T, severity, code, message, context, routine, internal string, position int32, phase, strategy uint8, flags uint16) {
		e := &pgconn.PgError{
			Severity: severity, Code: code, Message: message, Where: context, Routine: routine, InternalQuery: internal, Position: position,
		}
		on := func(bit int) bool { return flags&(1<<bit) != 0 }
		c := fallback.Context{
			Strategy: fallback.Strategy(strategy % 5), Phase: fallback.Phase(phase % 6), Alive: on(0), Learnt: on(1),
			ParamOIDs: []uint32{20, 25}, Columns: 3, Topology: []fallback.Topology{direct, session, raw, tracking}[flags>>3&3],
		}
		if on(5) {
			c.Name = ours
		}
		if on(7) {
			c.CtxErr = errCancelled
		}
		var err error = e
		switch {
		case on(8):
			err, c.Alive = recorded(e), false
		case on(9):
			err = wrapConnect(e)
		case on(10):
			err = safe{e}
		}
		v := fallback.Classify(err, c)
		if again := fallback.Classify(err, c); again != v {
			t.Fatalf("not pure: %v, then %v", v, again)
		}
		if v.Action != fallback.Return && v.Executed != fallback.No {
			t.Errorf("runs again what may have run: %v", v)
		}
		if (c.Phase == fallback.PhaseInside || c.Phase == fallback.PhaseCommit) && !on(9) && v.Action != fallback.Return && v.Action != fallback.RerunTx {
			t.Errorf("runs a statement of a lost transaction again: %v", v)
		}
		if v.Reason == fallback.ReasonNone && (v.Action != fallback.Return || v.Evidence) {
			t.Errorf("meddles with the caller's own error: %v", v)
		}
		if v.Evidence && c.Name == "" && v.Reason != fallback.ReasonStatementMode && c.Topology.Mode != fallback.ModeDirect {
			t.Errorf("evidence against names from a request without one: %v", v)
		}
		if v.OutcomeUnknown() && v.Executed == fallback.No {
			t.Errorf("unknown and known: %v", v)
		}
		if !c.Alive && v.Connection == fallback.Alive {
			t.Errorf("a closed connection came to life: %v", v)
		}
		if routine != "" && (routine == "exec_stmt_raise" || internal != "") && severity == "ERROR" && !on(9) && c.Phase != fallback.PhaseConnect && v.Executed == fallback.No && v.Action != fallback.Return {
			t.Errorf("runs again what the user raised: %v", v)
		}
		// Knowing less never makes it bolder.
		less := c
		less.Learnt, less.ParamOIDs = false, nil
		if w := fallback.Classify(err, less); w.Action != v.Action && w.Action != fallback.Return {
			t.Errorf("without a description %v, with one %v", w, v)
		}
	})
}

var errCancelled = fmt.Errorf("call: %w", context.Canceled)

// wrappings are the forms in which an error may arrive.
func wrappings(err error) []error {
	if err == nil {
		return []error{nil}
	}
	return []error{err, fmt.Errorf("executor: query: %w", err), errors.Join(errors.New("first"), err)}
}
