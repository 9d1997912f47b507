// Package answer checks that what a server answers is what the protocol allows for what was sent.
//
// pgconn looks for the messages it is interested in and passes over the others, so an answer that belongs to another request, left behind by
// another client of a pooler, is taken for the one that was asked for. A [Checker] stands between pgconn and the socket, reads the headers of
// the messages both ways, and lets through nothing that is out of order: the reader gets an [Error] in its place, and pgconn closes the
// connection as it does after any broken read. It costs no round trip and no allocation.
//
// Silence is an answer that cannot be in one place only: after an error a server waits for nobody before ReadyForQuery, so a minute in which nothing
// comes is the end of the connection. Elsewhere locks, the query itself or a standby may take any time.
//
// What it cannot see is a whole answer of exactly the shape that was asked for: as many columns, the same kind of command. That call gets it. The
// answer too many shows as soon as a request of another shape follows; behind a pooler that forwards names, a request after an error has
// another shape on purpose.
package answer
