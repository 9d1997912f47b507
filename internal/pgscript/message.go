package pgscript

import (
	"slices"
	"strings"

	"github.com/jackc/pgx/v5/pgproto3"
)

// Message is what a client sent.
type Message struct {
	// Kind is the message's name in the protocol: Parse, Bind, Describe, Execute, Close, Sync, Query and so on.
	Kind string
	// Name is that of the statement of a Parse, a Bind, a Describe or a Close; "portal" for a Describe or Close of a portal.
	Name string
	// SQL is the text of a Parse or a Query.
	SQL string
	// OIDs are the parameter types of a Parse.
	OIDs []uint32
}

// String is the message in a word or two: "Parse bp_12", "Parse \"\" select 1" for an unnamed one, "Describe portal", "Query commit".
func (m Message) String() string {
	switch {
	case m.Kind == "Query":
		return "Query " + m.SQL
	case m.Kind == "Parse" && m.Name == "":
		return `Parse "" ` + m.SQL
	case m.Name != "":
		return m.Kind + " " + m.Name
	case m.Kind == "Bind" || m.Kind == "Describe" || m.Kind == "Close":
		return m.Kind + ` ""`
	default:
		return m.Kind
	}
}

// EndsRequest reports whether ReadyForQuery is the end of its answer.
func (m Message) EndsRequest() bool { return m.Kind == "Sync" || m.Kind == "Query" }

// Strings returns the messages' short forms.
func Strings(messages []Message) []string {
	out := make([]string, len(messages))
	for i, m := range messages {
		out[i] = m.String()
	}
	return out
}

func messageOf(msg pgproto3.FrontendMessage) Message {
	switch m := msg.(type) {
	case *pgproto3.Parse:
		return Message{Kind: "Parse", Name: m.Name, SQL: m.Query, OIDs: slices.Clone(m.ParameterOIDs)}
	case *pgproto3.Bind:
		return Message{Kind: "Bind", Name: m.PreparedStatement}
	case *pgproto3.Describe:
		return Message{Kind: "Describe", Name: objectName(m.ObjectType, m.Name)}
	case *pgproto3.Close:
		return Message{Kind: "Close", Name: objectName(m.ObjectType, m.Name)}
	case *pgproto3.Query:
		return Message{Kind: "Query", SQL: m.String}
	case *pgproto3.Execute:
		return Message{Kind: "Execute"}
	case *pgproto3.Sync:
		return Message{Kind: "Sync"}
	case *pgproto3.Flush:
		return Message{Kind: "Flush"}
	case *pgproto3.CopyData:
		return Message{Kind: "CopyData"}
	case *pgproto3.CopyDone:
		return Message{Kind: "CopyDone"}
	case *pgproto3.CopyFail:
		return Message{Kind: "CopyFail"}
	case *pgproto3.Terminate:
		return Message{Kind: "Terminate"}
	default:
		return Message{Kind: "?"}
	}
}

func objectName(objectType byte, name string) string {
	if objectType == 'P' {
		return strings.TrimSpace("portal " + name)
	}
	return name
}
