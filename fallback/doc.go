// Package fallback answers two questions about the thing that listens at the other end of a connection string:
//
//   - What is it? [Probe] tells a PostgreSQL server from a connection pooler, and a pooler that tracks prepared statements from one
//     that does not, by what it does and never by its version number. The answer is a [Topology].
//   - What does this error mean? [Classify] is a pure function from an error and what the caller knows about the failed request to a
//     [Verdict]: what went wrong, whether anything of the request may stand, whether the connection lives, and what to do next.
//
// An executor asks both by itself; this package is for programs that want to know, or that send statements in their own way. It sends nothing
// but the probe, decides, and its caller acts. Nothing here starts a goroutine that outlives the call.
//
// A Sync group, in what follows, is what a client sends up to a Sync message: the server answers it as a whole, and without BEGIN it is a
// transaction of its own.
//
// The protocol facts come from PgBouncer's source (prepare.c, server.c, client.c, janitor.c, objects.c and proto.c of 1.15 to 1.26),
// from PostgreSQL's (postgres.c, prepare.c, plancache.c and pquery.c of 13 to 18) and from running both; where a fact was only read
// and not run, the place says so.
package fallback
