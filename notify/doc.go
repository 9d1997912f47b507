// Package notify wakes processes up through PostgreSQL's NOTIFY at no cost to those who publish, and finds out whether
// that works.
//
// A [Sender] coalesces notifications and sends them outside of publishers' transactions. A [Listener] receives them on a
// connection of its own, proves again and again that they really arrive, and polls where they do not: behind a pooler in
// transaction mode LISTEN succeeds and nothing arrives.
//
// # What is promised
//
// Polling is the contract and a notification only a hint. A handler is called at least every poll interval whatever the
// network does, after every new connection with [Resynced], and promptly in between when notifications work. A
// notification can be lost (a sender that dies between a commit and the statement after it, a server crash: nothing of
// NOTIFY is in the WAL), merged with its like, doubled, or carry an empty payload in place of many. So a handler looks at
// the tables: the event only says where.
//
// # One listener for a process
//
// Up to PostgreSQL 18 every notifying commit wakes every listening connection of the database, whatever its channel, so a process has one.
// A channel may have several handlers, each with its own pace. [Listener.Share] gives another part of the program handlers, a state and a Run
// of its own on the same connection; a channel that the server refuses, a slow handler or the end of a Run is the affair of one
// alone. Between the processes of a host nothing is shared but the notes that prove delivery: a connection from process to process would
// have to be proven in its turn, to save a statement each Heartbeat.
//
// # How delivery is proven
//
// A note with a random token is sent through the pool, that is by another session. If it comes back, LISTEN works on this path; it is
// repeated as a heartbeat. [Proven] means that the latest one came in time, for exactly the channels of that listener, and nothing else
// counts. If the connection goes through a pooler (the pid it was given is not the server's), a second connection first finds out whether
// both are served by the same servers; if so nothing is listened on at all, for the LISTEN would stay on a server that belongs to others.
//
// All listeners of a database share their notes, on the channel bounceproof_proof, so that together they send about one each Heartbeat
// however many they are. The note of another listener counts once a statement on the pool has shown that publishers' notes go to the
// server and database where it came from; that statement notifies nobody. So a listener costs the server one short statement each
// Heartbeat, and a backend that is woken once.
//
// PgBouncer that is told to change from session to transaction mode keeps a listening client's server until the next
// message passes: one notification still arrives, then none. The heartbeat notices.
//
// # Limits
//
//   - A sender notices by what its statements take that many connections listen, and sends them less often: see
//     SenderConfig.MaxStretch.
//   - The listener dials with the pool's ConnConfig and BeforeConnect, or with Direct. AfterConnect is not applied.
//   - A pooler in session mode gives the listener a server for itself, and the note needs another one from the pool.
//   - A text that the encoding of the database cannot hold is refused by the server, if the connection says that it sends
//     UTF-8. The payload goes out as an empty one then, or, if it is the channel, the notification is dropped; nothing
//     else is. Where many payloads are refused at once, the other payloads that are not ASCII may become empty ones too.
//   - idle_session_timeout ends a listening session like any other. It is reopened and resynced.
//   - On a standby LISTEN is refused: the handlers are polled.
//   - A queue that was full stays full on PostgreSQL 13 and later, although its slowest reader has caught up, until
//     somebody asks for pg_notification_queue_usage. The sender and the heartbeat do.
package notify
