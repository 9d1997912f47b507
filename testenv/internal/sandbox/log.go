package sandbox

import (
	"bytes"
	"strings"
	"sync"
	"time"
)

// logLimit bounds what is kept of a server's output: enough for any failure's last words.
const logLimit = 4 << 20

// Log keeps the output of a server. It is safe for concurrent use; the zero value is ready.
type Log struct {
	mu      sync.Mutex // guards what follows
	buf     bytes.Buffer
	dropped int
}

// Write appends p. It never fails.
func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.buf.Write(p)
	if over := l.buf.Len() - logLimit; over > 0 {
		l.buf.Next(over)
		l.dropped += over
	}
	return len(p), nil
}

// String returns what is kept.
func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

// Mark returns the position of the next byte, for Since.
func (l *Log) Mark() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.dropped + l.buf.Len()
}

// Since returns what was written after mark, as far as it is kept.
func (l *Log) Since(mark int) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return string(l.buf.Bytes()[min(max(mark-l.dropped, 0), l.buf.Len()):])
}

// Await waits until text has been written, up to a limit. It reports whether it has.
func (l *Log) Await(text string, limit time.Duration) bool {
	for deadline := time.Now().Add(limit); ; time.Sleep(5 * time.Millisecond) {
		if strings.Contains(l.String(), text) {
			return true
		}
		if time.Now().After(deadline) {
			return false
		}
	}
}

// Tail returns the last n lines.
func (l *Log) Tail(n int) string { return Tail(l.String(), n) }

// Tail returns the last n lines of s.
func Tail(s string, n int) string {
	lines := strings.Split(strings.TrimRight(s, "\n"), "\n")
	return strings.Join(lines[max(len(lines)-n, 0):], "\n")
}
