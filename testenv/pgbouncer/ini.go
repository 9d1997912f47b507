package pgbouncer

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/bounceproof/bounceproof/testenv/postgres"
)

// endpoint is a host and a port.
type endpoint struct {
	host string
	port int
}

// ini returns PgBouncer's configuration: every database of the server under its own name, and every role of the
// server with its password. Roles that are not in the list of users are looked up in the server (auth_query), so
// tests can make their own.
func ini(listen, server endpoint, authFile string, o Options) string {
	settings := map[string]string{
		"listen_addr":     listen.host,
		"listen_port":     strconv.Itoa(listen.port),
		"unix_socket_dir": "",
		// Of a role whose SCRAM secret it has from the server it asks for SCRAM under this setting too. For the superuser, whose password it has to know
		// to log in to the server, that would cost thousands of rounds of hashing for each client, in its single thread; the password is random.
		"auth_type":         "md5",
		"auth_file":         authFile,
		"auth_user":         postgres.Superuser,
		"admin_users":       postgres.Superuser,
		"pool_mode":         cmp.Or(o.PoolMode, "transaction"),
		"default_pool_size": strconv.Itoa(cmp.Or(o.PoolSize, 4)),
		"max_client_conn":   "500",
		// Many drivers send it, and Debian's own example ignores it.
		"ignore_startup_parameters": "extra_float_digits",
		// The default of 15 seconds would make every test with a server restart wait.
		"server_login_retry": "1",
	}
	if !atLeast(o.Version, 18) {
		settings["auth_type"] = "scram-sha-256" // under md5 1.15 hashes the password that it needs to log in to the server
	}
	if o.MaxPreparedStatements != 0 && Tracks(o.Version) {
		settings["max_prepared_statements"] = strconv.Itoa(max(o.MaxPreparedStatements, 0))
	}
	maps.Copy(settings, o.Settings)
	var b strings.Builder
	fmt.Fprintf(&b, "[databases]\n* = host=%s port=%d\n\n[pgbouncer]\n", server.host, server.port)
	for _, k := range slices.Sorted(maps.Keys(settings)) {
		fmt.Fprintf(&b, "%s = %s\n", k, settings[k])
	}
	return b.String()
}
