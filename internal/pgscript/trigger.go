package pgscript

import "github.com/jackc/pgx/v5/pgproto3"

// verdict is what becomes of a connection at a trigger.
type verdict int

const (
	goOn verdict = iota
	omit         // this message
	cut
	stall
)

// Trigger is something that happens once, at a message. Messages count from the moment the trigger is set, over all connections, without
// those that set a connection up or end it.
type Trigger struct {
	b      *Backend
	side   Side
	left   int
	do     verdict
	insert []pgproto3.BackendMessage
	then   func()
	fired  bool
}

// Cut closes a connection in place of the nth message from a side, n counting from 1: a client's message is never seen, a backend's never
// sent, and what went before has had its effect. A loop over every boundary of an operation ends when the cut has not fired.
func (b *Backend) Cut(side Side, n int) *Trigger {
	return b.plan(&Trigger{side: side, left: n, do: cut})
}

// Stall makes a connection silent in place of the nth message from a side: it stays open, and nothing that comes is read or answered until
// the client closes it. then, if not nil, is called at that moment on the backend's goroutine.
func (b *Backend) Stall(side Side, n int, then func()) *Trigger {
	return b.plan(&Trigger{side: side, left: n, do: stall, then: then})
}

// Call calls f before the nth message from a side is read or sent, on the backend's goroutine, and goes on.
func (b *Backend) Call(side Side, n int, f func()) *Trigger {
	return b.plan(&Trigger{side: side, left: n, then: f})
}

// Insert sends messages of any kind before the nth message from the server.
func (b *Backend) Insert(n int, messages ...pgproto3.BackendMessage) *Trigger {
	return b.plan(&Trigger{side: FromServer, left: n, insert: messages})
}

// Replace sends messages of any kind, or none, in place of the nth message from the server. What the backend takes for its state stays.
func (b *Backend) Replace(n int, messages ...pgproto3.BackendMessage) *Trigger {
	return b.plan(&Trigger{side: FromServer, left: n, do: omit, insert: messages})
}

func (b *Backend) plan(t *Trigger) *Trigger {
	if t.left < 1 {
		panic("pgscript: a trigger counts from 1")
	}
	t.b = b
	b.mu.Lock()
	defer b.mu.Unlock()
	b.triggers = append(b.triggers, t)
	return t
}

// Fired reports whether it has happened.
func (t *Trigger) Fired() bool {
	t.b.mu.Lock()
	defer t.b.mu.Unlock()
	return t.fired
}

// at counts a message and says what becomes of it and the connection, and what to send before.
func (b *Backend) at(side Side) (verdict, []pgproto3.BackendMessage) {
	b.mu.Lock()
	out := goOn
	var insert []pgproto3.BackendMessage
	var then []func()
	kept := b.triggers[:0:0]
	for _, t := range b.triggers {
		if t.side == side {
			t.left--
		}
		if t.left > 0 {
			kept = append(kept, t)
			continue
		}
		t.fired = true
		out = max(out, t.do)
		insert = append(insert, t.insert...)
		if t.then != nil {
			then = append(then, t.then)
		}
	}
	b.triggers = kept
	b.mu.Unlock()
	for _, f := range then {
		f()
	}
	return out, insert
}
