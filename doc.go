// Package bounceproof is the root of a module that keeps prepared statements, wake-ups and a transactional outbox
// working behind PgBouncer, whatever its version and pool mode. It holds no code itself.
//
// Programs import:
//
//   - [github.com/bounceproof/bounceproof/executor], which makes a pgxpool.Pool or wraps yours;
//   - [github.com/bounceproof/bounceproof/prepare], for the option that marks a statement as stable;
//   - [github.com/bounceproof/bounceproof/outbox], for events that are published with a transaction and delivered after it;
//   - [github.com/bounceproof/bounceproof/notify], for notifications with proof of delivery, or polling;
//   - [github.com/bounceproof/bounceproof/fallback], to ask what kind of pooler is in the way and what an error means.
//
// The command cmd/bounceproof diagnoses a connection, shows a demonstration, and looks after outboxes.
package bounceproof
