package sqltext_test

import (
	"strings"
	"testing"

	"github.com/bounceproof/bounceproof/internal/sqltext"
)

// commands are those of PostgreSQL 13 to 18 as psql's \h lists them, and REPACK of 19.
const commands = `ABORT|ALTER AGGREGATE|ALTER COLLATION|ALTER CONVERSION|ALTER DATABASE|ALTER DEFAULT PRIVILEGES|ALTER DOMAIN|ALTER EVENT TRIGGER
ALTER EXTENSION|ALTER FOREIGN DATA WRAPPER|ALTER FOREIGN TABLE|ALTER FUNCTION|ALTER GROUP|ALTER INDEX|ALTER LANGUAGE|ALTER LARGE OBJECT
ALTER MATERIALIZED VIEW|ALTER OPERATOR|ALTER OPERATOR CLASS|ALTER OPERATOR FAMILY|ALTER POLICY|ALTER PROCEDURE|ALTER PUBLICATION|ALTER ROLE
ALTER ROUTINE|ALTER RULE|ALTER SCHEMA|ALTER SEQUENCE|ALTER SERVER|ALTER STATISTICS|ALTER SUBSCRIPTION|ALTER SYSTEM|ALTER TABLE|ALTER TABLESPACE
ALTER TEXT SEARCH CONFIGURATION|ALTER TEXT SEARCH DICTIONARY|ALTER TEXT SEARCH PARSER|ALTER TEXT SEARCH TEMPLATE|ALTER TRIGGER|ALTER TYPE
ALTER USER|ALTER USER MAPPING|ALTER VIEW|ANALYZE|BEGIN|CALL|CHECKPOINT|CLOSE|CLUSTER|COMMENT|COMMIT|COMMIT PREPARED|COPY|CREATE ACCESS METHOD
CREATE AGGREGATE|CREATE CAST|CREATE COLLATION|CREATE CONVERSION|CREATE DATABASE|CREATE DOMAIN|CREATE EVENT TRIGGER|CREATE EXTENSION
CREATE FOREIGN DATA WRAPPER|CREATE FOREIGN TABLE|CREATE FUNCTION|CREATE GROUP|CREATE INDEX|CREATE LANGUAGE|CREATE MATERIALIZED VIEW|CREATE OPERATOR
CREATE OPERATOR CLASS|CREATE OPERATOR FAMILY|CREATE POLICY|CREATE PROCEDURE|CREATE PUBLICATION|CREATE ROLE|CREATE RULE|CREATE SCHEMA
CREATE SEQUENCE|CREATE SERVER|CREATE STATISTICS|CREATE SUBSCRIPTION|CREATE TABLE|CREATE TABLE AS|CREATE TABLESPACE|CREATE TEXT SEARCH CONFIGURATION
CREATE TEXT SEARCH DICTIONARY|CREATE TEXT SEARCH PARSER|CREATE TEXT SEARCH TEMPLATE|CREATE TRANSFORM|CREATE TRIGGER|CREATE TYPE|CREATE USER
CREATE USER MAPPING|CREATE VIEW|DEALLOCATE|DECLARE|DELETE|DISCARD|DO|DROP ACCESS METHOD|DROP AGGREGATE|DROP CAST|DROP COLLATION|DROP CONVERSION
DROP DATABASE|DROP DOMAIN|DROP EVENT TRIGGER|DROP EXTENSION|DROP FOREIGN DATA WRAPPER|DROP FOREIGN TABLE|DROP FUNCTION|DROP GROUP|DROP INDEX
DROP LANGUAGE|DROP MATERIALIZED VIEW|DROP OPERATOR|DROP OPERATOR CLASS|DROP OPERATOR FAMILY|DROP OWNED|DROP POLICY|DROP PROCEDURE|DROP PUBLICATION
DROP ROLE|DROP ROUTINE|DROP RULE|DROP SCHEMA|DROP SEQUENCE|DROP SERVER|DROP STATISTICS|DROP SUBSCRIPTION|DROP TABLE|DROP TABLESPACE
DROP TEXT SEARCH CONFIGURATION|DROP TEXT SEARCH DICTIONARY|DROP TEXT SEARCH PARSER|DROP TEXT SEARCH TEMPLATE|DROP TRANSFORM|DROP TRIGGER|DROP TYPE
DROP USER|DROP USER MAPPING|DROP VIEW|END|EXECUTE|EXPLAIN|FETCH|GRANT|IMPORT FOREIGN SCHEMA|INSERT|LISTEN|LOAD|LOCK|MERGE|MOVE|NOTIFY|PREPARE
PREPARE TRANSACTION|REASSIGN OWNED|REFRESH MATERIALIZED VIEW|REINDEX|RELEASE SAVEPOINT|REPACK|RESET|REVOKE|ROLLBACK|ROLLBACK PREPARED
ROLLBACK TO SAVEPOINT|SAVEPOINT|SECURITY LABEL|SELECT|SELECT INTO|SET|SET CONSTRAINTS|SET ROLE|SET SESSION AUTHORIZATION|SET TRANSACTION|SHOW
START TRANSACTION|TABLE|TRUNCATE|UNLISTEN|UPDATE|VACUUM|VALUES|WITH`

