package pgbouncer_test

import (
	"flag"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
)

var update = flag.Bool("update", false, "write the golden files anew")

func TestIni(t *testing.T) {
	t.Parallel()
	for name, o := range map[string]pgbouncer.Options{
		"defaults":       {Version: "1.26"},
		"old-prepared":   {Version: "1.15", MaxPreparedStatements: 100}, // the setting does not exist yet
		"new-prepared":   {Version: "1.24", MaxPreparedStatements: 100},
		"prepared-off":   {Version: "1.24", MaxPreparedStatements: -1},
		"session-and-so": {Version: "1.18", PoolMode: "session", PoolSize: 2, Settings: map[string]string{"server_round_robin": "1", "auth_type": "any"}},
	} {
		got := pgbouncer.Ini("127.0.0.1", 20001, "127.0.0.1", 20002, "/box/userlist.txt", o)
		golden := filepath.Join("testdata", name+".ini")
		if *update {
			if err := os.WriteFile(golden, []byte(got), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(golden)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(string(want), got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}
