package pgbouncer

// Ini is internal to the package.
func Ini(listenHost string, listenPort int, serverHost string, serverPort int, authFile string, o Options) string {
	return ini(endpoint{listenHost, listenPort}, endpoint{serverHost, serverPort}, authFile, o)
}
