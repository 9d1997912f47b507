package notify

import "time"

const (
	// maxQueueBytes bounds what waits, and with it the largest statement. Beyond it every further payload turns its
	// channel's payloads into one empty one.
	maxQueueBytes = 1 << 20
	// maxQueueChannels bounds how many channels can wait at once: the one thing that merging payloads cannot shrink.
	maxQueueChannels = 10_000
)

// note is one notification that waits to be sent. Calls of Notify for the same channel and payload become one note, and
// so do all those of a channel that has too many payloads.
type note struct {
	channel, payload string
	send             bool      // goes to the server; false when a publisher's transaction carried it already
	wake             bool      // wakes this process's subscribers when it goes out, not when it came in
	call             uint64    // number of the oldest call that it stands for
	first, last      time.Time // when the oldest and the latest call came in
}

func (n *note) cost() int { return len(n.channel) + len(n.payload) + 64 }

// join makes n stand for the calls of o too. When the latest call came in must survive every merge: a note of a
// transaction is sent a window after it, and not before.
func (n *note) join(o note) {
	n.send = n.send || o.send
	n.wake = n.wake || o.wake
	n.call = min(n.call, o.call)
	if o.first.Before(n.first) {
		n.first = o.first
	}
	if o.last.After(n.last) {
		n.last = o.last
	}
}

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
		q.notes[i].join(n)
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
		if o.channel == n.channel {
			n.join(o)
		} else {
			q.push(o)
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

// earliest returns when the first call came in of those that wait. The order of the notes does not tell: a note that was
// merged is behind others that came later.
func (q *queue) earliest() time.Time {
	var t time.Time
	for i, n := range q.notes {
		if i == 0 || n.first.Before(t) {
			t = n.first
		}
	}
	return t
}

// reset forgets the notes but not which channels are merged. It leaves the old slice to its holder.
func (q *queue) reset() {
	q.notes = nil
	clear(q.index)
	clear(q.count)
	q.bytes = 0
}
