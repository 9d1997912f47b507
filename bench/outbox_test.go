package bench

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/outbox"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

// BenchmarkOutboxPublish publishes one event of 160 bytes an operation, fsync on: in a transaction of its own by Publish, and by PublishNow, whose
// concurrent calls share commits. The peer is bare pgx's autocommit insert of the same row into a table with the log's index.
func BenchmarkOutboxPublish(b *testing.B) {
	for _, clients := range []int{1, 32} {
		for _, keyed := range []bool{false, true} {
			b.Run(fmt.Sprintf("clients=%d/keyed=%v", clients, keyed), func(b *testing.B) {
				db := postgres.Start(b, postgres.Options{Version: "17", Durable: true}).NewDatabase(b)
				bare := pool(b, db.URL, clients)
				ex := newExecutor(b, pool(b, db.URL, clients), executor.Config{Logger: quiet})
				store, err := outbox.New(ex, outbox.Config{WakeUp: outbox.WakeUpPoll, Logger: quiet})
				if err != nil {
					b.Fatal(err)
				}
				if err := store.Migrate(b.Context()); err != nil {
					b.Fatal(err)
				}
				const peerTable = `create table peer (lane smallint, seq bigint generated always as identity (cache 1), xid xid8 default pg_current_xact_id(),
					type text, key text, payload bytea, headers jsonb, published_at timestamptz default clock_timestamp(), primary key (lane, seq))`
				if _, err := bare.Exec(b.Context(), peerTable); err != nil {
					b.Fatal(err)
				}
				payload := make([]byte, 160)
				var n atomic.Int64
				event := func() outbox.Event {
					e := outbox.Event{Type: "order.paid", Payload: payload}
					if keyed {
						e.Key = fmt.Sprint(n.Add(1) % 1000)
					}
					return e
				}
				paired(b, clients, 1500*clients/(clients/4+1),
					arm{"PublishNow", func(ctx context.Context) error { return store.PublishNow(ctx, event()) }},
					arm{"Publish", func(ctx context.Context) error {
						return ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
							return store.Publish(ctx, tx, event())
						})
					}},
					arm{"insert", func(ctx context.Context) error {
						e := event()
						_, err := bare.Exec(ctx, "insert into peer (lane, type, key, payload) values ($1, $2, nullif($3, ''), $4)", int16(n.Load()%16), e.Type, e.Key, e.Payload)
						return err
					}},
				)
			})
		}
	}
}
