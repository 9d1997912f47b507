package prepare_test

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/bounceproof/bounceproof/prepare"
)

// goldenNames are what every process, version and machine has to agree on: a server connection lent to many clients is only shared if
// they do.
var goldenNames = []struct {
	sql  string
	oids []uint32
	salt string
	want string
}{
	{"select 1", nil, "", "bp_1de26dba5793d01a13c3787e9b247bc2"},
	{"select 1", nil, "salt", "bp_6bf11e6465e454ea51b4af10d5316245"},
	{"select $1", []uint32{23}, "", "bp_55ba2f4ba277ffc3a5b6bba302d47973"},
	{"select $1", []uint32{25}, "", "bp_77916d917c80fef7a3f8b7b5bcb9c416"},
	{"select $1, $2", []uint32{23, 4294967295}, "", "bp_3895be31a8cd09516484c1b4bb6b2cb0"},
	{"sélect 'ä\x00'", nil, "", "bp_295b2e1685e4d1fc4ad10797165a43a1"},
}

func TestNameGolden(t *testing.T) {
	t.Parallel()
	for _, g := range goldenNames {
		if got := prepare.Name(g.sql, g.oids, g.salt); got != g.want {
			t.Errorf("Name(%q, %v, %q) = %s, want %s", g.sql, g.oids, g.salt, got, g.want)
		}
	}
}

// The same names in another process: nothing of a process, a map's order or a seed goes into them.
func TestNameIsTheSameInAnotherProcess(t *testing.T) {
	const childVariable = "PREPARE_NAME_CHILD"
	if os.Getenv(childVariable) != "" {
		for _, g := range goldenNames {
			fmt.Println("name:", prepare.Name(g.sql, g.oids, g.salt))
		}
		return
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestNameIsTheSameInAnotherProcess$", "-test.v") //nolint:gosec // this very test
	cmd.Env = append(os.Environ(), childVariable+"=1")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	var names []string
	for line := range strings.Lines(string(out)) {
		if name, ok := strings.CutPrefix(strings.TrimSpace(line), "name: "); ok {
			names = append(names, name)
		}
	}
	if len(names) != len(goldenNames) {
		t.Fatalf("%d names:\n%s", len(names), out)
	}
	for i, g := range goldenNames {
		if names[i] != g.want {
			t.Errorf("%q: %s there, %s here", g.sql, names[i], g.want)
		}
	}
}

type nameInput struct {
	sql  string
	oids []uint32
	salt string
}

func (in nameInput) name() string { return prepare.Name(in.sql, in.oids, in.salt) }

func drawInput(t *rapid.T, label string) nameInput {
	return nameInput{
		sql:  rapid.StringOfN(rapid.RuneFrom([]rune("ab\x00 $1")), 0, 4, -1).Draw(t, label+" sql"),
		oids: rapid.SliceOfN(rapid.Uint32Range(0, 3), 0, 3).Draw(t, label+" oids"),
		salt: rapid.StringOfN(rapid.RuneFrom([]rune("ab\x00 $1")), 0, 3, -1).Draw(t, label+" salt"),
	}
}

func (in nameInput) equal(other nameInput) bool {
	return in.sql == other.sql && in.salt == other.salt && fmt.Sprint(in.oids) == fmt.Sprint(other.oids)
}

// Two names are equal exactly when everything that goes in is: the parts cannot run into each other.
func TestNameTellsInputsApart(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		a, b := drawInput(t, "a"), drawInput(t, "b")
		if (a.name() == b.name()) != a.equal(b) {
			t.Fatalf("%#v and %#v: %s, %s", a, b, a.name(), b.name())
		}
	})
}

func FuzzName(f *testing.F) {
	for _, g := range goldenNames {
		f.Add(g.sql, g.salt, uint32(len(g.oids)), uint32(23))
	}
	f.Add("select\n1 -- bp_", "bp_", uint32(0), uint32(0))
	f.Add(strings.Repeat("x", 10000), "", uint32(200), uint32(4294967295))
	f.Fuzz(func(t *testing.T, sql, salt string, n, oid uint32) {
		oids := make([]uint32, n%1000)
		for i := range oids {
			oids[i] = oid + uint32(i) //nolint:gosec // small
		}
		name := prepare.Name(sql, oids, salt)
		if len(name) > 63 {
			t.Errorf("%q has %d bytes, PostgreSQL keeps 63", name, len(name))
		}
		if bits := 4 * (len(name) - len(prepare.NamePrefix)); bits < 128 {
			t.Errorf("%q keeps %d bits of the hash", name, bits)
		}
		rest, ok := strings.CutPrefix(name, prepare.NamePrefix)
		if !ok || strings.Trim(rest, "0123456789abcdef") != "" {
			t.Errorf("%q is no prefix and hex digits", name)
		}
		if again := prepare.Name(sql, oids, salt); again != name {
			t.Errorf("%s, and then %s", name, again)
		}
		for what, other := range map[string]string{
			"text":  prepare.Name(sql+" ", oids, salt),
			"salt":  prepare.Name(sql, oids, salt+"x"),
			"types": prepare.Name(sql, append(oids, 1), salt),
		} {
			if other == name {
				t.Errorf("another %s has the same name %s", what, name)
			}
		}
	})
}
