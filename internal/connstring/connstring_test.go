package connstring_test

import (
	"errors"
	"net/url"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"pgregory.net/rapid"

	"github.com/bounceproof/bounceproof/internal/connstring"
)

// secret is in every password below. It is no part of any word that an error may have.
const secret = "sesame"

// forms are how people write a connection string, right and wrong; %s is the password as it is.
var forms = []string{
	"postgres://app:%s@host/db", "postgresql://app:%s@host:5432/db?sslmode=disable", "postgres://app:%s@host:99999/db", "postgres://app:%s@ho st/db",
	"postgres://app:%s@host/db?sslmode=nope", "postgres://h1:1,h2:2,h3/db?port=1,2&password=%s", "postgres://host/db?password=%s",
	"postgres://host/db?pass%%77ord=%s&connect_timeout=x", "host=h password=%s dbname=x", "host=h password = %s sslmode=nope", "host=h password='%s' port=x",
	"host=h password='%s", "app:%s@host/db", "app:%s host/db", "mysql://app:%s@h/db", "jdbc:postgresql://h/db?user=a&password=%s", "%s", "postgres://%s",
	"postgres://app:%s@host:port/db", "postgres://app:%s@/db?sslcert=/x", "host=h port=0 password=%s", "postgres://app:%s@host/db?sslpassword=%s&sslkey=/nowhere&sslcert=/x",
}

// check reads a string and fails if an error has the secret, or the host, which errors of connecting name, when the string has another one.
func check(t rapid.TB, s string, hosts bool) (refused bool) {
	cfg, err := connstring.Parse(s)
	if err != nil {
		if strings.Contains(err.Error(), secret) {
			t.Errorf("%q: the error repeats the password: %v", s, err)
		}
		if parse := (*pgconn.ParseConfigError)(nil); errors.As(err, &parse) {
			t.Errorf("%q: the error carries the whole string", s)
		}
		return true
	}
	if hosts && strings.Contains(cfg.ConnConfig.Host, secret) {
		t.Errorf("%q: the host is %q", s, cfg.ConnConfig.Host)
	}
	return false
}

// Passwords of special characters, in every form: no error has a piece of one.
func TestNoErrorRepeatsAPassword(t *testing.T) {
	t.Parallel()
	refused, read := 0, 0
	rapid.Check(t, func(t *rapid.T) {
		special := rapid.StringOfN(rapid.RuneFrom([]rune("@/?#:%&= '\\;,[]ä\x00\n1")), 0, 4, -1)
		password := special.Draw(t, "before") + secret + special.Draw(t, "behind")
		form := rapid.SampledFrom(forms).Draw(t, "form")
		if check(t, strings.ReplaceAll(strings.ReplaceAll(form, "%s", password), "%%", "%"), strings.Contains(form, "app:")) {
			refused++
		} else {
			read++
		}
	})
	if refused == 0 || read == 0 { // the control
		t.Errorf("%d strings were refused and %d read", refused, read)
	}
}

// The control: pgx's own error has it.
func TestPgxRepeatsAPassword(t *testing.T) {
	t.Parallel()
	_, err := pgconn.ParseConfig("host=h password = " + secret + " sslmode=nope")
	if err == nil || !strings.Contains(err.Error(), secret) {
		t.Errorf("%v: is this package still needed?", err)
	}
}

// What is right is read, and the password arrives whole.
func TestARightStringIsRead(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		password := rapid.StringMatching(`[ -~ä]{1,12}`).Draw(t, "password")
		quoted := strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(password)
		escaped := strings.ReplaceAll(url.QueryEscape(password), "+", "%20")
		for _, s := range []string{
			"postgres://app:" + escaped + "@host:6432/shop?pool_max_conns=3", "host=host port=6432 dbname=shop user=app password='" + quoted + "'",
		} {
			cfg, err := connstring.Parse(s)
			if err != nil {
				t.Fatalf("%s: %v", s, err)
			}
			c := cfg.ConnConfig
			if c.Password != password || c.Host != "host" || c.Port != 6432 || c.Database != "shop" || c.User != "app" || len(c.RuntimeParams) > 0 {
				t.Errorf("%s: %+v", s, c.Config)
			}
		}
	})
}

func FuzzParse(f *testing.F) {
	for _, form := range forms {
		for _, password := range []string{secret, "s@" + secret, secret + "/1", "1/x?" + secret, secret + "%zz", "my " + secret, "'" + secret} {
			f.Add(strings.ReplaceAll(form, "%s", password))
		}
	}
	f.Fuzz(func(t *testing.T, s string) {
		// Files are named, and the fuzzer may put anything where a file's name belongs.
		if strings.Contains(s, "sslrootcert") || strings.Contains(s, "sslcert") || strings.Contains(s, "sslkey") || strings.Contains(s, "passfile") {
			t.Skip()
		}
		check(t, s, false)
	})
}
