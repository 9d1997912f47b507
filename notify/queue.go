package notify

import "time"

const (
	// maxQueueBytes bounds what waits, and with it the largest statement. Beyond it every further payload turns its
	// channel's payloads into one empty one.
	maxQueueBytes = 1 << 20
	// maxQueueChannels bounds how many channels can wait at once: the one thing that merging payloads cannot shrink.
	maxQueueChannels = 10_000
)

// note is one notification that waits to be sent.
type note struct {
	channel, payload string
	send             bool      // goes to the server; false when it already rode in a transaction
	wake             bool      // wakes this process's subscribers when it goes out, not when it came in
	at               time.Time // when it came in, first
	again            time.Time // when it came in last, if more than once
}

func (n *note) cost() int { return len(n.channel) + len(n.payload) + 64 }

// added says what became of a note.
type added int8

const (
	addedNew       added = iota // it waits
	addedMerged                 // the same one was waiting already
	addedCollapsed              // its channel was full, all its payloads became one empty payload
	addedDropped                // more channels wait than are allowed
)

type noteKey struct{ channel, payload string }

// queue is a bounded set of notes in order of arrival. A channel that outgrows its bound keeps the wake-up and loses the
// detail: its payloads become one empty payload, which every reader takes as "anything may have changed".
//
// It has no lock: the Sender that owns it has.
type queue struct {
	perChannel int // distinct payloads a channel may have

	notes  []note
	index  map[noteKey]int // position in notes
	count  map[string]int  // notes of a channel
	merged map[string]bool // channels that outgrew their bound
	bytes  int
}

func newQueue(perChannel int) queue {
	return queue{
		perChannel: perChannel,
		index:      make(map[noteKey]int), count: make(map[string]int), merged: make(map[string]bool),
	}
}

func (q *queue) add(n note) added {
	if q.merged[n.channel] {
		n.payload = ""
	}
	if i, ok := q.index[noteKey{n.channel, n.payload}]; ok {
		old := &q.notes[i]
		old.send = old.send || n.send
		old.wake = old.wake || n.wake
		old.again = n.at
		return addedMerged
	}
	count := q.count[n.channel]
	switch {
	case count == 0 && len(q.count) >= maxQueueChannels:
		return addedDropped
	case n.payload != "" && (count >= q.perChannel || q.bytes+n.cost() > maxQueueBytes):
		q.merge(n)
		return addedCollapsed
	}
	q.push(n)
	return addedNew
}

func (q *queue) push(n note) {
	q.index[noteKey{n.channel, n.payload}] = len(q.notes)
	q.notes = append(q.notes, n)
	q.count[n.channel]++
	q.bytes += n.cost()
}

// merge makes one empty payload of n and all payloads of its channel, at the end of the queue.
func (q *queue) merge(n note) {
	old := q.notes
	q.reset()
	for _, o := range old {
		if o.channel != n.channel {
			q.push(o)
			continue
		}
		n.send = n.send || o.send
		n.wake = n.wake || o.wake
		n.again = n.at
		if o.at.Before(n.at) {
			n.at = o.at
		}
	}
	n.payload = ""
	q.push(n)
	q.merged[n.channel] = true
}

// take returns all notes, in order, and empties the queue.
func (q *queue) take() []note {
	notes := q.notes
	q.reset()
	clear(q.merged)
	return notes
}

// reset forgets the notes but not which channels are merged. It leaves the old slice to its holder.
func (q *queue) reset() {
	q.notes = nil
	clear(q.index)
	clear(q.count)
	q.bytes = 0
}
