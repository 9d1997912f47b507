package place

import (
	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

// entry is what there is to know about a mode.
type entry struct {
	mode         Mode
	pooler       string // its name, empty if there is none
	shares       bool   // the server connection under a client changes
	tracks       bool   // names of statements are kept track of
	refusesBegin bool
	// open starts the pooler in front of a running server and fills in how it is reached. It is nil if there is no pooler.
	open func(tb postgres.TB, r *Running, change []func(*pgbouncer.Options))
}

// modes is the one table of modes. A new one is an entry here and a constant.
var modes = []entry{
	{mode: Direct},
	{mode: Session, pooler: "PgBouncer", open: pgBouncer(pgbouncer.Options{PoolMode: "session", PoolSize: 40})},
	{mode: TransactionRaw, pooler: "PgBouncer", shares: true, open: pgBouncer(pgbouncer.Options{PoolMode: "transaction"})},
	{mode: TransactionTracked, pooler: "PgBouncer", shares: true, tracks: true, open: pgBouncer(tracking("transaction"))},
	{mode: Statement, pooler: "PgBouncer", shares: true, refusesBegin: true, open: pgBouncer(pgbouncer.Options{PoolMode: "statement"})},
	{mode: StatementTracked, pooler: "PgBouncer", shares: true, tracks: true, refusesBegin: true, open: pgBouncer(tracking("statement"))},
}

func entryOf(m Mode) (entry, bool) {
	for _, e := range modes {
		if e.mode == m {
			return e, true
		}
	}
	return entry{}, false
}

func tracking(poolMode string) pgbouncer.Options {
	return pgbouncer.Options{PoolMode: poolMode, MaxPreparedStatements: 200}
}

// pgBouncer returns an entry's open for PgBouncer. What o leaves open is four server connections that take turns, so that a name is asked
// for on the wrong one at once, and no tracking.
func pgBouncer(o pgbouncer.Options) func(postgres.TB, *Running, []func(*pgbouncer.Options)) {
	return func(tb postgres.TB, r *Running, change []func(*pgbouncer.Options)) {
		tb.Helper()
		o := o
		o.Version = r.Place.Bouncer
		if o.PoolSize == 0 {
			o.PoolSize = 4
		}
		if o.MaxPreparedStatements == 0 {
			o.MaxPreparedStatements = -1
		}
		o.Settings = map[string]string{"server_round_robin": "1"}
		for _, f := range change {
			f(&o)
		}
		r.Bouncer = pgbouncer.Start(tb, r.Server, o)
		r.URL = r.Bouncer.URL(r.DB.Name)
	}
}
