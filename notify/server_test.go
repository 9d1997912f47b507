package notify_test

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/internal/await"
	"github.com/bounceproof/bounceproof/notify"
	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

// mustConnect returns a connection that is closed at the end of the test.
func mustConnect(t *testing.T, url string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

func mustExec(t *testing.T, db notify.Execer, sql string, args ...any) {
	t.Helper()
	if _, err := db.Exec(t.Context(), sql, args...); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

func TestSenderReachesAListenerOnEveryPath(t *testing.T) {
	t.Parallel()
	send := func(t *testing.T, pool *pgxpool.Pool, direct string) {
		l := listen(t, pool, steadyBy(direct))
		l.await(t, notify.Proven)
		s := newSender(t, pool, notify.SenderConfig{})
		for i := range 20 { // over several connections and windows
			notifyAll(t, s, "news", fmt.Sprint("n", i), fmt.Sprint(`odd ' " \ ☃ `, i))
			notifyAll(t, s, `Other "channel"`, "x")
			if i%4 == 0 {
				if err := s.Flush(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
		}
		if err := s.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		await.True(t, "40 notifications", func() bool { return l.kinds(notify.Notified) == 40 })
		if st := s.Stats(); st.Failures != 0 || st.Sent < 41 {
			t.Errorf("stats %+v", st)
		}
	}
	everyPostgres(t, func(t *testing.T, s *postgres.Server) {
		db := s.NewDatabase(t)
		pool, err := pgxpool.New(t.Context(), db.URL) // pgx's default mode
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(pool.Close)
		send(t, pool, "")
	})
	everyPgBouncer(t, []string{"session", "transaction", "statement"}, func(t *testing.T, s *postgres.Server, b *pgbouncer.Bouncer) {
		db := s.NewDatabase(t)
		pool, err := pgxpool.New(t.Context(), b.URL(db.Name)) // pgx's default mode, which alone would not do
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(pool.Close)
		send(t, pool, db.URL)
	})
}

func TestChannelNamesAreTakenLiterally(t *testing.T) {
	t.Parallel()
	s := postgres.Start(t, postgres.Options{})
	pool := newPool(t, s.NewDatabase(t).URL)
	l, err := notify.NewListener(pool, notify.ListenerConfig{Logger: slog.New(slog.DiscardHandler), ProvenPollInterval: -1, HeartbeatTimeout: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	names := []string{"Mixed Case", `quo"te'd; unlisten *`, strings.Repeat("x", notify.MaxChannel), "☃", "select"}
	rec := &recorder{}
	for _, name := range names {
		l.Handle(name, rec)
	}
	run(t, l)
	await.True(t, "a proof", l.Healthy)
	sender := newSender(t, pool, notify.SenderConfig{})
	for _, name := range names {
		notifyAll(t, sender, name, strings.Repeat("p", notify.MaxPayload))
	}
	await.True(t, "a notification a channel", func() bool { return rec.kinds(notify.Notified) == len(names) })
	if err := sender.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// However much a process publishes, it makes at most a hundred notifying commits a second; and one that publishes once
// does not wait.
func TestNotifyingCommitsOnARealServerAreBounded(t *testing.T) {
	t.Parallel()
	server := postgres.Start(t, postgres.Options{})
	db := server.NewDatabase(t)
	pool := newPool(t, db.URL)
	mustExec(t, pool, `create table news (id bigint generated always as identity)`)
	commits := &counting{Execer: pool}
	s := newSender(t, commits, notify.SenderConfig{})

	start := time.Now()
	notifyAll(t, s, "news", "lone")
	await.True(t, "the statement", func() bool { return commits.n.Load() == 1 })

	var wg sync.WaitGroup
	var published atomic.Int64
	for range 8 {
		wg.Go(func() {
			for time.Since(start) < 2*time.Second {
				if _, err := pool.Exec(t.Context(), `insert into news default values`); err != nil {
					t.Error(err)
					return
				}
				for range 20 { // so many that the control holds on a slow machine
					_ = s.Notify("news", fmt.Sprint(published.Add(1)%100))
				}
			}
		})
	}
	wg.Wait()
	if err := s.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	took := time.Since(start)
	t.Logf("%d notifications, %d notifying commits in %v", published.Load(), commits.n.Load(), took)
	if limit := int64(took/(10*time.Millisecond)) + 1; commits.n.Load() > limit {
		t.Errorf("%d notifying commits in %v, one a window is %d", commits.n.Load(), took, limit)
	}
	if published.Load() < 10*commits.n.Load() {
		t.Errorf("%d notifications are too few to show anything", published.Load())
	}
}

type counting struct {
	notify.Execer
	n atomic.Int64
}

func (c *counting) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	c.n.Add(1)
	return c.Execer.Exec(ctx, sql, args...)
}

// A transaction that only notifies does not wait for the disk, which is what makes a statement of one's own cheap
// (xact.c, RecordTransactionCommit: an xid without WAL of its own commits asynchronously).
func TestNotifyOnlyCommitDoesNotFlush(t *testing.T) {
	t.Parallel()
	for _, v := range []string{"15", "17"} { // pg_stat_wal.wal_sync is of 14 to 17
		t.Run(v, func(t *testing.T) {
			t.Parallel()
			server := postgres.Start(t, postgres.Options{
				Version: v, Durable: true, Dedicated: true,
				Settings: map[string]string{"wal_writer_delay": "10s"}, // its flushes are nobody's commits
			})
			conn := mustConnect(t, server.NewDatabase(t).URL)
			mustExec(t, conn, `create table news (id bigint generated always as identity)`)
			syncs := func(sql string) int64 {
				t.Helper()
				read := func() (n int64) {
					if err := conn.QueryRow(t.Context(), `select wal_sync from pg_stat_wal`).Scan(&n); err != nil {
						t.Fatal(err)
					}
					return n
				}
				mustExec(t, conn, `select pg_stat_reset_shared('wal')`)
				before := read()
				for range 200 {
					mustExec(t, conn, sql)
				}
				// A backend reports its statistics at most once a second, or when told to.
				mustExec(t, conn, `select pg_stat_force_next_flush()`)
				mustExec(t, conn, `select pg_stat_clear_snapshot()`)
				return read() - before
			}
			notifying, inserting := syncs(`select pg_notify('news', '')`), syncs(`insert into news default values`)
			t.Logf("200 commits: %d flushes when they only notify, %d when they insert", notifying, inserting)
			if notifying > 20 || inserting < 150 {
				t.Errorf("200 commits: %d flushes when they only notify, %d when they insert", notifying, inserting)
			}
		})
	}
}

func TestForeignTransactions(t *testing.T) {
	t.Parallel()
	everyPostgres(t, func(t *testing.T, server *postgres.Server) {
		pool := newPool(t, server.NewDatabase(t).URL)
		mustExec(t, pool, `create table news (id bigint generated always as identity)`)
		l := listen(t, pool, steady)
		l.await(t, notify.Proven)
		const window = time.Second // in which many transactions end on any machine
		s := newSender(t, pool, notify.SenderConfig{Window: window})
		start := time.Now()
		in := func(commit bool, payload string) {
			t.Helper()
			tx, err := pool.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			mustExec(t, tx, `insert into news default values`)
			if err := s.NotifyTx(t.Context(), tx, "news", payload); err != nil {
				t.Fatal(err)
			}
			if commit {
				err = tx.Commit(t.Context())
			} else {
				err = tx.Rollback(t.Context())
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		in(false, "rolled back") // the one inside the transaction is gone with it
		if err := s.Flush(t.Context()); err != nil {
			t.Fatal(err)
		}
		for i := range 50 {
			in(true, fmt.Sprint(i))
		}
		await.True(t, "50 notifications", func() bool {
			for i := range 50 {
				if !l.heard(fmt.Sprint(i)) {
					return false
				}
			}
			return true
		})
		if err := s.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		if l.heard("rolled back") {
			t.Error("a transaction that was rolled back announced itself")
		}
		st := s.Stats()
		t.Logf("51 transactions: %d notified inside, %d statements outside", st.InTx, st.Statements)
		if limit := int64(time.Since(start)/window) + 1; st.InTx == 0 || st.InTx > limit || st.Statements == 0 {
			t.Errorf("want at most %d notifications inside, one a window: stats %+v", limit, st)
		}
	})
}

func checkLimits(t *testing.T, server *postgres.Server) {
	conn := mustConnect(t, server.NewDatabase(t).URL)
	var agreed, refused int
	for _, n := range []int{0, 1, 62, 63, 64, 65, 7998, 7999, 8000, 8001} {
		for _, c := range []string{"x", "é", "☃", "\x00", "\xff", `"`} {
			s := strings.Repeat(c, n/len(c)) + strings.Repeat("x", n%len(c))
			for what, check := range map[string]error{"channel": notify.CheckChannel(s), "payload": notify.CheckPayload("c", s)} {
				channel, payload := "c", s
				if what == "channel" {
					channel, payload = s, ""
				}
				_, err := conn.Exec(t.Context(), `select pg_notify($1, $2)`, pgx.QueryExecModeExec, channel, payload)
				if (err == nil) != (check == nil) {
					t.Errorf("%s of %d bytes of %q: the check says %v, the server %v", what, n, c, check, err)
				}
				if err == nil {
					agreed++
				} else {
					refused++
				}
			}
		}
	}
	if agreed < 20 || refused < 20 {
		t.Errorf("%d taken, %d refused: nothing is shown", agreed, refused)
	}
}