const (
	control    = sqltext.Control
	cuts       = sqltext.Cuts
	needsBlock = sqltext.NeedsBlock
)

// flags has the commands, or first words of them, with another flag than Utility.
var flags = map[string]sqltext.Kind{
	"ABORT": control | cuts | needsBlock, "BEGIN": control | needsBlock, "COMMIT": control | cuts | needsBlock,
	"COMMIT PREPARED": control | cuts | needsBlock, "END": control | cuts | needsBlock, "START TRANSACTION": control | needsBlock,
	"RESET": control | needsBlock, "ROLLBACK": control | cuts | needsBlock, "ROLLBACK PREPARED": control | cuts | needsBlock,
	"ROLLBACK TO SAVEPOINT": control | cuts | needsBlock, "SAVEPOINT": control | cuts | needsBlock, "RELEASE SAVEPOINT": control | cuts | needsBlock,
	"PREPARE": control, "PREPARE TRANSACTION": control | cuts | needsBlock, "SET": control | needsBlock,
	"DECLARE": needsBlock, "LOCK": needsBlock,
	"CALL": sqltext.MayCommit, "DO": sqltext.MayCommit, "VACUUM": sqltext.MayCommit, "ANALYZE": sqltext.MayCommit, "CLUSTER": sqltext.MayCommit,
	"REINDEX": sqltext.MayCommit, "REPACK": sqltext.MayCommit, "CREATE": sqltext.MayCommit, "DROP": sqltext.MayCommit, "ALTER": sqltext.MayCommit,
	"COPY": sqltext.Copy, "DEALLOCATE": sqltext.ForgetsStatements, "DISCARD": sqltext.MayCommit,
}

var planned = map[string]bool{
	"SELECT": true, "SELECT INTO": true, "INSERT": true, "UPDATE": true, "DELETE": true, "MERGE": true, "WITH": true, "VALUES": true, "TABLE": true,
}

func TestOfEveryCommand(t *testing.T) {
	t.Parallel()
	n := 0
	for command := range strings.FieldsFuncSeq(commands, func(r rune) bool { return r == '|' || r == '\n' }) {
		n++
		first, _, _ := strings.Cut(command, " ")
		want, ok := flags[command]
		if !ok {
			want = flags[first]
		}
		if !planned[command] {
			want |= sqltext.Utility
		}
		for _, text := range []string{command, strings.ToLower(command) + " x", " /* a /* b */ */ -- c\n\t(;" + command + "\n", command + ";"} {
			if got := sqltext.Of(text); got != want {
				t.Errorf("Of(%q) = %b, want %b", text, got, want)
			}
			if got := sqltext.OfScript(text); got != want {
				t.Errorf("OfScript(%q) = %b, want %b", text, got, want)
			}
		}
	}
	if n != 186 {
		t.Errorf("%d commands", n)
	}
}

func TestOfSecondWord(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]sqltext.Kind{
		"discard all":                      sqltext.ForgetsStatements | sqltext.MayCommit | sqltext.Utility,
		"Discard /* x */ ALL":              sqltext.ForgetsStatements | sqltext.MayCommit | sqltext.Utility,
		"discard plans":                    sqltext.MayCommit | sqltext.Utility,
		"discard":                          sqltext.MayCommit | sqltext.Utility,
		"deallocate prepare all":           sqltext.ForgetsStatements | sqltext.Utility,
		"prepare transaction 'x'":          control | cuts | needsBlock | sqltext.Utility,
		"prepare transactions as select 1": control | sqltext.Utility,
		"":                                 0,
		"  -- nothing":                     0,
		"/* never closed select":           0,
		"1":                                0,
		"set_config":                       sqltext.MayCommit | sqltext.Utility,
		"a_word_that_is_longer_than_any_of_the_tables": sqltext.MayCommit | sqltext.Utility,
	} {
		if got := sqltext.Of(text); got != want {
			t.Errorf("Of(%q) = %b, want %b", text, got, want)
		}
	}
}

