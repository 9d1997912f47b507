package executor_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/internal/pgscript"
	"github.com/bounceproof/bounceproof/prepare"
)

// A server's error may quote what a statement was given, in any of its texts. What a Trace is given of it does not.
func TestAChangeHoldsNothingOfTheServersMessage(t *testing.T) {
	t.Parallel()
	const sql = "insert into t values ($1::text)"
	name := prepare.Name(sql, []uint32{25}, "")
	seen := 0
	for _, sc := range scenes {
		if sc.o.Kind == pgscript.Raw && sc.policy == executor.Auto {
			continue // it uses no name
		}
		var changes []executor.Change
		o := sc.o
		o.Servers = 1 // nothing is lost but what is failed here
		s, end := newScripted(t, o, executor.Config{
			PreparedStatements: sc.policy, Trace: &executor.Trace{Changed: func(c executor.Change) { changes = append(changes, c) }},
		}, maxConns(1))
		for range 2 {
			if _, err := s.ex.Exec(t.Context(), sql, prepare.Stable, secretArg); err != nil {
				t.Fatal(sc.name, err)
			}
		}
		changes = nil
		lost := pgscript.ServerError("26000", `prepared statement "`+name+`" does not exist`, "FetchPreparedStatement")
		if sc.o.Kind == pgscript.Tracked {
			lost = pgscript.PoolerError("prepared statement did not exist")
		}
		lost.Detail, lost.Hint, lost.ColumnName, lost.TableName = secretArg, secretArg, secretSQL, secretSQL
		if !strings.Contains(fmt.Sprintf("%+v", *lost), "secret") {
			t.Error("control: the server's error holds no secret")
		}
		// Shared gives up when names are missing in a second thousand of executions as well.
		wantState := lost.Code
		if sc.policy == executor.Shared {
			wantState = ""
		}
		for range 3000 {
			s.b.Define(sql, pgscript.Statement{Params: []uint32{25}, Tag: "INSERT 0 1", Fail: pgscript.FailTimes(pgscript.Bind, 1, lost)})
			_, _ = s.ex.Exec(t.Context(), sql, prepare.Stable, secretArg)
			if len(changes) > 0 {
				break
			}
		}
		if len(changes) == 0 {
			t.Errorf("%s: no change", sc.name)
		}
		for _, c := range changes {
			seen++
			if c.SQLState != wantState || c.From == c.To {
				t.Errorf("%s: another change: %+v", sc.name, c)
			}
			if text := fmt.Sprintf("%+v", c); strings.Contains(text, "secret") || strings.Contains(text, lost.Message) {
				t.Errorf("%s: %s", sc.name, text)
			}
		}
		end()
	}
	t.Log(seen, "changes")
}

// A change names a statement only if that was lost, and not one that was under way when a pooler showed itself.
func TestAChangeNamesWhatWasLost(t *testing.T) {
	t.Parallel()
	const sql = "insert into t values ($1::text)"
	name := prepare.Name(sql, []uint32{25}, "")
	for message, want := range map[string]string{
		"prepared statement did not exist":                         name,
		"query_wait_timeout":                                       "",
		"transaction blocks not allowed in statement pooling mode": "",
	} {
		var changes []executor.Change
		s, end := newScripted(t, pgscript.Options{}, executor.Config{
			Trace: &executor.Trace{Changed: func(c executor.Change) { changes = append(changes, c) }},
		}, maxConns(1))
		s.b.Define(sql, pgscript.Statement{Params: []uint32{25}, Tag: "INSERT 0 1"})
		for range 2 {
			if _, err := s.ex.Exec(t.Context(), sql, prepare.Stable, "a"); err != nil {
				t.Fatal(message, err)
			}
		}
		changes = nil
		s.b.Define(sql, pgscript.Statement{
			Params: []uint32{25}, Tag: "INSERT 0 1", Fail: pgscript.FailTimes(pgscript.Bind, 1, pgscript.PoolerError(message)),
		})
		_, _ = s.ex.Exec(t.Context(), sql, prepare.Stable, "a")
		if len(changes) == 0 || changes[0].Statement != want || changes[0].Reason == fallback.ReasonNone {
			t.Errorf("%s: %+v", message, changes)
		}
		end()
	}
}
