package bounceproof_test

import (
	"context"
	"log/slog"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/notify"
	"github.com/bounceproof/bounceproof/outbox"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

// TestNegativeDurationsAreOff sets every duration of every configuration to less than 0, one by one. Those that are refused are the ones that
// README.md names, and the error names them too.
func TestNegativeDurationsAreOff(t *testing.T) {
	t.Parallel()
	db := postgres.Start(t, postgres.Options{}).NewDatabase(t)
	ctx := t.Context()
	ex := must(executor.NewPool(ctx, must(pgxpool.ParseConfig(db.URL)), executor.Config{Logger: slog.New(slog.DiscardHandler)}))
	defer func() { check(ex.Close(context.WithoutCancel(ctx))) }()
	store := must(outbox.New(ex, outbox.Config{}))
	check(store.Migrate(ctx))
	sub := must(store.Subscribe(ctx, "s", outbox.SubscriptionConfig{}))
	nothing := outbox.HandlerFunc(func(context.Context, outbox.Delivery) error { return nil })

	tried, refused := 0, []string{}
	negative := func(field string, v reflect.Value, use func() error) {
		t.Helper()
		tried++
		v.SetInt(int64(-time.Second))
		if err := use(); err != nil {
			refused = append(refused, field)
			if !strings.Contains(err.Error(), field) {
				t.Errorf("the error does not name %s: %v", field, err)
			}
		}
		v.SetInt(0)
	}
	durations := func(cfg any, use func() error) {
		t.Helper()
		v := reflect.ValueOf(cfg).Elem()
		for i := range v.NumField() {
			if v.Field(i).Type() == reflect.TypeFor[time.Duration]() {
				negative(v.Type().Field(i).Name, v.Field(i), use)
			}
		}
	}
	var ec executor.Config
	durations(&ec, func() error { _, err := executor.New(ex.Pool(), ec); return err })
	durations(&ec, func() error { return executor.Guard(ex.Config(), ec) })
	durations(&ec.Sender, func() error { _, err := executor.New(ex.Pool(), ec); return err })
	var lc notify.ListenerConfig
	durations(&lc, func() error { _, err := notify.NewListener(ex.Pool(), lc); return err })
	var oc outbox.Config
	durations(&oc, func() error { _, err := outbox.New(ex, oc); return err })
	var dc outbox.DispatcherConfig
	durations(&dc, func() error { _, err := outbox.NewDispatcher(sub, nothing, dc); return err })

	want := []string{"HeartbeatTimeout", "LeaseDuration", "MaxBackoff", "MinBackoff", "ReconnectMax", "ReconnectMin"}
	slices.Sort(refused)
	if diff := cmp.Diff(want, refused); diff != "" {
		t.Errorf("durations that cannot be off (-want +got):\n%s", diff)
	}
	if tried < 20 {
		t.Errorf("only %d durations were found", tried)
	}
}
