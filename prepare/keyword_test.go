package prepare_test

import (
	"testing"

	"github.com/bounceproof/bounceproof/prepare"
)

func TestKeywordIsTheFirstWordOfTheStatement(t *testing.T) {
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
		if got := prepare.Keyword(sql); got != want {
			t.Errorf("Keyword(%q) = %q, want %q", sql, got, want)
		}
	}
}
