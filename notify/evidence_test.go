package notify_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/internal/pgscript"
	"github.com/bounceproof/bounceproof/notify"
)

// A listener must not say that it is healthy when it hears nothing, nor that it is isolated when it is not.

// wire is a scripted server behind a network of its own: what the server sends takes its time.
type wire struct {
	*scripted

	delay time.Duration
}

func (w *wire) Config() *pgxpool.Config {
	cfg := w.scripted.Config()
	dial := cfg.ConnConfig.DialFunc
	cfg.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return &wired{Conn: conn, w: w}, nil
	}
	return cfg
}

type wired struct {
	net.Conn
	w *wire
}

func (c *wired) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	time.Sleep(c.w.delay)
	return n, err
}

// share runs another listener on the connection of l, with a recorder on a channel.
func (l *listening) share(t *testing.T, channel string, h notify.Handler) (other *notify.Listener, stop func()) {
	t.Helper()
	other = l.Share()
	other.Handle(channel, h)
	return other, run(t, other)
}

func TestResyncedComesAfterTheListenOfItsOwnChannel(t *testing.T) {
	t.Parallel()
	for ms := range 40 { // the second joins at every point of the first one's LISTEN
		synctest.Test(t, func(t *testing.T) {
			w := &wire{scripted: newScripted(t, pgscript.Options{}), delay: 20 * time.Millisecond}
			l := listen(t, w, notify.ListenerConfig{})
			time.Sleep(time.Second)
			l.must(t, notify.Proven)
			_, stop2 := l.share(t, "second", &recorder{})
			time.Sleep(time.Duration(ms) * time.Millisecond)
			third := &recorder{}
			var l3 *notify.Listener
			var healthyBefore bool
			l3, stop3 := l.share(t, "third", notify.HandlerFunc(func(ctx context.Context, e notify.Event) {
				third.HandleEvent(ctx, e)
				if e.Kind == notify.Resynced {
					w.Notify("third", "now")
				}
			}))
			for synctest.Wait(); third.kinds(notify.Resynced) == 0; synctest.Wait() {
				healthyBefore = healthyBefore || l3.Healthy()
				time.Sleep(time.Millisecond)
			}
			time.Sleep(time.Second)
			if !third.heard("now") {
				t.Errorf("%d ms: a notification after Resynced was lost", ms)
			}
			if healthyBefore || !l3.Healthy() {
				t.Errorf("%d ms: healthy before Resynced: %v; a second after it: %v", ms, healthyBefore, l3.Healthy())
			}
			stop3()
			stop2()
			l.stop()
		})
	}
}

// The listener that reads stops while another's LISTEN is under way and is not answered.
func TestEveryCloseOfTheConnectionChangesTheState(t *testing.T) {
	t.Parallel()
	for _, reprove := range []time.Duration{0, -1} {
		t.Run(fmt.Sprint("Reprove ", reprove), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				pg := newScripted(t, pgscript.Options{})
				pg.listenErr = "58P01" // isolated once, so there is a wait that could outlive its reason
				l := listen(t, pg, notify.ListenerConfig{Reprove: reprove})
				l.must(t, notify.Isolated)
				pg.with(func() { pg.listenErr = "" })
				time.Sleep(20 * time.Second)
				l.must(t, notify.Proven)

				pg.with(func() { pg.stalledListen = true })
				other, stop := l.share(t, "other", &recorder{})
				synctest.Wait()
				l.stop()
				start := time.Now()
				for time.Since(start) < 4*time.Second {
					synctest.Wait()
					if other.Healthy() {
						t.Fatalf("healthy %v after the only connection was closed", time.Since(start))
					}
					if time.Since(start) > 2*time.Second && other.Status().Reason == "" {
						t.Error("no reason")
					}
					time.Sleep(100 * time.Millisecond)
				}
				pg.with(func() { pg.stalledListen = false })
				time.Sleep(10 * time.Second)
				if st := other.Status(); st.State != notify.Proven {
					t.Errorf("status %+v", st)
				}
				stop()
			})
		})
	}
}

func TestAWaitIsOverWhenDeliveryIsProvenOrNobodyRuns(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		pg := newScripted(t, pgscript.Options{Kind: pgscript.Session})
		pg.LoseNotifications(true)
		l := listen(t, pg, notify.ListenerConfig{Reprove: time.Hour})
		time.Sleep(time.Minute)
		l.must(t, notify.Isolated)
		l.stop()
		pg.LoseNotifications(false)
		l.stop = run(t, l.Listener)
		time.Sleep(time.Second)
		l.must(t, notify.Proven)
		l.stop()
	})
}

// twoServers is a pool whose address leads to another server than it did.
type twoServers struct {
	*scripted
	mu    sync.Mutex
	other *scripted
}

func (p *twoServers) move(to *scripted) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.other = to
}

func (p *twoServers) now() *scripted {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.other != nil {
		return p.other
	}
	return p.scripted
}

func (p *twoServers) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	return p.now().Exec(ctx, sql, args...)
}

func (p *twoServers) Config() *pgxpool.Config { return p.now().Config() }

