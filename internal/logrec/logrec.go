// Package logrec records log lines for tests.
package logrec

import (
	"context"
	"log/slog"
	"strings"
	"sync"
)

// Recorder keeps every log line, of every level, in memory. The zero value is ready. It is safe for concurrent use.
type Recorder struct {
	mu    sync.Mutex // guards what follows
	lines []line
}

type line struct {
	level slog.Level
	text  string
}

// Logger returns a logger that writes to r.
func (r *Recorder) Logger() *slog.Logger { return slog.New(handler{r: r}) }

// At returns the lines of exactly one level, in order, each as "message key=value key=value". A value that has spaces is
// not quoted, and the keys of a group have its name and a dot in front.
func (r *Recorder) At(level slog.Level) []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var texts []string
	for _, l := range r.lines {
		if l.level == level {
			texts = append(texts, l.text)
		}
	}
	return texts
}

// All returns every line with its level in front, each ended by a newline.
func (r *Recorder) All() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var b strings.Builder
	for _, l := range r.lines {
		b.WriteString(l.level.String() + " " + l.text + "\n")
	}
	return b.String()
}

// Reset forgets what was recorded.
func (r *Recorder) Reset() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lines = nil
}

// handler is one logger's view of a Recorder: with the attributes and groups that Logger.With and WithGroup gave it.
type handler struct {
	r      *Recorder
	prefix string // of the keys
	attrs  string // as they are printed
}

func (handler) Enabled(context.Context, slog.Level) bool { return true }

func (h handler) Handle(_ context.Context, rec slog.Record) error {
	var b strings.Builder
	b.WriteString(rec.Message + h.attrs)
	rec.Attrs(func(a slog.Attr) bool {
		write(&b, h.prefix, a)
		return true
	})
	h.r.mu.Lock()
	defer h.r.mu.Unlock()
	h.r.lines = append(h.r.lines, line{rec.Level, b.String()})
	return nil
}

func (h handler) WithAttrs(attrs []slog.Attr) slog.Handler {
	var b strings.Builder
	for _, a := range attrs {
		write(&b, h.prefix, a)
	}
	h.attrs += b.String()
	return h
}

func (h handler) WithGroup(name string) slog.Handler {
	if name != "" {
		h.prefix += name + "."
	}
	return h
}

func write(b *strings.Builder, prefix string, a slog.Attr) {
	v := a.Value.Resolve()
	if v.Kind() != slog.KindGroup {
		if !a.Equal(slog.Attr{}) {
			b.WriteString(" " + prefix + a.Key + "=" + v.String())
		}
		return
	}
	if a.Key != "" { // a group without a name is part of what it stands in
		prefix += a.Key + "."
	}
	for _, inner := range v.Group() {
		write(b, prefix, inner)
	}
}
