package fallback

import (
	"log/slog"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
)

// Pooler names what stands between the program and PostgreSQL, as far as its behaviour gives it away. It is a hint for people: no
// decision depends on which of the poolers it is.
type Pooler string

// What a probe can find. A pooler shows its make only by the names it gives to prepared statements, so one that forwards names as they
// are remains [PoolerOther].
const (
	PoolerUnknown   Pooler = ""       // not probed
	PoolerNone      Pooler = "none"   // a direct connection
	PoolerOther     Pooler = "pooler" // a pooler of a make that does not show
	PoolerPgBouncer Pooler = "pgbouncer"
	PoolerOdyssey   Pooler = "odyssey"
	PoolerPgCat     Pooler = "pgcat"
	PoolerSupavisor Pooler = "supavisor"
	PoolerPgDoorman Pooler = "pg_doorman"
	PoolerPgDog     Pooler = "pgdog"
)

// renames are the prefixes with which poolers replace the name of a client's prepared statement, as pg_prepared_statements and the
// server's error messages show them.
var renames = []struct {
	prefix string
	pooler Pooler
}{
	{"PGBOUNCER_", PoolerPgBouncer}, // PgBouncer ≥ 1.21, include/prepare.h
	{"odyssey_", PoolerOdyssey},     // Odyssey ≥ 1.5.1: odyssey_pstmt_<n>
	{"PGCAT_", PoolerPgCat},
	{"sv_", PoolerSupavisor},
	{"DOORMAN_", PoolerPgDoorman},
	{"__pgdog_", PoolerPgDog},
}

// renamedBy returns the pooler that gives statements names like this one, or PoolerUnknown.
func renamedBy(name string) Pooler {
	for _, r := range renames {
		if strings.HasPrefix(name, r.prefix) {
			return r.pooler
		}
	}
	return PoolerUnknown
}

// Mode says for how long a client keeps the same server connection.
type Mode uint8

const (
	// ModeUnknown is the zero value: not probed, or the probe could not tell.
	ModeUnknown Mode = iota
	// ModeDirect is no pooler at all: client and server are one connection.
	ModeDirect
	// ModeSession is a pooler that was not seen to change servers under a client. It may be session pooling; it may also be
	// transaction pooling that had no reason to change. Named statements are used, and one that gets lost is evidence.
	ModeSession
	// ModeTransaction is a pooler that was seen to share or change server connections between transactions.
	ModeTransaction
	// ModeStatement is a pooler that refuses transactions of more than one Sync group.
	ModeStatement
)

// String returns "unknown", "direct", "session-like", "transaction" or "statement".
func (m Mode) String() string {
	switch m {
	case ModeDirect:
		return "direct"
	case ModeSession:
		return "session-like"
	case ModeTransaction:
		return "transaction"
	case ModeStatement:
		return "statement"
	case ModeUnknown:
	}
	return "unknown"
}

// Tracking says whether a pooler keeps track of clients' prepared statements. A look that failed says neither yes nor no.
type Tracking uint8

const (
	// TrackingUnknown is the zero value: it was not seen. It is a reason to look again, and none for advice.
	TrackingUnknown Tracking = iota
	// TrackingNo is proven: the server knew a statement by the name that the client had given it.
	TrackingNo
	// TrackingYes is proven: the server knew a statement by a name that the pooler had made.
	TrackingYes
)

// String returns "not seen", "no" or "yes".
func (t Tracking) String() string {
	switch t {
	case TrackingNo:
		return "no"
	case TrackingYes:
		return "yes"
	case TrackingUnknown:
	}
	return "not seen"
}

// Strategy is how a pool runs its stable statements.
type Strategy uint8

const (
	// Undecided is the zero value: nobody has probed yet. Run statements unprepared, which is right everywhere.
	Undecided Strategy = iota
	// Unprepared sends the text with each execution: Parse "", Bind, Describe, Execute in one Sync group.
	Unprepared
	// Named parses a statement once a connection and binds its name afterwards.
	Named
	// Shared binds names optimistically on whichever server answers, and parses where one is missing.
	Shared
)

// String returns "undecided", "unprepared", "named" or "shared".
func (s Strategy) String() string {
	switch s {
	case Unprepared:
		return "unprepared"
	case Named:
		return "named"
	case Shared:
		return "shared"
	case Undecided:
	}
	return "undecided"
}

// Topology is what a probe found. The zero value means "not probed". It is a value: treat Evidence as read-only.
type Topology struct {
	// Pooler is what stands in between.
	Pooler Pooler
	// Mode is how long a client keeps its server connection.
	Mode Mode
	// Tracks is true for a pooler that was seen to know clients' prepared statements and to make them follow the client from server to
	// server. False does not say that it does not, see [Topology.Tracking].
	Tracks bool
	// Forwards is true for a pooler that was seen to hand the names of prepared statements to the server as they are: it does not track.
	Forwards bool
	// Partial is true when the look could not be finished, as where the server has no connection left for a second one: what was seen is
	// so, and it is worth while to look again soon.
	Partial bool
	// Evidence are the observations behind the verdict, one English sentence each.
	Evidence []string
}

