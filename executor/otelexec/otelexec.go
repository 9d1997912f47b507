// Package otelexec reports an executor's counters as OpenTelemetry metrics. It is a module of its own, so that OpenTelemetry is in nobody's
// build who does not ask for it.
//
//	unregister, err := otelexec.Register(ex, otel.GetMeterProvider())
//
// Spans need nothing from here: pgx's tracers on the pool see the executor's statements as they see pgx's.
package otelexec

import (
	"context"
	"fmt"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/bounceproof/bounceproof/executor"
)

// Source has counters to report. *executor.Executor is one.
type Source interface {
	Stats() executor.Stats
}

// scope names the instrumentation.
const scope = "github.com/bounceproof/bounceproof/executor"

// Register reports src's counters to provider with every collection, until unregister is called. attrs go to every measurement, to tell
// several executors apart. Nothing is measured between collections. The error is the provider's. Safe for concurrent use.
//
// The metrics, all monotonic counters: bounceproof.executor.executions by attribute strategy (named, unprepared, shared, passed), .parses,
// .learns, .retries, .misses, .probes, .changes by attribute direction (down, up), and .notifies.
func Register(src Source, provider metric.MeterProvider, attrs ...attribute.KeyValue) (unregister func() error, err error) {
	meter := provider.Meter(scope)
	r := &registration{src: src, attrs: attrs}
	for _, c := range counters {
		counter, err := meter.Int64ObservableCounter("bounceproof.executor."+c.name,
			metric.WithDescription(c.description), metric.WithUnit(c.unit))
		if err != nil {
			return nil, fmt.Errorf("otelexec: register %s: %w", c.name, err)
		}
		r.instruments = append(r.instruments, counter)
	}
	observables := make([]metric.Observable, len(r.instruments))
	for i, instrument := range r.instruments {
		observables[i] = instrument
	}
	registered, err := meter.RegisterCallback(r.observe, observables...)
	if err != nil {
		return nil, fmt.Errorf("otelexec: register: %w", err)
	}
	return registered.Unregister, nil
}

// counters are the metrics, each with the values it takes from a snapshot.
var counters = []struct {
	name, unit, description string
	values                  func(executor.Stats) []value
}{
	{"executions", "{execution}", "Statements run, by the way they were sent.", func(s executor.Stats) []value {
		return []value{
			{s.Named, attribute.String("strategy", "named")},
			{s.Unprepared, attribute.String("strategy", "unprepared")},
			{s.Shared, attribute.String("strategy", "shared")},
			{s.Passed, attribute.String("strategy", "passed")},
		}
	}},
	{"parses", "{parse}", "Parse messages sent for executions.", func(s executor.Stats) []value { return plain(s.Parses) }},
	{"learns", "{parse}", "Parse messages sent to learn a text's types.", func(s executor.Stats) []value { return plain(s.Learns) }},
	{"retries", "{retry}", "Statements, batches and transactions run again unseen.", func(s executor.Stats) []value { return plain(s.Retries) }},
	{"misses", "{miss}", "Shared names that a server did not have.", func(s executor.Stats) []value { return plain(s.Misses) }},
	{"probes", "{probe}", "Looks at the pooler.", func(s executor.Stats) []value { return plain(s.Probes) }},
	{"changes", "{change}", "Changes of the way of sending.", func(s executor.Stats) []value {
		return []value{{s.Downgrades, attribute.String("direction", "down")}, {s.Upgrades, attribute.String("direction", "up")}}
	}},
	{"notifies", "{commit}", "Notifying commits.", func(s executor.Stats) []value { return plain(s.Notifies) }},
}

// value is one measurement; an attribute without a key is none.
type value struct {
	n    int64
	attr attribute.KeyValue
}

func plain(n int64) []value { return []value{{n: n}} }

type registration struct {
	src         Source
	attrs       []attribute.KeyValue
	instruments []metric.Int64ObservableCounter
}

func (r *registration) observe(_ context.Context, o metric.Observer) error {
	stats := r.src.Stats()
	for i, c := range counters {
		for _, v := range c.values(stats) {
			attrs := r.attrs
			if v.attr.Valid() {
				attrs = append(attrs[:len(attrs):len(attrs)], v.attr)
			}
			o.ObserveInt64(r.instruments[i], v.n, metric.WithAttributes(attrs...))
		}
	}
	return nil
}
