// Package sqltext says what a text of SQL is: the one table behind every question that is decided by a statement's keyword.
//
// It reads words and understands no SQL. Where it cannot be sure it answers what is safe for the question that is asked, and each flag says which
// way that is.
package sqltext

// Kind is what a text is: a set of flags.
type Kind uint16

const (
	// Copy is COPY, whose answer only pgx's own paths read past.
	Copy Kind = 1 << iota
	// Control begins, ends or cuts a transaction, or sets something for it or the session: it keeps its place among other statements, and is sent
	// as it is, without being learnt.
	Control
	// Cuts ends a transaction, or cuts it so that a part of it can have another fate: COMMIT, END, ABORT, ROLLBACK (TO), SAVEPOINT, RELEASE,
	// PREPARE TRANSACTION. Too many of these cost a round trip, one too few an order.
	Cuts
	// MayCommit may commit on its way, and with itself what its Sync group ran before it: a procedure and a DO block can, as can what PostgreSQL
	// runs in transactions of its own, or refuses to run beside others.
	MayCommit
	// NeedsBlock is refused outside of BEGIN (25P01), or is without effect there.
	NeedsBlock
	// ForgetsStatements throws prepared statements of the session away: DEALLOCATE and DISCARD ALL. Forgetting too much costs a Parse.
	ForgetsStatements
	// Utility is none of the statements whose plans PostgreSQL keeps: its result may have other columns at every execution without the server
	// calling a plan stale (0A000), as with FETCH, EXECUTE, EXPLAIN and SHOW, which are described when the portal starts
	// (UtilityTupleDescriptor, src/backend/tcop/utility.c).
	Utility
)

// planned are the first words of the statements whose plans PostgreSQL keeps (sql_help.c and gram.y, PreparableStmt). Every other word begins a
// utility statement.
var planned = map[string]bool{
	"select": true, "insert": true, "update": true, "delete": true, "merge": true, "with": true, "values": true, "table": true,
}

// table has the first words of the utility statements, each with what it is besides. A word that is not here may do anything, so it may commit.
var table = map[string]Kind{
	"abort":      Control | Cuts | NeedsBlock,
	"alter":      MayCommit,
	"analyse":    MayCommit,
	"analyze":    MayCommit,
	"begin":      Control | NeedsBlock,
	"call":       MayCommit,
	"checkpoint": 0,
	"close":      0,
	"cluster":    MayCommit,
	"comment":    0,
	"commit":     Control | Cuts | NeedsBlock,
	"copy":       Copy,
	"create":     MayCommit,
	"deallocate": ForgetsStatements,
	"declare":    NeedsBlock,
	"discard":    MayCommit, // ALL is refused beside others
	"do":         MayCommit,
	"drop":       MayCommit,
	"end":        Control | Cuts | NeedsBlock,
	"execute":    0,
	"explain":    0,
	"fetch":      0,
	"grant":      0,
	"import":     0,
	"listen":     0,
	"load":       0,
	"lock":       NeedsBlock,
	"move":       0,
	"notify":     0,
	"prepare":    Control,
	"reassign":   0,
	"refresh":    0,
	"reindex":    MayCommit,
	"release":    Control | Cuts | NeedsBlock,
	"reset":      Control | NeedsBlock,
	"revoke":     0,
	"rollback":   Control | Cuts | NeedsBlock,
	"savepoint":  Control | Cuts | NeedsBlock,
	"security":   0,
	"set":        Control | NeedsBlock,
	"show":       0,
	"start":      Control | NeedsBlock,
	"truncate":   0,
	"unlisten":   0,
	"vacuum":     MayCommit,
}

// second has the flags that follow from the second word too.
var second = map[[2]string]Kind{
	{"discard", "all"}:         ForgetsStatements,
	{"prepare", "transaction"}: Cuts | NeedsBlock,
}

// Of returns what a text is that holds one statement, as every text of the extended protocol does. It does not allocate. Safe for concurrent use.
func Of(sql string) Kind {
	var buf [longestWord]byte
	rest := skip(sql)
	first := word(rest, &buf)
	if len(first) == 0 {
		return 0
	}
	if planned[string(first)] {
		return 0
	}
	kind, known := table[string(first)]
	if !known {
		return Utility | MayCommit
	}
	kind |= Utility
	switch string(first) {
	case "discard", "prepare":
		var next [longestWord]byte
		kind |= second[[2]string{string(first), string(word(skip(rest[len(first):]), &next))}]
	}
	return kind
}

// verbs are the first words of the texts whose command tag is known beforehand, each with the tag's first word, whatever views and rules do with
// the text (PortalRunMulti, src/backend/tcop/pquery.c).
var verbs = map[string]string{
	"select": "SELECT", "values": "SELECT", "table": "SELECT", "insert": "INSERT", "update": "UPDATE", "delete": "DELETE", "merge": "MERGE",
	"begin": "BEGIN", "commit": "COMMIT", "end": "COMMIT", "rollback": "ROLLBACK", "abort": "ROLLBACK", "savepoint": "SAVEPOINT", "release": "RELEASE",
	"copy": "COPY",
}

// Verb returns the first word of the command tag that PostgreSQL gives to a text of one statement, "" where that is not certain. For COMMIT it may
// be ROLLBACK too. It does not allocate. Safe for concurrent use.
func Verb(sql string) string {
	var buf [longestWord]byte
	return verbs[string(word(skip(sql), &buf))]
}

// OfScript returns what a text is that may hold several statements, as one of the simple protocol may: the flags of all of them. What a backslash
// in a plain string means is a setting of the server's (standard_conforming_strings), so a text that has one is read both ways.
func OfScript(sql string) Kind {
	kind, backslash := ofScript(sql, false)
	if backslash {
		escaped, _ := ofScript(sql, true)
		kind |= escaped
	}
	return kind
}

// ofScript is OfScript for one meaning of a backslash in a plain string: whether it quotes what follows. It reports whether there was one.
func ofScript(sql string, escapes bool) (kind Kind, backslash bool) {
	kind = Of(sql)
	for rest := sql; ; {
		next, ok, found := nextStatement(rest, escapes)
		backslash = backslash || found
		if !ok {
			return kind, backslash
		}
		kind |= Of(next)
		rest = next
	}
}
