package bench

import (
	"crypto/rand"
	"fmt"
	"log/slog"
)

// quiet drops the warnings that a benchmark behind an old pooler is bound to cause.
var quiet = slog.New(slog.DiscardHandler)

func clientsName(n int) string { return fmt.Sprintf("clients=%d", n) }

func newUUID() (u [16]byte) {
	_, _ = rand.Read(u[:])
	u[6], u[8] = u[6]&0x0f|0x40, u[8]&0x3f|0x80
	return u
}
