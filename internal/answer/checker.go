package answer

import (
	"encoding/binary"
	"io"
	"sync"
	"time"
)

// afterError is how long a server may take from an error to ReadyForQuery. It waits for nobody then: it gives up what the request held. Everywhere else
// an answer may take as long as locks, the query or a standby take, and only the caller's context ends the wait.
const afterError = time.Minute

// Checker follows one connection. Put its streams between the socket and pgproto3, see [Checker.Wrap]. Its methods are safe for concurrent use,
// as a COPY writes and reads at the same time.
type Checker struct {
	// Broken, if it is not nil, is called once, at the first answer that is out of order, on the goroutine that reads. It is to close the
	// socket: pgconn would first wait for what else comes.
	Broken func()

	// LooseClose lets a CloseComplete through that comes before its turn in its Sync group, as from Pgpool-II; Reordered then says so.
	LooseClose bool

	mu       sync.Mutex // guards what follows
	sent     frames
	received frames
	queue    []awaited // what is to be answered, from head on
	head     int
	hints    []Hint // for the Executes that are about to be sent, from nextHint on
	nextHint int
	columns  int  // of the portal that was described last, anyColumns if it was not
	executes bool // something since the last ReadyForQuery executes
	copyEnd  byte // how the client has ended its COPY data: the type of CopyDone or CopyFail, 0 if it has not
	skipping bool // after an error, up to the answer to Sync
	early    bool // a CloseComplete came before its turn
	failed   bool // there was an error since Failed was asked last
	off      bool // replication, which has rules of its own
	err      *Error
}

// Hint says what is known beforehand of the answer to one Execute, or to a simple query of one statement.
type Hint struct {
	// Verb is the first word of the command tag; "" is any, and of a simple query any number of results. Instead of COMMIT, ROLLBACK may come too.
	Verb string
	// Columns is how many columns rows have where the request has no Describe; 0 is any.
	Columns int
	// CopyIn says that it is a COPY that takes data from the client.
	CopyIn bool
}

// copying is the verb of COPY, which has answers of its own.
const copying = "COPY"

// Numbers of columns that are none.
const (
	anyColumns = -1 - iota // nobody has described the result
	noColumns              // there are no rows, as NoData says
	malformed
)

// request is what a client's message asks for.
type request byte

const (
	parse request = iota
	bind
	describeStatement
	describePortal
	execute
	closing
	syncing
	query
	function
)

// awaited is an answer that has not come to its end.
type awaited struct {
	request request
	stage   stage
	hint    Hint
	limited bool // an Execute that may be suspended
	first   bool // nothing in front of it is in its Sync group
	rows    uint64
}

// stage is how far an answer has come.
type stage byte

const (
	atStart     stage = iota
	inRows            // or, of a simple query, before the first
	inCopyIn          // the server takes data
	inCopyOut         // the server sends data
	afterCopy         // it has sent all
	answeredOne       // a simple query has had a result
	described         // parameters have come, columns are next
)

// Wrap returns streams that check what passes. r and w are those of the connection.
func (c *Checker) Wrap(r io.Reader, w io.Writer) (io.Reader, io.Writer) {
	return &reader{c: c, r: r}, &writer{c: c, w: w}
}

type reader struct {
	c *Checker
	r io.Reader
}

// Read lets through what is in order, and nothing behind what is not.
func (r *reader) Read(p []byte) (int, error) {
	failing, err := r.c.failing()
	if err != nil {
		return 0, err
	}
	var n int
	if failing {
		n, err = r.readSoon(p)
	} else {
		n, err = r.r.Read(p)
	}
	if good := r.c.answers(p[:n]); good < n {
		if r.c.Broken != nil {
			r.c.Broken()
		}
		if good == 0 {
			return 0, r.c.Err()
		}
		return good, nil // the next call says why it ends here
	}
	return n, err
}

// readSoon is a read of what must come within afterError. Only time in which somebody reads counts.
func (r *reader) readSoon(p []byte) (int, error) {
	timer := time.AfterFunc(afterError, r.c.silent)
	defer timer.Stop()
	n, err := r.r.Read(p)
	if silent := r.c.Err(); silent != nil {
		return 0, silent
	}
	return n, err
}

type writer struct {
	c *Checker
	w io.Writer
}

// Write notes what is asked for before it is sent: the answer may be there before Write returns. Nothing is sent on a connection that has had an
// answer out of order.
func (w *writer) Write(p []byte) (int, error) {
	if err := w.c.asks(p); err != nil {
		return 0, err
	}
	return w.w.Write(p)
}

// Err returns the answer that was out of order, if there was one. It is an *[Error].
func (c *Checker) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err == nil {
		return nil // and not a nil *Error
	}
	return c.err
}

// failing reports whether the server has sent an error, and owes nothing but ReadyForQuery.
func (c *Checker) failing() (bool, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return false, c.err
	}
	return c.skipping && c.head < len(c.queue) && c.Broken != nil, nil
}

// silent is the end of a connection that says nothing more.
func (c *Checker) silent() {
	c.mu.Lock()
	c.err = &Error{Expected: name('Z'), Got: "nothing within a minute of an error", Executes: c.executes}
	c.mu.Unlock()
	c.Broken()
}

