package answer_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/bounceproof/bounceproof/internal/answer"
)

// exchange is what a client sends and a server answers, in turns.
type exchange struct {
	name    string
	hint    answer.Hint
	asks    []pgproto3.FrontendMessage
	answers []pgproto3.BackendMessage
}

func row(values ...string) *pgproto3.DataRow {
	d := &pgproto3.DataRow{}
	for _, v := range values {
		d.Values = append(d.Values, []byte(v))
	}
	return d
}

func columns(names ...string) *pgproto3.RowDescription {
	d := &pgproto3.RowDescription{}
	for _, n := range names {
		d.Fields = append(d.Fields, pgproto3.FieldDescription{Name: []byte(n)})
	}
	return d
}

func done(tag string) *pgproto3.CommandComplete {
	return &pgproto3.CommandComplete{CommandTag: []byte(tag)}
}

var (
	failed = &pgproto3.ErrorResponse{Severity: "ERROR", SeverityUnlocalized: "ERROR", Code: "42P01", Message: strings.Repeat("no ", 50)}
	fatal  = &pgproto3.ErrorResponse{Severity: "ВАЖНО", SeverityUnlocalized: "FATAL", Code: "57P01", Message: "bye"}
	ready  = &pgproto3.ReadyForQuery{TxStatus: 'I'}
)

type (
	front = []pgproto3.FrontendMessage
	back  = []pgproto3.BackendMessage
)

func run(parse bool) front {
	var f front
	if parse {
		f = front{&pgproto3.Close{ObjectType: 'S', Name: "n"}, &pgproto3.Parse{Name: "n", Query: "select"}}
	}
	return append(f, &pgproto3.Bind{PreparedStatement: "n"}, &pgproto3.Describe{ObjectType: 'P'}, &pgproto3.Execute{}, &pgproto3.Sync{})
}

var exchanges = []exchange{
	{"named", answer.Hint{Verb: "SELECT"}, run(true), back{
		&pgproto3.CloseComplete{}, &pgproto3.ParseComplete{}, &pgproto3.BindComplete{}, columns("a", "b"),
		row("1", strings.Repeat("long", 500)), row("2", "y"), done("SELECT 2"), ready,
	}},
	{"without rows", answer.Hint{Verb: "UPDATE"}, run(false), back{&pgproto3.BindComplete{}, &pgproto3.NoData{}, done("UPDATE 7"), ready}},
	{"without columns", answer.Hint{}, run(false), back{&pgproto3.BindComplete{}, columns(), row(), done("SELECT 1"), ready}},
	{"empty", answer.Hint{}, run(false), back{&pgproto3.BindComplete{}, &pgproto3.NoData{}, &pgproto3.EmptyQueryResponse{}, ready}},
	{
		"not described",
		answer.Hint{Verb: "SELECT", Columns: 2},
		front{&pgproto3.Bind{PreparedStatement: "n"}, &pgproto3.Execute{}, &pgproto3.Sync{}},
		back{&pgproto3.BindComplete{}, row("1", "x"), row("2", "y"), done("SELECT 2"), ready},
	},
	{
		"some of the rows",
		answer.Hint{},
		front{&pgproto3.Bind{}, &pgproto3.Execute{MaxRows: 1}, &pgproto3.Sync{}},
		back{&pgproto3.BindComplete{}, row("1"), &pgproto3.PortalSuspended{}, ready},
	},
	{
		"learn",
		answer.Hint{},
		front{&pgproto3.Parse{Query: "select"}, &pgproto3.Describe{ObjectType: 'S'}, &pgproto3.Sync{}},
		back{&pgproto3.ParseComplete{}, &pgproto3.ParameterDescription{}, columns("a"), ready},
	},
	{"refused", answer.Hint{}, run(true), back{&pgproto3.CloseComplete{}, failed, ready}},
	{"refused at the end", answer.Hint{}, run(false), back{&pgproto3.BindComplete{}, &pgproto3.NoData{}, done("INSERT 0 1"), failed, ready}},
	{"a transaction", answer.Hint{}, append(run(false), run(false)...), back{
		&pgproto3.BindComplete{}, &pgproto3.NoData{}, done("BEGIN"), &pgproto3.ReadyForQuery{TxStatus: 'T'}, failed, &pgproto3.ReadyForQuery{TxStatus: 'E'},
	}},
	{
		"simple",
		answer.Hint{},
		front{&pgproto3.Query{String: "select; insert"}},
		back{columns("a"), row("1"), done("SELECT 1"), done("INSERT 0 1"), columns("b", "c"), done("SELECT 0"), ready},
	},
	{"simple, refused", answer.Hint{}, front{&pgproto3.Query{String: "select"}}, back{columns("a"), row("1"), failed, ready}},
	{
		"copy in",
		answer.Hint{},
		front{&pgproto3.Query{String: "copy"}, &pgproto3.CopyData{Data: []byte("x")}, &pgproto3.CopyDone{}},
		back{&pgproto3.CopyInResponse{}, done("COPY 1"), ready},
	},
	{"copy in, given up", answer.Hint{}, front{&pgproto3.Query{String: "copy"}, &pgproto3.CopyFail{}}, back{&pgproto3.CopyInResponse{}, failed, ready}},
	{
		"copy out",
		answer.Hint{},
		front{&pgproto3.Query{String: "copy"}},
		back{&pgproto3.CopyOutResponse{}, &pgproto3.CopyData{Data: []byte("x")}, &pgproto3.CopyDone{}, done("COPY 1"), ready},
	},
	{"copy out by Execute", answer.Hint{}, run(false), back{
		&pgproto3.BindComplete{}, &pgproto3.NoData{}, &pgproto3.CopyOutResponse{}, &pgproto3.CopyDone{}, done("COPY 0"), ready,
	}},
	{"function", answer.Hint{}, front{&pgproto3.FunctionCall{}}, back{&pgproto3.FunctionCallResponse{}, ready}},
	{"the server goes", answer.Hint{}, run(false), back{&pgproto3.BindComplete{}, fatal}},
}

