package postgres_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/bounceproof/bounceproof/testenv/postgres"
)

func TestConfiguration(t *testing.T) {
	t.Parallel()
	got := postgres.Configuration("a-name", "127.0.0.1", 20001, true, postgres.Options{
		Settings: map[string]string{"work_mem": "7MB", "max_connections": "7", "application_name": "it's"},
	})
	want := `application_name = 'it''s'
cluster_name = 'a-name'
fsync = 'off'
full_page_writes = 'off'
lc_messages = 'C'
listen_addresses = '127.0.0.1'
log_line_prefix = '%m [%p] %q%u@%d/%a '
log_timezone = 'UTC'
max_connections = '7'
max_prepared_transactions = '50'
password_encryption = 'scram-sha-256'
port = '20001'
shared_preload_libraries = 'pg_stat_statements'
synchronous_commit = 'off'
timezone = 'UTC'
unix_socket_directories = ''
work_mem = '7MB'
`
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	durable := postgres.Configuration("n", "*", 1, false, postgres.Options{Durable: true})
	for _, line := range []string{"fsync = 'on'", "full_page_writes = 'on'", "synchronous_commit = 'on'"} {
		if !strings.Contains(durable, line+"\n") {
			t.Errorf("durable without %s", line)
		}
	}
	if strings.Contains(durable, "pg_stat_statements") {
		t.Error("preloads a library that is not installed")
	}
}

func TestDatabaseNamesAreShortLegalAndUnique(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		test string
		n    int64
		want string
	}{
		{"TestX", 1, "testx_1"},
		{"TestX/a \"b\" ü", 12, "testx_a__b____12"},
		{strings.Repeat("T", 100), 123, strings.Repeat("t", 59) + "_123"},
	} {
		if got := postgres.DatabaseName(tc.test, tc.n); got != tc.want {
			t.Errorf("%q, %d: got %q, want %q", tc.test, tc.n, got, tc.want)
		}
	}
}
