package main

import (
	"context"
	"fmt"
	"regexp"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/internal/startup"
)

// setting is a setting that the connection string asks for. Values of settings that the server does not know are not shown: a name that is
// misspelt may be that of a password.
type setting struct {
	Name  string  `json:"name"`
	Asked *string `json:"asked"`
	Found *string `json:"found"` // null: the server does not know it
	Holds bool    `json:"holds"`
}

// compareSettings finds settings that did not reach the server.
func (d *diagnosis) compareSettings(ctx context.Context, cc *pgconn.Config) {
	if len(startup.Asked(cc.RuntimeParams)) == 0 {
		return
	}
	conn, err := pgconn.ConnectConfig(ctx, cc)
	var list []startup.Setting
	if err == nil {
		list, err = startup.Compare(ctx, conn, cc.RuntimeParams)
	}
	if err != nil {
		d.find(problem, "whether the settings of the connection string hold could not be found out: "+cause(err), "try again, with a longer --timeout")
		return
	}
	for _, s := range list {
		kept := setting{Name: s.Name, Holds: s.Arrived}
		if s.Seen {
			kept.Asked, kept.Found = &s.Asked, &s.Found
		}
		d.Settings = append(d.Settings, kept)
		if !s.Arrived {
			d.findSetting(s, cc.User)
		}
	}
}

// reported are the settings that PgBouncer passes on with track_extra_parameters: those which the server reports (GUC_REPORT), without
// those that PgBouncer always passes on. The number is the server version from which on it does.
var reported = map[string]int{
	"intervalstyle": 0, "default_transaction_read_only": 140000, "search_path": 180000,
}

// findSetting says what it means that a setting did not arrive, and what helps.
func (d *diagnosis) findSetting(s startup.Setting, user string) {
	if !s.Seen {
		d.find(problem, fmt.Sprintf("the connection string asks for %s, which the server does not know; whatever stands in between drops it and says nothing", s.Name),
			"correct its name, or leave it out")
		return
	}
	if s.Name == "application_name" {
		d.find(note, fmt.Sprintf("application_name is '%s' on the server, not '%s'", s.Found, s.Asked), "")
		return
	}
	what := fmt.Sprintf("%s is '%s' on the server, not '%s' as the connection string asks: ", s.Name, s.Found, s.Asked)
	if d.Topology != nil && d.Topology.Pooler != string(fallback.PoolerNone) {
		what += "the pooler drops it and says nothing (in PgBouncer ignore_startup_parameters names it)"
	} else {
		what += "something in between drops it, or sets it later"
	}
	switch s.Name {
	case "search_path":
		what += "; names without a schema mean other tables than the program thinks"
	case "statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout", "transaction_timeout", "idle_session_timeout":
		what += "; there is no such limit"
	}
	remedy := fmt.Sprintf("alter role %s in database %s set %s = %s, then RECONNECT on the pooler's console; leave it out of the connection string",
		quoteIdent(user), quoteIdent(d.Database), s.Name, quoteValue(s))
	if since, ok := reported[s.Name]; ok && d.Server.number >= since {
		remedy += fmt.Sprintf("; or keep it there and let PgBouncer 1.20 or newer pass it on: track_extra_parameters = IntervalStyle, %s", s.Name)
	}
	d.find(problem, what, remedy)
}

// plainName is an identifier that needs no quotes.
var plainName = regexp.MustCompile(`^[a-z_][a-z0-9_]*$`)

func quoteIdent(name string) string {
	if plainName.MatchString(name) {
		return name
	}
	return pgx.Identifier{name}.Sanitize()
}

// quoteValue writes a value as SET takes it. In quotes the list of search_path would be one name.
func quoteValue(s startup.Setting) string {
	if s.Name == "search_path" {
		var names []string
		for name := range strings.SplitSeq(s.Asked, ",") {
			if name = strings.TrimSpace(name); strings.HasPrefix(name, `"`) {
				names = append(names, name)
			} else {
				names = append(names, quoteIdent(strings.ToLower(name)))
			}
		}
		return strings.Join(names, ", ")
	}
	return "'" + strings.ReplaceAll(s.Asked, "'", "''") + "'"
}
