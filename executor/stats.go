package executor

import "sync/atomic"

// Stats is a snapshot of an executor's counters since New.
type Stats struct {
	// Executions by the way they were sent. Passed went to pgx as they are: simple queries, explicit Exec and Simple modes, COPY.
	Named, Unprepared, Shared, Passed int64
	// Parses is how many Parse messages were sent for executions, Learns how many to learn a text's types.
	Parses, Learns int64
	// Retries is how many statements, batches or transactions were run a second time unseen by the caller.
	Retries int64
	// Misses is how many optimistic Binds of Shared met a server connection without the statement.
	Misses int64
	// Probes is how often the pooler was looked at; Downgrades and Upgrades how often that, or an error, changed the way of sending.
	Probes, Downgrades, Upgrades int64
	// Notifies is how many notifying commits the sender made.
	Notifies int64
}

type counters struct {
	named, unprepared, shared, passed atomic.Int64
	parses, learns                    atomic.Int64
	retries, misses                   atomic.Int64
	probes, downgrades, upgrades      atomic.Int64
}

// Stats returns a snapshot. Safe for concurrent use.
func (ex *Executor) Stats() Stats {
	n := &ex.counters
	return Stats{
		Named: n.named.Load(), Unprepared: n.unprepared.Load(), Shared: n.shared.Load(), Passed: n.passed.Load(),
		Parses: n.parses.Load(), Learns: n.learns.Load(), Retries: n.retries.Load(), Misses: n.misses.Load(),
		Probes: n.probes.Load(), Downgrades: n.downgrades.Load(), Upgrades: n.upgrades.Load(),
		Notifies: ex.sender.Stats().Statements,
	}
}
