package sandbox

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
)

// Ports are drawn from below the range from which systems give outgoing connections theirs (32768 on Linux, 49152
// elsewhere): a server that is restarted finds its port free again.
const (
	portFirst = 20000
	portLast  = 31999
)

// freePort returns a port of the loopback address on which nothing listens. Another process may take it before the
// caller does: callers try again with a new sandbox.
func freePort() (int, error) {
	var last error
	for range 100 {
		port := portFirst + rand.IntN(portLast-portFirst+1)
		l, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", net.JoinHostPort(loopback, strconv.Itoa(port)))
		if err != nil {
			last = err
			continue
		}
		if err := l.Close(); err != nil {
			return 0, err
		}
		return port, nil
	}
	return 0, fmt.Errorf("testenv: no free port between %d and %d: %w", portFirst, portLast, last)
}
