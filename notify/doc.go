// Package notify wakes processes up through PostgreSQL's NOTIFY at no cost to those who publish, and never lies about
// whether that works.
//
// A [Sender] coalesces notifications and sends them outside of publishers' transactions. A [Listener] receives them on a
// connection of its own, proves again and again that they really arrive, and polls where they do not: behind a pooler in
// transaction mode LISTEN succeeds and then stays silent.
//
// # What is promised
//
// Polling is the contract and a notification only a hint. A handler is called at least every poll interval whatever the
// network does, after every new connection with [Resynced], and promptly in between when notifications work. A
// notification can be lost (a sender that dies between a commit and the statement after it, a server crash: nothing of
// NOTIFY is in the WAL), merged with its like, doubled, or carry an empty payload in place of many. So a handler looks at
// the tables: the event only says where.
package notify
