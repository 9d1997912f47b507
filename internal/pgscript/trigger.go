package pgscript

// verdict is what becomes of a connection at a trigger.
type verdict int

const (
	goOn verdict = iota
	cut
	stall
)

// Trigger is something that happens once, at a message. Messages count from the moment the trigger is set, over all connections, without
// those that set a connection up or end it.
type Trigger struct {
	b     *Backend
	side  Side
	left  int
	do    verdict
	then  func()
	fired bool
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

// at counts a message and says what becomes of the connection.
func (b *Backend) at(side Side) verdict {
	b.mu.Lock()
	out := goOn
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
		if t.then != nil {
			then = append(then, t.then)
		}
	}
	b.triggers = kept
	b.mu.Unlock()
	for _, f := range then {
		f()
	}
	return out
}