func TestNotificationsFromElsewhereAreNoProof(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		before, after := newScripted(t, pgscript.Options{}), newScripted(t, pgscript.Options{})
		pool := &twoServers{scripted: before}
		l := listen(t, pool, notify.ListenerConfig{})
		l.must(t, notify.Proven)
		pool.move(after) // its publishers notify there from now on; others go on here
		for i := range 16 {
			before.Notify("news", fmt.Sprint("elsewhere ", i))
			time.Sleep(time.Second)
		}
		if st := l.Status(); st.Losses != 1 {
			t.Errorf("status %+v", st)
		}
		time.Sleep(2 * time.Second)
		l.must(t, notify.Proven)
		after.Notify("news", "here")
		synctest.Wait()
		if !l.heard("here") || !l.heard("elsewhere 0") || before.Open() != 0 {
			t.Error("it does not listen where publishers notify")
		}
		l.stop()
	})
}

func TestAListenerThatDoesNotRunIsUnknown(t *testing.T) {
	virtual(t, notify.ListenerConfig{}, func(t *testing.T, _ *scripted, l *listening) {
		l.must(t, notify.Proven)
		other := l.Share()
		other.Handle("other", &recorder{})
		never := l.Share()
		if st := never.Status(); st.State != notify.Unknown || never.Healthy() || st.Reason == "" {
			t.Errorf("status of one that never ran: %+v", st)
		}
		stop := run(t, other)
		synctest.Wait()
		if !other.Healthy() { // the control
			t.Errorf("status while it runs: %+v", other.Status())
		}
		time.Sleep(time.Second)
		stop()
		if st := other.Status(); st.State != notify.Unknown || st.Reason == "" || time.Since(st.Since) > 0 {
			t.Errorf("status after it was stopped: %+v", st)
		}
		l.must(t, notify.Proven)
	})
}

// A link that stands still for a moment after LISTEN costs that moment and one attempt.
func TestOneMissIsNotSettled(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		pool := &lateNote{scripted: newScripted(t, pgscript.Options{})}
		l := listen(t, pool, notify.ListenerConfig{})
		time.Sleep(4 * time.Second)
		l.must(t, notify.Proven)
		if st := l.Status(); st.Connects != 2 || l.warnings() != 0 {
			t.Errorf("status %+v, want a second connection and no warning:\n%s", st, l.log.All())
		}
		l.stop()
	})
}

// lateNote is a pool whose first note arrives after 3 seconds.
type lateNote struct {
	*scripted
	once sync.Once
}

func (p *lateNote) Exec(ctx context.Context, sql string, args ...any) (tag pgconn.CommandTag, err error) {
	late := false
	p.once.Do(func() {
		late = true
		time.AfterFunc(3*time.Second, func() { _, _ = p.scripted.Exec(ctx, sql, args...) })
	})
	if late {
		return tag, nil
	}
	return p.scripted.Exec(ctx, sql, args...)
}

// A proof that is late makes the listener unproven, whatever else is true.
func TestALateProofIsNoProof(t *testing.T) {
	for name, spoil := range map[string]func(*scripted){
		"the queue is full":            func(pg *scripted) { pg.execErr = errors.New("too many notifications in the NOTIFY queue") },
		"the notifying lock is held":   func(pg *scripted) { pg.silent = true },
		"and nobody can connect":       func(pg *scripted) { pg.silent, pg.down = true, true },
		"notes are sent and not heard": func(pg *scripted) { pg.lost = true },
	} {
		t.Run(name, func(t *testing.T) {
			virtual(t, notify.ListenerConfig{}, func(t *testing.T, pg *scripted, l *listening) {
				for range 20 {
					l.must(t, notify.Proven)
					time.Sleep(time.Since(pg.born) % (7 * time.Second))
					pg.with(func() { spoil(pg) })
					time.Sleep(15 * time.Second)
					for range 20 {
						synctest.Wait()
						if l.Healthy() {
							t.Fatal("healthy without a heartbeat for 15s")
						}
						time.Sleep(time.Second)
					}
					pg.with(func() { pg.silent, pg.down, pg.lost, pg.execErr = false, false, false, nil })
					time.Sleep(50 * time.Second)
				}
			})
		})
	}
}

// What helps depends on what is wrong, and the reason is one line.
func TestReasonAndRemedyAreThoseOfTheFault(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		kind         pgscript.Kind
		spoil        func(*scripted)
		want, wanted string // of the state's reason, and of the remedy
	}{
		"silence on a direct connection": {
			pgscript.Direct, func(pg *scripted) { pg.LoseNotifications(true) }, "different servers", "let the pool's address lead to one server",
		},
		"silence behind a pooler": {
			pgscript.Session, func(pg *scripted) { pg.LoseNotifications(true) }, "the pooler does not keep", "set ListenerConfig.Direct to a session connection",
		},
		"a standby": {
			pgscript.Direct, func(pg *scripted) { pg.listenErr = "25006" }, "refused LISTEN", "let the pool lead to the primary",
		},
		"a pool that can notify nobody": {
			pgscript.Direct, func(pg *scripted) { pg.execErr, pg.down = errors.New("no\nconnection\r\nis free"), false }, "no; connection; is free", "",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				pg := newScripted(t, pgscript.Options{Kind: c.kind})
				pg.with(func() { c.spoil(pg) })
				l := listen(t, pg, notify.ListenerConfig{})
				time.Sleep(20 * time.Second)
				l.must(t, notify.Isolated)
				if reason := l.Status().Reason; !strings.Contains(reason, c.want) || strings.ContainsAny(reason, "\r\n") {
					t.Errorf("reason %q", reason)
				}
				if log := l.log.All(); !strings.Contains(log, c.wanted) || l.warnings() != 1 || c.kind == pgscript.Direct && strings.Contains(log, "Direct") {
					t.Errorf("want one warning with %q:\n%s", c.wanted, log)
				}
				l.stop()
			})
		})
	}
}
