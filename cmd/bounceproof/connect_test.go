package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// secret is in every password below, cut where the character behind it cuts.
const secret = "sesame"

// No piece of a connection string that cannot be read is printed, by no command, and what is wrong is named.
func TestAConnectionStringIsRefusedForWhatItIs(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "root.crt")
	noCert := filepath.Join(t.TempDir(), "no.crt")
	if err := os.WriteFile(noCert, []byte("nothing"), 0o600); err != nil {
		t.Fatal(err)
	}
	for s, want := range map[string]string{
		"postgres://app:1@sesame@host/db":                            "%40",
		"postgres://app:sesame@x@sesame@host/db":                     "%40",
		"postgres://app:1/sesame@host/db":                            "%2F",
		"postgres://app:sesame/1@host/db":                            "%2F",
		"postgres://app:1234/x?sesame@host/db":                       "%3F",
		"postgres://h/db?sesame@x":                                   "%40",
		"postgres://app:sesame%zz@host/db":                           "%XX",
		"postgres://sesame:x y/@host:1/db":                           "%2F",
		"postgresql://h:sesame/db":                                   "port",
		"postgres://h:77777/sesame":                                  "port",
		"postgres://a:b@ses ame/db":                                  "%XX",
		"postgres://a:b@ses!ame/db":                                  "%XX",
		"postgres://a:b@h:1/db?ses!ame=1":                            "cannot be parsed",
		"host=h password=x sesame":                                   "cannot be parsed",
		"host=h password=my sesame dbname=x":                         "password='...'",
		"host=h password='sesame":                                    "not closed",
		"host=ses@me password=x":                                     "%XX",
		"app:sesame@host/db":                                         "cannot be parsed",
		"sesame":                                                     "cannot be parsed",
		"jdbc:postgresql://h/db?user=a&password=sesame":              "jdbc:",
		"mysql://app:sesame@h/db":                                    "mysql://",
		"postgresql+asyncpg://app:sesame@h/db":                       "driver",
		"POSTGRES://app:sesame@h/db":                                 "capitals",
		"sesame://app:sesame@h/db":                                   "cannot be parsed",
		"":                                                           "empty",
		"  ":                                                         "empty",
		"postgres://h/db?sslmode=sesame":                             "sslmode is",
		"postgres://h/db?sslmode=verify-full&sslrootcert=" + missing: missing,
		"postgres://h/db?sslmode=verify-full&sslrootcert=" + noCert:  "no certificate",
		"postgres://h/db?sslcert=/x":                                 "go together",
		"postgres://h/db?sslcert=" + missing + "&sslkey=" + missing + "&sslpassword=sesame": missing,
		"postgres://h/db?connect_timeout=sesame":                                            "seconds",
		"postgres://h/db?target_session_attrs=sesame":                                       "target_session_attrs is",
		"postgres://h:1,h:2,h/db?port=1,sesame":                                             "port",
		"postgres://h/db?pool_max_conns=sesame":                                             "whole numbers",
		"postgres://h/db?pool_max_conns=0":                                                  "1 or more",
		"postgres://h/db?pool_max_conn_lifetime=sesame":                                     "durations",
		"postgres://h/db?service=sesame":                                                    "service file",
		"postgres://h/db?channel_binding=sesame":                                            "channel_binding is",
		"postgres://h/db?require_auth=sesame":                                               "require_auth",
		"postgres://h/db?min_protocol_version=sesame":                                       "min_protocol_version",
	} {
		for _, args := range [][]string{{"doctor", s}, {"doctor", "--json", s}, {"outbox", "status", "--url", s}, {"outbox", "tail", "--url", s}} {
			code, stdout, stderr := command(t.Context(), args...)
			if code != exitFailed || stdout != "" || !strings.Contains(stderr, want) {
				t.Errorf("%q: status %d, %s%s", args, code, stdout, stderr)
			}
			for _, piece := range []string{secret, "ses@", "ses ", "ses!", "1234"} {
				if strings.Contains(stdout+stderr, piece) {
					t.Errorf("%q repeats %q: %s%s", args, piece, stdout, stderr)
				}
			}
		}
	}
	// The control: what can be read is.
	for _, s := range []string{
		"postgres://app:p%40ss%2Fw%3A@h:1/db", "postgres://app:a:b?c#d@h/db", "host=h password='my pass' user=a@b", "postgres:///db?host=/tmp",
		"postgres://h/db?user=me@corp", "postgres://[::1]:5432/db", "postgres://müller.example/db", "postgres://h1:1,h2:2/db?options=-c%20geqo%3Doff",
	} {
		if _, err := poolConfig(true, s); err != nil {
			t.Errorf("%s: %v", s, err)
		}
	}
}

// Nobody means this machine's socket by forgetting to set a variable.
func TestNothingIsNotTheLocalSocket(t *testing.T) {
	for _, name := range []string{envURL, "PGHOST", "PGPORT", "PGDATABASE", "PGUSER", "PGSERVICE"} {
		t.Setenv(name, "")
	}
	for _, args := range [][]string{{"doctor"}, {"outbox", "status"}} {
		if code, _, stderr := command(t.Context(), args...); code != exitFailed || !strings.Contains(stderr, envURL+" is set to nothing") {
			t.Errorf("%v: status %d, %s", args, code, stderr)
		}
	}
	if err := os.Unsetenv(envURL); err != nil { // t.Setenv restores it
		t.Fatal(err)
	}
	for _, args := range [][]string{{"doctor"}, {"outbox", "status"}} {
		if code, _, stderr := command(t.Context(), args...); code != exitFailed || !strings.Contains(stderr, "there is no connection string") {
			t.Errorf("%v: status %d, %s", args, code, stderr)
		}
	}
	t.Setenv("PGHOST", "127.0.0.1")
	t.Setenv("PGPORT", "1")
	if code, stdout, _ := command(t.Context(), "doctor"); code != exitFailed || !strings.Contains(stdout, "127.0.0.1:1,") {
		t.Errorf("PGHOST: status %d\n%s", code, stdout)
	}
	t.Setenv("PGPORT", secret)
	if code, stdout, stderr := command(t.Context(), "doctor"); code != exitFailed || strings.Contains(stdout+stderr, secret) {
		t.Errorf("PGPORT: status %d\n%s%s", code, stdout, stderr)
	}
}
