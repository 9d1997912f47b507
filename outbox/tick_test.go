package outbox_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/bounceproof/bounceproof/outbox"
)

// The hard case of "is anything new": a transaction has its number, a tick has read the tip with it, and the tick's snapshot does not list
// the transaction, because its id is not below the latest completed one. Nothing else happens but its commit.
func TestACommitThatNoSnapshotListedIsNoticed(t *testing.T) {
	t.Parallel()
	const clause = "where pg_visible_in_snapshot(g.xid::text::xid8, state.snapshot))"
	for name, control := range map[string]bool{"tick": false, "control without the range of ids": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := setup(t, outbox.Config{WakeUp: outbox.WakeUpPoll})
			if control {
				db.proc.store.RewriteTick(func(sql string) string {
					if !strings.Contains(sql, clause) {
						t.Fatal("the tick statement has no such clause")
					}
					return strings.Replace(sql, clause, "where false)", 1)
				})
			}
			sub := db.proc.subscribe(t, "s", outbox.SubscriptionConfig{})
			rec := newRecorder()
			start(t, sub, outbox.HandlerFunc(rec.handle), outbox.DispatcherConfig{PollInterval: 10 * time.Millisecond, LeaseDuration: time.Minute})
			for n := int64(1); ; n++ {
				tx, err := db.conn.Begin(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				if err := db.proc.store.Publish(t.Context(), tx, outbox.Event{Type: "t"}); err != nil {
					_ = tx.Rollback(context.WithoutCancel(t.Context()))
					t.Fatal(err)
				}
				var xid, seq, xmax int64
				q := "select xid::text::bigint, seq from outbox.event where xid = pg_current_xact_id()"
				if err := tx.QueryRow(t.Context(), q).Scan(&xid, &seq); err != nil {
					t.Fatal(err)
				}
				eventually(t, "a tick that read its number", func() bool {
					q := "select coalesce(max(pg_snapshot_xmax(snapshot)::text::bigint), 0) from outbox.tick where tip >= $1"
					xmax = db.count(t, q, seq)
					return xmax > 0
				})
				if err := tx.Commit(t.Context()); err != nil {
					t.Fatal(err)
				}
				if xmax > xid { // something else completed meanwhile, and the snapshot lists it: the easy case, try again
					eventually(t, "the easy case", func() bool { return rec.n.Load() == n })
					continue
				}
				if !control {
					eventually(t, "the hard case", func() bool { return rec.n.Load() == n })
					return
				}
				committed := db.proc.requests.Load()
				eventually(t, "thirty polls", func() bool { return rec.n.Load() == n || db.proc.requests.Load() > committed+30 })
				if rec.n.Load() != n {
					return // the control has lost it
				}
				// Somebody else's transaction moved the cluster on, which tells the control too. That is chance, and not every time.
				if n == 20 {
					t.Fatal("it was noticed every time: the test above proves nothing")
				}
			}
		})
	}
}
