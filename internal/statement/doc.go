// Package statement is the machinery of prepared statements: which texts are stable, what the server said about them, which names a
// connection has parsed, and how one execution is put on the wire.
//
// It works on pgx connections and knows nothing of pools, of poolers or of what an error means; its caller chooses a strategy for each
// execution and judges the outcome.
//
// A statement passes the package in this order: [Catalog.Lookup] (text → [Statement]), [Statement.Learn] (once an executor),
// [Attach] (the connection's registry), [Conn.Run] for a single statement or a [Group] for several in one round trip.
package statement
