package main

import (
	"context"
	"log/slog"
	"sync"
)

// record is a log line that was written while a row of the demo ran.
type record struct {
	level   slog.Level
	message string
	attrs   map[string]string
}

// recorder is a log handler that keeps warnings and errors, so that they can be shown and counted. Safe for concurrent use.
type recorder struct {
	shared *records
	attrs  []slog.Attr
	group  string // with a dot behind it
}

type records struct {
	mu  sync.Mutex
	all []record
}

var _ slog.Handler = (*recorder)(nil)

func newRecorder() *recorder { return &recorder{shared: &records{}} }

// Enabled keeps warnings and worse.
func (r *recorder) Enabled(_ context.Context, level slog.Level) bool { return level >= slog.LevelWarn }

// Handle keeps a record.
func (r *recorder) Handle(_ context.Context, from slog.Record) error {
	kept := record{level: from.Level, message: from.Message, attrs: map[string]string{}}
	for _, a := range r.attrs {
		flatten(kept.attrs, "", a)
	}
	from.Attrs(func(a slog.Attr) bool {
		flatten(kept.attrs, r.group, a)
		return true
	})
	r.shared.mu.Lock()
	defer r.shared.mu.Unlock()
	r.shared.all = append(r.shared.all, kept)
	return nil
}

// flatten writes an attribute into attrs, groups as "group.name".
func flatten(attrs map[string]string, prefix string, a slog.Attr) {
	v := a.Value.Resolve()
	if v.Kind() != slog.KindGroup {
		attrs[prefix+a.Key] = v.String()
		return
	}
	if a.Key != "" {
		prefix += a.Key + "."
	}
	for _, inner := range v.Group() {
		flatten(attrs, prefix, inner)
	}
}

// WithAttrs returns a handler whose records go to the same place.
func (r *recorder) WithAttrs(attrs []slog.Attr) slog.Handler {
	next := *r
	next.attrs = append([]slog.Attr(nil), r.attrs...)
	for _, a := range attrs {
		if r.group != "" {
			a.Key = r.group + a.Key
		}
		next.attrs = append(next.attrs, a)
	}
	return &next
}

// WithGroup returns a handler whose records go to the same place.
func (r *recorder) WithGroup(name string) slog.Handler {
	next := *r
	if name != "" {
		next.group += name + "."
	}
	return &next
}

// records returns what was kept so far.
func (r *recorder) records() []record {
	r.shared.mu.Lock()
	defer r.shared.mu.Unlock()
	return append([]record(nil), r.shared.all...)
}
