package notify_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/internal/await"
	"github.com/bounceproof/bounceproof/notify"
	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

// oneByOne is a pool whose second, fourth … connection made from its Config fails: the listener gets no second connection
// to find out about the pooler, so all rests on the proof.
type oneByOne struct {
	*pgxpool.Pool
	dials atomic.Int64
}

func (p *oneByOne) Config() *pgxpool.Config {
	cfg := p.Pool.Config()
	cfg.BeforeConnect = func(context.Context, *pgx.ConnConfig) error {
		if p.dials.Add(1)%2 == 0 {
			return errors.New("no second connection")
		}
		return nil
	}
	return cfg
}

func TestProofAloneFindsIsolationAndCleansUp(t *testing.T) {
	t.Parallel()
	everyPgBouncer(t, []string{"transaction", "statement"}, func(t *testing.T, s *postgres.Server, b *pgbouncer.Bouncer) {
		for _, traffic := range []string{"quiet", "busy"} {
			t.Run(traffic, func(t *testing.T) {
				db := s.NewDatabase(t)
				if traffic == "busy" {
					keepBusy(t, b.URL(db.Name), 8)
				}
				pool := &oneByOne{Pool: newPool(t, b.URL(db.Name))}
				l := listen(t, pool, notify.ListenerConfig{PollInterval: 100 * time.Millisecond, HeartbeatTimeout: 10 * time.Second})
				l.await(t, notify.Isolated)
				t.Log(l.Status().Reason)
				if st := l.Status(); st.Proofs != 0 || l.kinds(notify.Resynced) != 0 {
					t.Errorf("it claims health: %+v", st)
				}
				l.stop()
				if traffic == "quiet" { // beside others, finding the server that listens again takes luck
					mustLeaveNoListen(t, b.URL(db.Name))
				}
			})
		}
	})
}

// Why the note comes from another session: one to oneself arrives behind transaction mode, where nothing else will.
func TestNoteToOneselfWouldPassBehindTransactionMode(t *testing.T) {
	t.Parallel()
	everyPgBouncer(t, []string{"transaction"}, func(t *testing.T, s *postgres.Server, b *pgbouncer.Bouncer) {
		conn, err := pgx.Connect(t.Context(), b.URL(s.NewDatabase(t).Name))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close(context.Background())
		for _, sql := range []string{"listen me", "notify me"} {
			if _, err := conn.Exec(t.Context(), sql); err != nil {
				t.Fatal(err)
			}
		}
		ctx, cancel := context.WithTimeout(t.Context(), await.Deadline)
		defer cancel()
		if _, err := conn.WaitForNotification(ctx); err != nil {
			t.Errorf("the note did not arrive (%v): then this package is more careful than it needs to be", err)
		}
	})
}

// fast makes a listener notice in a few seconds what the defaults notice in 15. What it does within HeartbeatTimeout, a
// busy machine has to do too.
var fast = notify.ListenerConfig{
	Heartbeat: 500 * time.Millisecond, HeartbeatTimeout: 5 * time.Second,
	ReconnectMin: 100 * time.Millisecond, ReconnectMax: time.Second, Reprove: 500 * time.Millisecond,
	PollInterval: 100 * time.Millisecond,
}

func TestPoolerThatChangesItsModeIsNoticed(t *testing.T) {
	t.Parallel()
	for how, change := range map[string]func(*testing.T, *pgbouncer.Bouncer, string){
		"reload": func(t *testing.T, b *pgbouncer.Bouncer, mode string) {
			b.Reload(t, map[string]string{"pool_mode": mode})
		},
		"restart": func(t *testing.T, b *pgbouncer.Bouncer, mode string) {
			b.Stop(t)
			b.Start(t)
			b.Reload(t, map[string]string{"pool_mode": mode})
		},
	} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			everyPgBouncer(t, []string{"session"}, func(t *testing.T, s *postgres.Server, b *pgbouncer.Bouncer) {
				db := s.NewDatabase(t)
				pool := newPool(t, b.URL(db.Name))
				direct := newPool(t, db.URL)
				l := listen(t, pool, fast)
				l.await(t, notify.Proven)

				change(t, b, "transaction")
				// PgBouncer lets the server go only when the next message passes, so the first notification is still heard.
				// From then on the listener hears nothing, and has a heartbeat's time to find out.
				await.True(t, "the change to be noticed", func() bool {
					publish(t, direct, "unheard")
					return l.State() == notify.Isolated
				})
				polled := l.kinds(notify.Polled)
				await.True(t, "polling", func() bool { return l.kinds(notify.Polled) > polled+1 })
				mustLeaveNoListen(t, b.URL(db.Name))
				t.Log(l.Status().Reason)
				change(t, b, "session")
				l.await(t, notify.Proven)
				l.mustReceive(t, direct)
			})
		})
	}
}