func TestOfScript(t *testing.T) {
	t.Parallel()
	for text, cut := range map[string]bool{
		"select 1; commit":                                     true,
		"select 1; /* ; */ -- ;\n ROLLBACK":                    true,
		"select ';' ; end":                                     true,
		"select case when true then 1 end":                     false,
		"select 1; select case when true then 1 end; select":   false,
		"select '; commit'":                                    false,
		`select "; commit", "a""; commit"`:                     false,
		"select ''''; commit":                                  true,
		"select '''; commit'":                                  false,
		"select $$; commit$$":                                  false,
		"select $a$; commit $$ ; end $a$; select 1":            false,
		"select $a$; commit $$ ; end $a$; abort":               true,
		"select a$$, b$$; commit":                              true, // identifiers
		"select $1, $2; commit":                                true, // parameters
		`select E'\'; commit'`:                                 false,
		`select e'\\'; commit`:                                 true,
		`select '\'; commit`:                                   true, // with standard_conforming_strings
		`select '\'; commit'`:                                  true, // without: one too many is safe
		"do $$ begin commit; end $$":                           false,
		`select '\'; commit; --'`:                              true,
		`insert into t values ('a;b\c'); commit`:               true,
		`insert into t values ('a;\'); commit`:                 true, // with standard_conforming_strings
		`insert into t values ('a;\''); commit; --')`:          true, // without
		`insert into t values ('it''s; \'); commit`:            true,
		`select 'a\b' /* x; y */; /* ; z */ commit`:            true,
		`select U&'a;\0041'; commit`:                           true,
		"select e'a'\n'b\\'; x'; commit":                       true, // a string that goes on in the next line keeps its kind
		"select a$$b$; commit":                                 true, // an identifier
		"-- ; commit":                                          false,
		"/* ; commit */ select 1":                              false,
		"select 1;; ;savepoint a":                              true,
		"select 'never closed; commit":                         false, // refused by the server
		"create function f() begin atomic select 1; end":       true,  // one too many is safe
		"select 1; prepare transaction 'a'":                    true,
		"select 1; prepare a as select 1":                      false,
		"select 1; discard all; select 'a'; release savepoint": true,
	} {
		if got := sqltext.OfScript(text)&cuts != 0; got != cut {
			t.Errorf("OfScript(%q) cuts: %t", text, got)
		}
	}
	if sqltext.OfScript("select 1; DEALLOCATE ALL; select 2")&sqltext.ForgetsStatements == 0 {
		t.Error("a DEALLOCATE in the middle is not seen")
	}
}

func TestKeyword(t *testing.T) {
	t.Parallel()
	for sql, want := range map[string]string{
		"select 1":                             "select",
		"  SELECT 1":                           "select",
		"(select 1) union (select 2)":          "select",
		"-- a comment\n\tFetch 10 from c":      "fetch",
		"/* one /* nested */ */ update t set":  "update",
		"/* never closed select":               "",
		"-- only a comment":                    "",
		"":                                     "",
		";; commit":                            "commit",
		"set_config":                           "set_config",
		"with x as (select 1) select * from x": "with",
		"1":                                    "",
	} {
		if got := sqltext.Keyword(sql); got != want {
			t.Errorf("Keyword(%q) = %q, want %q", sql, got, want)
		}
	}
}

func TestOfDoesNotAllocate(t *testing.T) {
	for _, text := range []string{"SELECT 1", "prepare transaction 'a'", "DISCARD all", "-- x\nInsert into t values (1)", strings.Repeat("x", 100)} {
		if n := testing.AllocsPerRun(100, func() { sqltext.Of(text) }); n != 0 {
			t.Errorf("Of(%q): %v allocations", text, n)
		}
		if n := testing.AllocsPerRun(100, func() { sqltext.OfScript(text) }); n != 0 {
			t.Errorf("OfScript(%q): %v allocations", text, n)
		}
	}
}

// What holds for every text there may be.
func FuzzOf(f *testing.F) {
	for _, text := range []string{"select 1; commit", "select $a$;$a$; end", `select '\'; commit`, "/*/**/", "discard all", "$", "'", "E'\\"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		one, script := sqltext.Of(text), sqltext.OfScript(text)
		if one&^script != 0 {
			t.Errorf("a script is not all that its first statement is: %b, %b", one, script)
		}
		if strings.Count(text, ";") == 0 && one != script {
			t.Errorf("one statement, and %b or %b", one, script)
		}
		if k := sqltext.Keyword(text); k != strings.ToLower(k) || !strings.Contains(strings.ToLower(text), k) {
			t.Errorf("keyword %q", k)
		}
		// What follows a complete statement is found, whatever the statement is, if it is whole.
		if got := sqltext.OfScript("select 1;" + text); one&^got != 0 {
			t.Errorf("behind another statement it is %b, alone %b", got, one)
		}
	})
}

func BenchmarkOf(b *testing.B) {
	b.ReportAllocs()
	for b.Loop() {
		sqltext.Of("insert into orders (id, paid) values ($1, $2)")
	}
}