// play sends and answers, a piece of the stream at a time, and returns the types of the messages that came through.
func play(e exchange, answers back, piece int) (types string, _ error) {
	var c answer.Checker
	var in bytes.Buffer
	for _, m := range answers {
		b, err := m.Encode(nil)
		if err != nil {
			panic(err)
		}
		in.Write(b)
	}
	r, w := c.Wrap(&pieces{r: &in, n: piece}, io.Discard)
	c.Expect(e.hint)
	var out []byte
	for _, m := range e.asks {
		b, err := m.Encode(nil)
		if err != nil {
			panic(err)
		}
		out = append(out, b...)
	}
	for len(out) > 0 {
		n := min(piece, len(out))
		if _, err := w.Write(out[:n]); err != nil {
			return "", err
		}
		out = out[n:]
	}
	f := pgproto3.NewFrontend(r, io.Discard)
	for {
		m, err := f.Receive()
		if errors.Is(err, io.ErrUnexpectedEOF) {
			return types, c.Err()
		}
		if err != nil {
			return types, err
		}
		b, _ := m.(interface{ Encode([]byte) ([]byte, error) }).Encode(nil)
		types += string(b[0])
	}
}

// pieces is a reader that gives at most n bytes at a time.
type pieces struct {
	r io.Reader
	n int
}

func (p *pieces) Read(b []byte) (int, error) { return p.r.Read(b[:min(len(b), p.n)]) }

func typesOf(messages back) (types string) {
	for _, m := range messages {
		b, _ := m.Encode(nil)
		types += string(b[0])
	}
	return types
}

