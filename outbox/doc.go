// Package outbox is a transactional outbox: events that a transaction publishes are delivered if, and only if, it commits.
//
// It is an append-only log read by snapshots, not a queue of rows that are locked, updated and deleted. Publishing is one insert.
// Dispatchers append ticks, points in time between which a batch of events lies; a batch is what is visible in the later
// tick's snapshot and not in the earlier one's, so a transaction that takes long delays nobody, and one that aborts is never
// seen. Subscriptions are places in the log: another reader, or a replay, costs nothing.
//
// # Guarantees
//
//   - A committed event is delivered at least once to every subscription; an aborted one never.
//   - Events of one key are delivered in the order in which their transactions committed.
//   - A dispatcher that dies leaves its lanes to the others after its lease; at most one page per lane is delivered again.
//   - A dispatcher that was thought dead and comes back records nothing.
//
// All statements are qualified by the schema, leave no session state, and work behind a pooler in transaction mode.
package outbox
