package notify_test

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/notify"
)

// A publisher commits, then notifies: soon, together with others, and without waiting.
func ExampleSender() {
	publish := func(ctx context.Context, pool *pgxpool.Pool, sender *notify.Sender) error {
		if _, err := pool.Exec(ctx, `update users set email = $1 where id = $2`, "a@example.com", 42); err != nil {
			return err
		}
		return sender.Notify("cache", "users:42")
	}
	_ = publish
}

// A subscriber looks when it is notified, when it may have missed something, and now and then. Behind a pooler in
// transaction mode Direct leads past it; without Direct, it is polled.
func ExampleListener() {
	subscribe := func(ctx context.Context, pool *pgxpool.Pool, direct string) error {
		l, err := notify.NewListener(pool, notify.ListenerConfig{Direct: direct})
		if err != nil {
			return err
		}
		l.Handle("cache", notify.HandlerFunc(func(_ context.Context, e notify.Event) {
			if e.Payload == "" { // Polled, Resynced, or too much at once
				fmt.Println("forget everything")
				return
			}
			fmt.Println("forget", e.Payload)
		}))
		return l.Run(ctx)
	}
	_ = subscribe
}

func ExampleCheckPayload() {
	fmt.Println(notify.CheckPayload("cache", "users:42"))
	fmt.Println(notify.CheckChannel(""))
	// Output:
	// <nil>
	// notify: channel is empty (channel "", 0 bytes, at most 63)
}