// everything is one of each message that a server can send after start-up.
var everything = back{
	&pgproto3.ParseComplete{}, &pgproto3.BindComplete{}, &pgproto3.CloseComplete{}, done("SELECT 1"), done("DELETE 1"), row("1"), row("1", "2", "3"),
	failed, fatal, &pgproto3.CopyInResponse{}, &pgproto3.CopyOutResponse{}, &pgproto3.CopyData{Data: []byte("x")}, &pgproto3.CopyDone{},
	&pgproto3.EmptyQueryResponse{}, &pgproto3.BackendKeyData{SecretKey: make([]byte, 4)}, &pgproto3.NoData{}, &pgproto3.AuthenticationOk{},
	&pgproto3.PortalSuspended{}, &pgproto3.ParameterDescription{}, columns("a"), columns("a", "b", "c"), &pgproto3.FunctionCallResponse{}, ready,
}

// anyTime are those that may come at any time.
var anyTime = back{
	&pgproto3.NoticeResponse{Message: "n"}, &pgproto3.ParameterStatus{Name: "a", Value: "b"}, &pgproto3.NotificationResponse{Channel: "c"},
}

func TestWhatTheProtocolAllowsComesThrough(t *testing.T) {
	t.Parallel()
	for _, e := range exchanges {
		for _, piece := range []int{1, 3, 5, 8, 64, 1 << 20} {
			if got, err := play(e, e.answers, piece); err != nil || got != typesOf(e.answers) {
				t.Errorf("%s, %d bytes at a time: %q of %q, %v", e.name, piece, got, typesOf(e.answers), err)
			}
			for _, m := range anyTime {
				for at := range len(e.answers) + 1 {
					if got, err := play(e, inserted(e.answers, at, m), piece); err != nil || len(got) != len(e.answers)+1 {
						t.Errorf("%s, %T before message %d: %q, %v", e.name, m, at, got, err)
					}
				}
			}
		}
	}
}

func inserted(messages back, at int, m ...pgproto3.BackendMessage) back {
	return append(append(append(back{}, messages[:at]...), m...), messages[at:]...)
}

// part is the answer to one request as regular expressions: the whole of it, and any beginning of it.
type part struct{ whole, begun string }

// grammar is what the protocol allows for what e asks, written down independently of the checker: a regular expression of the beginnings of all
// answers.
func grammar(asks front) string {
	var parts []part
	var segments []string // up to each ReadyForQuery
	var ends []string     // the beginnings of the segment in question
	described := false
	end := func() {
		var whole, begun []string
		before := ""
		for _, p := range append(parts, part{"", ""}) {
			whole = append(whole, before+"("+p.begun+")E")
			begun = append(begun, before+"("+p.begun+")(EZ?)?")
			before += "(" + p.whole + ")"
		}
		whole, begun = append(whole, before), append(begun, before+"Z?")
		ends = append(ends, strings.Join(segments, "")+"("+strings.Join(begun, "|")+")")
		segments = append(segments, "("+strings.Join(whole, "|")+")Z")
		parts, described = nil, false
	}
	for i, m := range asks {
		switch m := m.(type) {
		case *pgproto3.Parse:
			parts = append(parts, part{"1", "1?"})
		case *pgproto3.Bind:
			parts = append(parts, part{"2", "2?"})
		case *pgproto3.Close:
			parts = append(parts, part{"3", "3?"})
		case *pgproto3.Describe:
			if described = m.ObjectType == 'P'; !described {
				parts = append(parts, part{"t[Tn]", "(t[Tn]?)?"})
			}
		case *pgproto3.Execute:
			last := "C"
			if m.MaxRows > 0 {
				last = "[Cs]"
			}
			p := part{"TD*" + last + "|[Tn]I|n" + last + "|[Tn]Hd*cC", "(TD*" + last + "?|[Tn]I?|n" + last + "?|[Tn]G|[Tn]Hd*(cC?)?)?"}
			if !described {
				p = part{"D*" + last + "|I|Hd*cC", "D*" + last + "?|I|G|Hd*(cC?)?"}
			}
			parts = append(parts, p)
		case *pgproto3.Sync:
			end()
		case *pgproto3.Query:
			one := "TD*C|C|I|Hd*cC"
			if len(asks) > i+1 {
				if _, ok := asks[len(asks)-1].(*pgproto3.CopyDone); ok {
					one += "|GC"
				}
			}
			parts = append(parts, part{"(" + one + ")+", "(" + one + ")*(TD*|Hd*c?|G)?"})
			end()
		case *pgproto3.FunctionCall:
			parts = append(parts, part{"V", "V?"})
			end()
		}
	}
	return "^(" + strings.Join(ends, "|") + ")$"
}

