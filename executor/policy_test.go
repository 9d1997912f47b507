package executor_test

import (
	"flag"
	"strings"
	"testing"

	"github.com/bounceproof/bounceproof/executor"
)

func TestPolicyAsAFlag(t *testing.T) {
	t.Parallel()
	for _, want := range []executor.PreparedStatements{executor.Auto, executor.On, executor.Off, executor.Shared} {
		var got executor.PreparedStatements
		set := flag.NewFlagSet("", flag.ContinueOnError)
		set.TextVar(&got, "prepared", executor.Auto, "")
		if err := set.Parse([]string{"-prepared", want.String()}); err != nil || got != want {
			t.Errorf("%v came back as %v, %v", want, got, err)
		}
	}
	var p executor.PreparedStatements
	if err := p.UnmarshalText([]byte("maybe")); err == nil || !strings.Contains(err.Error(), "auto, on, off, shared") {
		t.Errorf("got %v", err)
	}
	if _, err := executor.PreparedStatements(9).MarshalText(); err == nil {
		t.Error("a policy that does not exist has a text")
	}
}
