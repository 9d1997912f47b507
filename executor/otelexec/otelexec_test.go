package otelexec_test

import (
	"maps"
	"testing"

	"go.opentelemetry.io/otel/attribute"
	sdk "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/executor/otelexec"
)

type fixed executor.Stats

func (f fixed) Stats() executor.Stats { return executor.Stats(f) }

func collect(t *testing.T, reader sdk.Reader) map[string]int64 {
	t.Helper()
	var rm metricdata.ResourceMetrics
	if err := reader.Collect(t.Context(), &rm); err != nil {
		t.Fatal(err)
	}
	got := map[string]int64{}
	for _, scope := range rm.ScopeMetrics {
		for _, m := range scope.Metrics {
			for _, p := range m.Data.(metricdata.Sum[int64]).DataPoints {
				name := m.Name
				for _, key := range []attribute.Key{"strategy", "direction"} {
					if v, ok := p.Attributes.Value(key); ok {
						name += "/" + v.AsString()
					}
				}
				if v, _ := p.Attributes.Value("db"); v.AsString() != "orders" {
					t.Errorf("%s lacks the caller's attribute", name)
				}
				got[name] = p.Value
			}
		}
	}
	return got
}

func TestEveryCounterIsReportedUntilUnregistered(t *testing.T) {
	reader := sdk.NewManualReader()
	unregister, err := otelexec.Register(fixed{
		Named: 1, Unprepared: 2, Shared: 3, Passed: 4, Parses: 5, Learns: 6, Retries: 7, Misses: 8, Probes: 9, Downgrades: 10,
		Upgrades: 11, Notifies: 12,
	}, sdk.NewMeterProvider(sdk.WithReader(reader)), attribute.String("db", "orders"))
	if err != nil {
		t.Fatal(err)
	}
	const p = "bounceproof.executor."
	want := map[string]int64{
		p + "executions/named": 1, p + "executions/unprepared": 2, p + "executions/shared": 3, p + "executions/passed": 4,
		p + "parses": 5, p + "learns": 6, p + "retries": 7, p + "misses": 8, p + "probes": 9, p + "changes/down": 10, p + "changes/up": 11,
		p + "notifies": 12,
	}
	if got := collect(t, reader); !maps.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	if err := unregister(); err != nil {
		t.Fatal(err)
	}
	if got := collect(t, reader); len(got) != 0 {
		t.Errorf("after unregister: %v", got)
	}
}

var _ otelexec.Source = (*executor.Executor)(nil)
