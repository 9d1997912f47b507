package notify

import (
	"slices"
	"time"
)

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

	gone   bool // of a queue: it was merged or taken
	before int  // of a queue: where the channel's note before it is, -1 for none
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
// Whatever waits, adding a note takes constant time on average: a note is looked at again only to leave. The queue has no lock: the Sender that
// owns it has.
type queue struct {
	perChannel int // distinct payloads a channel may have

	notes    []note // some of them gone
	gone     int
	index    map[noteKey]int    // position in notes
	channels map[string]channel // those that have notes
	merged   map[string]bool    // channels that outgrew their bound
	bytes    int
}

// channel is what a queue has of one.
type channel struct{ count, last int } // how many notes, and where the last one is

func newQueue(perChannel int) queue {
	q := queue{perChannel: perChannel, merged: make(map[string]bool)}
	q.reset()
	return q
}

func (q *queue) len() int { return len(q.notes) - q.gone }

// all goes through the notes in order.
func (q *queue) all(yield func(*note) bool) {
	for i := range q.notes {
		if !q.notes[i].gone && !yield(&q.notes[i]) {
			return
		}
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
	count := q.channels[n.channel].count
	switch {
	case count == 0 && len(q.channels) >= maxQueueChannels:
		return addedDropped
	case n.payload != "" && (count >= q.perChannel || q.bytes+n.cost() > maxQueueBytes):
		q.merge(n)
		return addedCollapsed
	}
	q.push(n)
	return addedNew
}

func (q *queue) push(n note) {
	if q.gone > len(q.notes)/2 {
		q.compact()
	}
	c, ok := q.channels[n.channel]
	n.gone, n.before = false, -1
	if ok {
		n.before = c.last
	}
	i := len(q.notes)
	q.index[noteKey{n.channel, n.payload}] = i
	q.channels[n.channel] = channel{c.count + 1, i}
	q.notes = append(q.notes, n)
	q.bytes += n.cost()
}

// remove takes out the note at i. What is kept of its channel is for the caller.
func (q *queue) remove(i int) {
	n := &q.notes[i]
	delete(q.index, noteKey{n.channel, n.payload})
	q.bytes -= n.cost()
	n.gone = true
	q.gone++
}

// merge makes one empty payload of n and all payloads of its channel, at the end of the queue.
func (q *queue) merge(n note) {
	if c, ok := q.channels[n.channel]; ok {
		for i := c.last; i >= 0; i = q.notes[i].before {
			n.join(q.notes[i])
			q.remove(i)
		}
		delete(q.channels, n.channel)
	}
	n.payload = ""
	q.push(n)
	q.merged[n.channel] = true
}

// compact forgets what is gone.
func (q *queue) compact() {
	old := q.notes
	q.reset()
	for _, n := range old {
		if !n.gone {
			q.push(n)
		}
	}
}

// take returns all notes, in order, and empties the queue.
func (q *queue) take() []note {
	notes := q.notes
	if q.gone > 0 {
		notes = slices.DeleteFunc(notes, func(n note) bool { return n.gone })
	}
	q.reset()
	q.merged = emptied(q.merged)
	return notes
}

// earliest returns when the first call came in of those that wait. The order of the notes does not tell: a note that was
// merged is behind others that came later.
func (q *queue) earliest() time.Time {
	var t time.Time
	for n := range q.all {
		if t.IsZero() || n.first.Before(t) {
			t = n.first
		}
	}
	return t
}

// reset forgets the notes but not which channels are merged. It leaves the old slice to its holder.
func (q *queue) reset() {
	q.notes, q.gone, q.bytes = nil, 0, 0
	q.index, q.channels = emptied(q.index), emptied(q.channels)
}

// emptied is an empty map, the same one unless it is so large that to clear it again and again would cost more than what it holds.
func emptied[K comparable, V any](m map[K]V) map[K]V {
	const large = 256
	if m == nil || len(m) > large {
		return make(map[K]V)
	}
	clear(m)
	return m
}
