// Package startup tells which settings of a connection string reached the server. A pooler that was told to ignore a startup parameter (PgBouncer's
// ignore_startup_parameters) drops it and says nothing, so that an unqualified name may mean a table of another schema.
package startup

import (
	"cmp"
	"context"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
)

// Setting is a setting that a connection string asks for.
type Setting struct {
	Name  string
	Asked string
	// Found is what holds on the server, empty if it does not know the name. Seen is false if it does not.
	Found string
	Seen  bool
	// Arrived is whether what holds is what was asked for.
	Arrived bool
}

// Asked returns the settings in startup parameters, sorted by name. Those in "options" (-c name=value, --name=value) are among them, as
// PostgreSQL reads them (postinit.c process_startup_options, postgres.c process_postgres_switches); where one is in both, PostgreSQL takes that of
// the parameter. "replication" and protocol options are no settings.
func Asked(params map[string]string) []Setting {
	all := options(params["options"])
	for name, value := range params {
		name = strings.ToLower(name)
		if name != "options" && name != "replication" && !strings.HasPrefix(name, "_pq_.") {
			all[name] = value
		}
	}
	list := make([]Setting, 0, len(all))
	for name, value := range all {
		list = append(list, Setting{Name: name, Asked: value})
	}
	slices.SortFunc(list, func(a, b Setting) int { return cmp.Compare(a.Name, b.Name) })
	return list
}

// options reads the command line in the startup parameter of that name.
func options(line string) map[string]string {
	all := map[string]string{}
	words := split(line)
	for i := 0; i < len(words); i++ {
		assignment, found := strings.CutPrefix(words[i], "--")
		if !found {
			if assignment, found = strings.CutPrefix(words[i], "-c"); !found {
				continue
			}
			if assignment == "" && i+1 < len(words) {
				i++
				assignment = words[i]
			}
		}
		if name, value, found := strings.Cut(assignment, "="); found && name != "" {
			all[strings.ToLower(strings.ReplaceAll(name, "-", "_"))] = value
		}
	}
	return all
}

// split splits at white space that no backslash precedes (postinit.c pg_split_opts).
func split(line string) []string {
	var words []string
	var word strings.Builder
	inside, escaped := false, false
	for _, r := range line {
		switch {
		case escaped:
			word.WriteRune(r)
			escaped = false
		case r == '\\':
			inside, escaped = true, true
		case strings.ContainsRune(" \t\n\r\v\f", r):
			if inside {
				words = append(words, word.String())
				word.Reset()
			}
			inside = false
		default:
			inside = true
			word.WriteRune(r)
		}
	}
	if inside {
		words = append(words, word.String())
	}
	return words
}

const (
	// sqlCompare lets the server write what was asked as it would write it itself, 60000 as 1min. The value holds for this one statement, and
	// the targets are evaluated from left to right.
	sqlCompare = "select pg_catalog.current_setting($1, true), pg_catalog.set_config($1, $2, true)"
	sqlRead    = "select pg_catalog.current_setting($1, true)"
)

// Compare asks a server which settings of startup parameters hold, one round trip each, and nothing for none. It takes the connection over and
// closes it. It needs no transaction, so it works in statement pooling too, and changes nothing. An error is one of the connection.
func Compare(ctx context.Context, conn *pgconn.PgConn, params map[string]string) ([]Setting, error) {
	w, err := takeOver(ctx, conn)
	if err != nil {
		return nil, err
	}
	defer w.close()
	list := Asked(params)
	for i := range list {
		if err := list[i].compare(w); err != nil {
			return nil, err
		}
	}
	return list, nil
}

// Ask runs one statement that has no arguments, and returns its last row as text. It takes the connection over and closes it: when ctx ends the
// socket is closed, and nobody's query is cancelled.
func Ask(ctx context.Context, conn *pgconn.PgConn, sql string) ([][]byte, error) {
	w, err := takeOver(ctx, conn)
	if err != nil {
		return nil, err
	}
	defer w.close()
	row, refused, err := w.one(sql)
	if refused != nil {
		return nil, refused
	}
	return row, err
}

func (s *Setting) compare(w *wire) error {
	row, refused, err := w.one(sqlCompare, s.Name, s.Asked)
	switch {
	case err != nil:
		return err
	case refused == nil:
	case refused.Code == "42704": // undefined_object: the server would have refused the parameter
		return nil
	default: // it cannot be set now, or only by others: compared as it is written
		if row, refused, err = w.one(sqlRead, s.Name); err != nil || refused != nil {
			return err
		}
		row = append(row, []byte(written(s.Asked)))
	}
	if len(row) != 2 || row[0] == nil {
		return nil
	}
	s.Found, s.Seen = string(row[0]), true
	s.Arrived = same(s.Name, s.Found, string(row[1]))
	return nil
}

// written returns a boolean as the server writes it, and anything else as it is.
func written(value string) string {
	switch strings.ToLower(value) {
	case "1", "true", "yes":
		return "on"
	case "0", "false", "no":
		return "off"
	}
	return value
}

// same compares what holds with what was asked for. Lists are written with and without a space behind the comma, and names in them with and
// without quotes; PgBouncer can add the client's address to application_name (application_name_add_host).
func same(name, found, asked string) bool {
	if name == "application_name" {
		return strings.HasPrefix(found, asked)
	}
	plain := strings.NewReplacer(" ", "", `"`, "")
	return found == asked || written(found) == written(asked) || strings.EqualFold(plain.Replace(found), plain.Replace(asked))
}
