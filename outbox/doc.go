// Package outbox is a transactional outbox: events that a transaction publishes are delivered if, and only if, it commits.
//
//	store, err := outbox.New(ex, outbox.Config{})
//	err = store.Migrate(ctx)
//	err = ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
//		// … the business's own statements …
//		return store.Publish(ctx, tx, outbox.Event{Type: "order.paid", Key: "7", Payload: body})
//	})
//	sub, err := store.Subscribe(ctx, "mailer", outbox.SubscriptionConfig{Start: outbox.StartEarliest()})
//	d, err := outbox.NewDispatcher(sub, outbox.HandlerFunc(send), outbox.DispatcherConfig{})
//	err = d.Run(ctx)
//
// It is an append-only log read by snapshots, not a queue of rows that are locked, updated and deleted. Publishing is one insert
// that rides with COMMIT. Dispatchers append ticks, points in time between which a batch of events lies; a batch is what is visible in
// the later tick's snapshot and not in the earlier one's, so a transaction that takes long delays nobody, and one that aborts is never
// seen. Subscriptions are places in the log: another reader, or a replay, costs nothing.
//
// A program that has no rows to write with its events calls [Store.PublishNow]; concurrent calls share a commit.
//
// # Guarantees
//
//   - A committed event is delivered at least once to every subscription; an aborted one never.
//   - Events of one key are delivered in the order in which their transactions committed.
//   - A dispatcher that dies leaves its lanes to the others after its lease; at most one page per lane is delivered again, and what was
//     retried beside it.
//   - A dispatcher that was thought dead and comes back records nothing.
//   - What a handler with a transaction does in it happens once.
//
// # Handlers
//
// A [Handler] is an interface of one method. A [BatchHandler] gets pages, a [TxHandler] a transaction that also records the delivery, a
// [BatchTxHandler] both; functions of each kind have an adapter. [Middleware] stands around the calls of all kinds:
//
//	logged := func(ctx context.Context, ds []outbox.Delivery, next func(context.Context) error) error {
//		err := next(ctx)
//		slog.InfoContext(ctx, "handled", "events", len(ds), "error", err)
//		return err
//	}
//	d, err := outbox.NewDispatcher(sub, h, outbox.DispatcherConfig{Middleware: []outbox.Middleware{logged}})
//
// # Behind a pooler
//
// All statements are qualified by the schema and leave no session state, so the outbox works in every pool mode. Behind a pooler in
// statement mode publishing works where a transaction does nothing else, and dispatchers work except with transactional handlers, for
// each of their transactions is one request; Migrate, Subscribe and the decisions of people (Retry, Replay and so on) need transaction
// mode or a direct connection.
//
// # Wake-ups
//
// A dispatcher learns of its own process's events at once and of others' at its next poll, or sooner by way of a [notify.Listener]. A process
// needs one, for all its dispatchers and whatever else listens: several handlers of a channel are each woken, and Share gives another part of
// the program handlers, a state and a Run of its own on the same connection.
//
//	l, err := notify.NewListener(pool, notify.ListenerConfig{Sender: ex.Sender()})
//	mails, err := outbox.NewDispatcher(mailer, sendMail, outbox.DispatcherConfig{Proven: l.Healthy})
//	books, err := outbox.NewDispatcher(ledger, book, outbox.DispatcherConfig{Proven: l.Healthy})
//	l.Handle(store.Channel(), mails)
//	l.Handle(store.Channel(), books)
//	go l.Run(ctx)
//
// [notify.Listener]: https://pkg.go.dev/github.com/bounceproof/bounceproof/notify#Listener
package outbox
