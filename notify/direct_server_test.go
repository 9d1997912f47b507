package notify_test

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/internal/await"
	"github.com/bounceproof/bounceproof/notify"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

// Credentials that expire: each connection by Direct asks for its own, and gets an untouched copy of the configuration.
func TestDirectAsksForCredentialsBeforeEachConnection(t *testing.T) {
	t.Parallel()
	s := postgres.Start(t, postgres.Options{})
	db := s.NewDatabase(t)
	pool := newPool(t, db.URL)
	const expired = "bounceproof_expired"
	direct := strings.Replace(db.URL, "://"+postgres.Superuser, "://"+expired, 1)

	// The control: with what is in the string nobody gets in.
	without := listen(t, pool, notify.ListenerConfig{Direct: direct, ReconnectMin: time.Millisecond, ReconnectMax: time.Millisecond})
	await.True(t, "a refusal", func() bool { return strings.Contains(without.Status().Reason, "cannot connect") })

	var calls atomic.Int64
	cfg := steadyBy(direct)
	cfg.ReconnectMin, cfg.ReconnectMax = time.Millisecond, time.Millisecond
	cfg.DirectBeforeConnect = func(_ context.Context, c *pgx.ConnConfig) error {
		if c.User != expired {
			t.Errorf("the configuration has the user %q of an earlier call", c.User)
		}
		if calls.Add(1) == 1 {
			return errors.New("no credentials yet")
		}
		c.User, c.RuntimeParams["application_name"] = postgres.Superuser, "with credentials"
		return nil
	}
	l := listen(t, pool, cfg)
	l.await(t, notify.Proven)
	l.mustReceive(t, pool)
	before := calls.Load()
	if before < 2 {
		t.Errorf("%d calls, want one that failed and one that did not", before)
	}
	if _, err := pool.Exec(t.Context(), `select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'with credentials' and datname = current_database()`); err != nil {
		t.Fatal(err)
	}
	await.True(t, "another call", func() bool { return calls.Load() > before })
	l.await(t, notify.Proven)
	l.mustReceive(t, pool)
}
