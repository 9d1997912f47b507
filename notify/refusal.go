package notify

import (
	"errors"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
)

// refusal is why delivery is not proven.
type refusal struct {
	state   State
	reason  string
	err     error
	remedy  string // what helps, if anything does
	settled bool   // not a matter of trying again soon
	atOnce  bool   // to be tried again without a wait, to know more
}

func (r *refusal) String() string {
	text := r.reason
	if r.err != nil {
		text += ": " + r.err.Error()
	}
	return oneLine(text)
}

var errNoProof = errors.New("a note from another session did not arrive")

// remedyForSharing: servers are lent to others between two statements of ours.
func (k *link) remedyForSharing() string {
	if k.direct != nil {
		return "let ListenerConfig.Direct be a session connection: to the server itself, or a pool in session mode"
	}
	return "set ListenerConfig.Direct to a session connection: the server itself, or a pool in session mode"
}

// remedyForSilence: LISTEN succeeded and a note was sent, on different ways.
func (k *link) remedyForSilence(pooled bool) string {
	switch {
	case pooled:
		return k.remedyForSharing()
	case k.direct != nil:
		return "let ListenerConfig.Direct lead to the same server and database as the pool, by a session connection"
	default:
		return "let the pool's address lead to one server alone, the one that publishers use"
	}
}

// remedyForRefusal: a server refused a statement of ours. who is who has to lead elsewhere if it is a standby.
func remedyForRefusal(err error, who string) string {
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) {
		return ""
	}
	switch pgErr.Code {
	case "25006": // read_only_sql_transaction: NOTIFY and LISTEN "during recovery" (PreventCommandDuringRecovery)
		return "let " + who + " lead to the primary: a standby has no notifications"
	case "22P05": // untranslatable_character
		return "use a name that the database's encoding can hold"
	}
	return ""
}

// unsent is the refusal when no note could be sent, so that nothing is known of the listener.
func (k *link) unsent(s *session, err error) *refusal {
	r := &refusal{state: Isolated, reason: "delivery cannot be proven", err: err, remedy: remedyForRefusal(err, "the pool")}
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) && !strings.HasPrefix(pgErr.Code, "08") && !strings.HasPrefix(pgErr.Code, "53") {
		return r // the pool has a connection to give, and the pooler a server
	}
	r.remedy = "see to it that the pool can run a statement: it needs a free connection, and a server that commits"
	if s.pooled {
		// Perhaps the listener has the pooler's last server: it has to give it back, and not to come again soon.
		r.settled = true
		r.reason += ": there is no server for a note beside the one that the listener has"
		r.remedy = "give the pooler's pool more servers, or set ListenerConfig.Direct to the server itself"
		if k.direct != nil {
			r.remedy = "give the poolers' pools more servers"
		}
	}
	return r
}
