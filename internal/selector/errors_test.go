package selector_test

import (
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/fallback"
)

const ours = "bp_0123456789abcdef0123456789abcdef"

var (
	direct    = fallback.Topology{Pooler: fallback.PoolerNone, Mode: fallback.ModeDirect}
	session   = fallback.Topology{Pooler: fallback.PoolerOther, Mode: fallback.ModeSession, Forwards: true}
	raw       = fallback.Topology{Pooler: fallback.PoolerOther, Mode: fallback.ModeTransaction, Forwards: true}
	statement = fallback.Topology{Pooler: fallback.PoolerOther, Mode: fallback.ModeStatement, Forwards: true}
	notSeen   = fallback.Topology{Pooler: fallback.PoolerOther, Mode: fallback.ModeTransaction}
	tracking  = fallback.Topology{Pooler: fallback.PoolerPgBouncer, Mode: fallback.ModeTransaction, Tracks: true}
)

// server is an error as PostgreSQL sends it.
func server(code, message, routine string) *pgconn.PgError {
	return &pgconn.PgError{Severity: "ERROR", SeverityUnlocalized: "ERROR", Code: code, Message: message, File: "x.c", Line: 1, Routine: routine}
}

// bouncer is an error as PgBouncer sends it.
func bouncer(message string) *pgconn.PgError {
	return &pgconn.PgError{Severity: "FATAL", Code: "08P01", Message: message}
}

// named is a request that bound a name.
func named(t fallback.Topology) fallback.Context {
	return fallback.Context{
		Strategy: fallback.Named, Name: ours, Topology: t, Alive: true, Learnt: true, ParamOIDs: []uint32{20, 25}, Columns: 3,
	}
}
