package postgres

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// hostBased asks everybody for a password, replication included.
const hostBased = "host all all all scram-sha-256\nhost replication all all scram-sha-256\n"

// configuration returns the server's postgresql.conf. It is a file and not the command line, so that ALTER SYSTEM
// works as everywhere.
func configuration(name, host string, port int, statStatements bool, o Options) string {
	durable := "off"
	if o.Durable {
		durable = "on"
	}
	settings := map[string]string{
		"cluster_name":              name,
		"listen_addresses":          host,
		"port":                      fmt.Sprint(port),
		"unix_socket_directories":   "",
		"password_encryption":       "scram-sha-256", // 13 has md5
		"max_connections":           "300",
		"max_prepared_transactions": "50",
		"fsync":                     durable,
		"synchronous_commit":        durable,
		"full_page_writes":          durable,
		"lc_messages":               "C", // tests read messages
		"timezone":                  "UTC",
		"log_timezone":              "UTC",
		"log_line_prefix":           "%m [%p] %q%u@%d/%a ",
	}
	if statStatements {
		settings["shared_preload_libraries"] = "pg_stat_statements"
	}
	maps.Copy(settings, o.Settings)
	var b strings.Builder
	for _, k := range slices.Sorted(maps.Keys(settings)) {
		fmt.Fprintf(&b, "%s = '%s'\n", k, strings.ReplaceAll(settings[k], "'", "''"))
	}
	return b.String()
}