// Failed reports whether the server has sent an error since it was asked last.
func (c *Checker) Failed() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	failed := c.failed
	c.failed = false
	return failed
}

// Expect says what is known of the answer to the next Execute of which nothing is known yet. Without a hint any tag is right.
func (c *Checker) Expect(h Hint) {
	c.mu.Lock()
	c.hints = append(c.hints, h)
	c.mu.Unlock()
}

// ForgetHints takes back what was said about Executes that have not been sent.
func (c *Checker) ForgetHints() {
	c.mu.Lock()
	c.hints, c.nextHint = c.hints[:0], 0
	c.mu.Unlock()
}

// asks notes what a client sends.
func (c *Checker) asks(p []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return c.err
	}
	for len(p) > 0 && !c.off {
		n, typ := c.sent.next(p)
		p = p[n:]
		if typ != 0 {
			c.ask(typ, c.sent.body())
		}
	}
	return nil
}

func (c *Checker) ask(typ byte, body []byte) {
	a := awaited{}
	switch typ {
	case 'P':
		a.request = parse
	case 'B':
		a.request = bind
	case 'D':
		a.request = describeStatement
		if len(body) > 0 && body[0] == 'P' {
			a.request = describePortal
		}
	case 'E':
		a.request = execute
		// The portal's name, then how many rows it may have, 0 for all.
		a.limited = len(body) < 5 || !c.sent.whole() || binary.BigEndian.Uint32(body[len(body)-4:]) != 0
		a.hint, c.executes = c.hint(), true
	case 'C':
		a.request = closing
	case 'S':
		a.request = syncing
	case 'Q':
		a.request, a.hint, c.executes, c.copyEnd = query, c.hint(), true, 0
	case 'F':
		a.request, c.executes = function, true
	case 'c', 'f':
		c.copyEnd = typ
		return
	default: // Flush, CopyData, Terminate
		return
	}
	if c.skipping && c.head == len(c.queue) && a.request != syncing {
		return // the server passes over it
	}
	if c.head == len(c.queue) {
		c.queue, c.head = c.queue[:0], 0
	}
	a.first = c.head == len(c.queue) || c.queue[len(c.queue)-1].request == syncing
	c.queue = append(c.queue, a)
}

// hint takes the next one, if there is one.
func (c *Checker) hint() (h Hint) {
	if c.nextHint < len(c.hints) {
		h = c.hints[c.nextHint]
		c.nextHint++
	}
	return h
}

// answers follows what a server sends, and returns how much of it is in order.
func (c *Checker) answers(p []byte) (good int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return 0
	}
	for at := 0; at < len(p); {
		if c.off {
			return len(p)
		}
		started := c.received.nheader == 0 // and perhaps in the rest of the message before
		rest := min(c.received.left, len(p)-at)
		n, typ := c.received.next(p[at:])
		if typ != 0 {
			if expected, got := c.answer(typ, c.received.body()); expected != "" {
				c.err = &Error{Expected: expected, Got: got, Executes: c.executes}
				if !started {
					return good
				}
				return at + rest
			}
		}
		if started {
			good = at + rest
		}
		at += n
		if typ != 0 {
			good = at
		}
	}
	return len(p)
}

// answer judges a message. It returns what was expected if that is not what came.
func (c *Checker) answer(typ byte, body []byte) (expected, got string) {
	switch typ {
	case 'N', 'S', 'A': // notices, settings and notifications come at any time
		return "", ""
	case 'W': // CopyBothResponse
		c.off = true
		return "", ""
	}
	if c.head == len(c.queue) {
		if typ == 'E' && (c.skipping || isFatal(body)) {
			return "", "" // the server says goodbye
		}
		return "no answer", name(typ)
	}
	a := &c.queue[c.head]
	if typ == 'E' {
		if c.skipping && !isFatal(body) {
			return name('Z'), name('E')
		}
		if a.request == closing && a.first && isServers(body) && !isFatal(body) {
			return name('3'), name('E') // a Close cannot fail, and no time limit of a statement is running
		}
		c.fail(a)
		return "", ""
	}
	if c.skipping && a.request != syncing && a.request != query && a.request != function {
		return name('Z'), name(typ)
	}
	if typ == '3' && a.request != closing && c.LooseClose && c.closeEarly() {
		return "", ""
	}
	return c.inOrder(a, typ, body)
}

// closeEarly takes the next Close of the present Sync group for answered. It reports whether there is one.
func (c *Checker) closeEarly() bool {
	for i := c.head; i < len(c.queue) && c.queue[i].request != syncing; i++ {
		if c.queue[i].request == closing {
			c.queue = append(c.queue[:i], c.queue[i+1:]...)
			c.early = true
			return true
		}
	}
	return false
}

// Reordered reports whether a CloseComplete came before its turn.
func (c *Checker) Reordered() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.early
}

// fail notes an error: the server passes over everything up to Sync.
func (c *Checker) fail(a *awaited) {
	c.skipping, c.failed = true, true
	if a.request == query || a.request == function {
		return // their ReadyForQuery is next
	}
	for c.head < len(c.queue) && c.queue[c.head].request != syncing {
		c.head++
	}
}