// Tracking says what is known of whether the pooler tracks prepared statements. On a direct connection there is none that could: [TrackingNo].
func (t Topology) Tracking() Tracking {
	switch {
	case t.Tracks:
		return TrackingYes
	case t.Forwards, t.Mode == ModeDirect:
		return TrackingNo
	default:
		return TrackingUnknown
	}
}

// Sharing reports whether the pooler was seen to share server connections between transactions, or refuses transactions.
func (t Topology) Sharing() bool { return t.Mode == ModeTransaction || t.Mode == ModeStatement }

// Open reports whether the probe left open what [Topology.Strategy] depends on: to look again may change it.
func (t Topology) Open() bool {
	return t.Partial || t.Mode == ModeUnknown || t.Sharing() && t.Tracking() == TrackingUnknown
}

// After returns the topology with what an error proves besides. A server that misses a statement by a name that a pooler makes has a pooler
// before it that tracks; so has a client to which the pooler itself says what it thinks of a statement. A server that speaks of the client's
// own name has one that forwards names, whatever it did before.
func (t Topology) After(v Verdict) Topology {
	if t.Mode == ModeDirect || v.PgError == nil || !v.Evidence {
		return t
	}
	maker := renamedBy(v.Name)
	switch {
	case v.Reason == ReasonPoolerPrepared && v.PoolerMade && saysAboutPrepared(v.PgError):
		if t.Tracks {
			return t
		}
		t.Tracks, t.Forwards = true, false
		t.add("the pooler itself refused a prepared statement")
	case v.Reason != ReasonPreparedLost || v.PoolerMade || v.Name == "":
	case maker != PoolerUnknown:
		if t.Tracks {
			return t
		}
		t.Tracks, t.Forwards, t.Pooler = true, false, maker
		if maker == PoolerPgBouncer && !t.Sharing() {
			t.Mode = ModeTransaction // it tracks only where it shares servers
		}
		t.add("it tracks prepared statements: the server missed one by the pooler's name " + strconv.Quote(v.Name))
	case !t.Forwards:
		t.Tracks, t.Forwards = false, true
		t.add("it forwards the names of prepared statements: the server spoke of " + strconv.Quote(v.Name))
	}
	return t
}

// add appends an observation, and leaves the slice alone that other topologies share.
func (t *Topology) add(observation string) {
	t.Evidence = append(t.Evidence[:len(t.Evidence):len(t.Evidence)], observation)
}

// saysAboutPrepared reports whether a pooler's error is one that only a pooler makes which keeps track of statements: PgBouncer's
// "prepared statement did not exist" and "prepared statement name is already in use" (src/prepare.c). A server that leaves the routine out of
// its errors, and is taken for a pooler, has SQLSTATEs of its own.
func saysAboutPrepared(e *pgconn.PgError) bool {
	return e.Code == "08P01" && strings.HasPrefix(e.Message, "prepared statement ")
}

// Known reports whether this is the result of a probe.
func (t Topology) Known() bool { return t.Pooler != PoolerUnknown }

// Pooled reports whether anything but a proven direct connection is assumed. Where it is true a prepared statement may be re-parsed on
// another server behind the client's back, so rows have to be described with each execution. It is true for the zero value.
func (t Topology) Pooled() bool { return t.Mode != ModeDirect }

// Strategy is the best way to run stable statements here without anybody's opt-in: [Named] on a direct connection, in session-like
// pooling and behind a pooler that tracks statements (in statement mode too: a named statement in one Sync group works there, as run on
// PgBouncer 1.24 and 1.26); [Unprepared] behind one that shares servers and was not seen to track them; [Undecided] for the zero value.
func (t Topology) Strategy() Strategy {
	switch {
	case !t.Known():
		return Undecided
	case t.Tracks, t.Mode == ModeDirect, t.Mode == ModeSession:
		return Named
	default:
		return Unprepared
	}
}

// String describes the topology in a few words, for instance "direct", "pgbouncer, transaction pooling, tracks prepared statements"
// or "pooler, session-like".
func (t Topology) String() string {
	switch {
	case !t.Known():
		return "unknown"
	case t.Mode == ModeDirect:
		return "direct"
	}
	var b strings.Builder
	b.WriteString(string(t.Pooler))
	switch t.Mode {
	case ModeSession:
		b.WriteString(", session-like")
	case ModeTransaction, ModeStatement:
		b.WriteString(", " + t.Mode.String() + " pooling")
	case ModeUnknown, ModeDirect:
		b.WriteString(", mode unknown")
	}
	if t.Tracks {
		b.WriteString(", tracks prepared statements")
	}
	return b.String()
}

// LogValue makes a topology a group of "pooler", "mode", "tracks" and "evidence".
func (t Topology) LogValue() slog.Value {
	return slog.GroupValue(
		slog.String("pooler", string(t.Pooler)),
		slog.String("mode", t.Mode.String()),
		slog.String("tracks", t.Tracking().String()),
		slog.String("evidence", strings.Join(t.Evidence, "; ")),
	)
}
