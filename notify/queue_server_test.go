package notify_test

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/internal/await"
	"github.com/bounceproof/bounceproof/internal/logrec"
	"github.com/bounceproof/bounceproof/notify"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

// fillQueue has a listener stall in a transaction, and the notification queue run full behind it.
func fillQueue(t *testing.T, url string) (stalled *pgx.Conn) {
	t.Helper()
	stalled = mustConnect(t, url)
	mustExec(t, stalled, "listen flood")
	mustExec(t, stalled, "begin; select 1")
	flood := mustConnect(t, url)
	payload := strings.Repeat("x", notify.MaxPayload)
	for i := range 10_000 {
		if _, err := flood.Exec(t.Context(), `select pg_notify('flood', $1)`, fmt.Sprint(payload[:7990], i)); err != nil {
			if !strings.Contains(err.Error(), "too many notifications") {
				t.Fatal(err)
			}
			t.Logf("the queue is full after %d notifications", i)
			return stalled
		}
	}
	t.Fatal("the queue does not run full")
	return nil
}

func TestFullQueueLeavesPublishersUntouched(t *testing.T) {
	t.Parallel()
	for _, v := range []string{"17", "18"} { // max_notify_queue_pages is of 17
		t.Run(v, func(t *testing.T) {
			t.Parallel()
			server := postgres.Start(t, postgres.Options{Version: v, Dedicated: true, Settings: map[string]string{"max_notify_queue_pages": "64"}})
			db := server.NewDatabase(t)
			pool := newPool(t, db.URL)
			mustExec(t, pool, `create table news (id bigint generated always as identity)`)
			log := &logrec.Recorder{}
			s := newSender(t, pool, notify.SenderConfig{Logger: log.Logger(), Timeout: time.Minute})
			l := listen(t, pool, steady)
			l.await(t, notify.Proven)
			publishSome := func() (slowest time.Duration) {
				t.Helper()
				for i := range 200 {
					start := time.Now()
					mustExec(t, pool, `insert into news default values`)
					notifyAll(t, s, "news", fmt.Sprint(i))
					slowest = max(slowest, time.Since(start))
				}
				return slowest
			}
			before := publishSome()
			if err := s.Flush(t.Context()); err != nil {
				t.Fatal(err)
			}

			stalled := fillQueue(t, db.URL)
			// The control: a publisher that notifies in its own transaction fails.
			if _, err := pool.Exec(t.Context(), `with x as (insert into news default values returning id) select pg_notify('news', id::text) from x`); err == nil {
				t.Fatal("a notifying publisher did not fail: the queue is not full")
			}
			during := publishSome()
			await.True(t, "a failure", func() bool { return s.Stats().Failures > 1 })
			// Nor does one with a transaction of its own suffer from NotifyTx.
			tx, err := pool.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			mustExec(t, tx, `insert into news default values`)
			if err := s.NotifyTx(t.Context(), tx, "news", "foreign"); err != nil {
				t.Errorf("NotifyTx = %v", err)
			}
			if err := tx.Commit(t.Context()); err != nil {
				t.Errorf("Commit = %v", err)
			}
			if st := s.Stats(); st.InTx != 0 || st.LastError == nil || st.Pending == 0 {
				t.Errorf("stats %+v", st)
			}

			mustExec(t, stalled, "rollback")
			waiting, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			if err := s.Flush(waiting); err != nil {
				t.Fatal(err)
			}
			await.True(t, "what waited", func() bool { return l.heard("foreign") && l.heard("199") })
			if len(log.At(slog.LevelWarn)) != 1 || len(log.At(slog.LevelInfo)) != 1 || !strings.Contains(log.All(), "too many notifications") {
				t.Errorf("want one warning with the cause and one information:\n%s", log.All())
			}
			t.Logf("slowest of 200 publishes: %v before, %v with a full queue; %d failed statements", before, during, s.Stats().Failures)
		})
	}
}

// On servers whose queue cannot be made small, a stalled listener: publishers and the sender go on.
func TestStalledListenerLeavesPublishersUntouched(t *testing.T) {
	t.Parallel()
	everyPostgres(t, func(t *testing.T, server *postgres.Server) {
		db := server.NewDatabase(t)
		pool := newPool(t, db.URL)
		stalled := mustConnect(t, db.URL)
		mustExec(t, stalled, "listen news")
		mustExec(t, stalled, "begin; select 1")
		l := listen(t, pool, steady)
		l.await(t, notify.Proven)
		s := newSender(t, pool, notify.SenderConfig{})
		for i := range 300 {
			mustExec(t, pool, `select 1`)
			notifyAll(t, s, "news", fmt.Sprint(strings.Repeat("x", 1000), i))
		}
		if err := s.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		await.True(t, "300 notifications", func() bool { return l.kinds(notify.Notified) == 300 })
	})
}