// shape is an answer as a word of the grammar: rows of another number of columns than were described are X, tags of another command Y. An error
// that ends the connection is an answer where one is due, and may come at any time.
func shape(e exchange, answers back) (word string, fatals []int) {
	n, rows, copying := e.hint.Columns, 0, false
	for _, m := range answers {
		b, _ := m.Encode(nil)
		typ := string(b[0])
		switch m := m.(type) {
		case *pgproto3.RowDescription:
			n = len(m.Fields)
		case *pgproto3.DataRow:
			if n != len(m.Values) && (n > 0 || strings.Contains(word, "T")) {
				typ = "X"
			}
			n = len(m.Values)
			rows++
		case *pgproto3.NoData:
			n = -1
		case *pgproto3.EmptyQueryResponse:
			if e.hint.Verb != "" {
				typ = "Y"
			}
		case *pgproto3.CopyInResponse, *pgproto3.CopyOutResponse:
			copying = true
		case *pgproto3.CommandComplete:
			if v := e.hint.Verb; copying && m.CommandTag[0] != 'C' || !copying && v != "" && !strings.HasPrefix(string(m.CommandTag), v) {
				typ = "Y"
			}
			if e.hint.Verb == "SELECT" && !copying && n >= 0 && string(m.CommandTag) != fmt.Sprint("SELECT ", rows) {
				typ = "Y"
			}
			copying = false
		case *pgproto3.ErrorResponse:
			if m == fatal {
				fatals = append(fatals, len(word))
			}
		}
		word += typ
	}
	return word, fatals
}

// plausible reports whether answers are the beginning of an answer to e, and whether they would be without an error that ends the connection.
func plausible(g *regexp.Regexp, e exchange, answers back) (exactly, roughly bool) {
	word, fatals := shape(e, answers)
	exactly = g.MatchString(word)
	for _, at := range fatals {
		roughly = roughly || g.MatchString(word[:at]+word[at+1:])
	}
	return exactly, roughly
}

// Each message of the protocol, put at each place of each answer, and in place of each message: what came through is the beginning of an answer,
// and if it is not a whole one there is an error that says which message was wrong.
func TestNothingOutOfOrderComesThrough(t *testing.T) {
	t.Parallel()
	refused, passed := 0, 0
	for _, e := range exchanges {
		g := regexp.MustCompile(grammar(e.asks))
		for at := range len(e.answers) + 1 {
			for _, m := range everything {
				for _, piece := range []int{1, 7, 1 << 20} {
					changed := []back{inserted(e.answers, at, m)}
					if at < len(e.answers) {
						changed = append(changed, inserted(append(append(back{}, e.answers[:at]...), e.answers[at+1:]...), at, m))
					}
					for _, answers := range changed {
						got, err := play(e, answers, piece)
						var disorder *answer.Error
						if err != nil && (!errors.As(err, &disorder) || disorder.Got == "" || disorder.Expected == "") {
							t.Errorf("%s: %v", e.name, err)
						}
						if !strings.HasPrefix(typesOf(answers), got) || err == nil && got != typesOf(answers) {
							t.Errorf("%s, %q: %q came through, %v", e.name, typesOf(answers), got, err)
						}
						if err != nil {
							refused++
						} else {
							passed++
						}
						if exactly, roughly := plausible(g, e, answers); (err == nil) != exactly && !roughly {
							word, _ := shape(e, answers)
							t.Errorf("%s, %q: %v", e.name, word, err)
						}
					}
				}
			}
		}
	}
	t.Logf("%d refused, %d passed", refused, passed)
	if refused < 10*passed {
		t.Error("too few are refused:", refused, passed)
	}
}
