package outbox

import (
	"fmt"
	"strings"
	"testing"
)

// rules are what keeps a dispatcher's memory and the database apart after a failover. The model removes each in turn.
type rules struct {
	tickTime      bool // a page names its ticks by id and time
	rowNumber     bool // a record compares the number of the row
	heartbeat     bool // a heartbeat compares the number of the newest row
	tokenByChance bool // a token is never issued again
}

// The model: one lane and its log, in every order of steps and with a failover to every prefix of what was committed. An event has an identity
// that is not issued again, and a number that is; so have ticks.
//
// A step is what one statement does. States are compared by their text, so that the search ends.
type modelState struct {
	db        modelDB
	history   []modelDB // one for each commit since the last failover: what it may fall back to
	workers   [2]worker
	delivered uint16 // by event
	events    int    // how many identities were issued
	ticks     int
	tokens    int
	fails     int // failovers that are left
}

type modelDB struct {
	events []uint8 // identities in order of their numbers: a number is a place here
	ticks  []modelTick
	row    modelRow
	token  int // of the lease
	owner  int
	failed string // identities of events that wait outside the log, in order: a byte each
}

type modelTick struct{ identity, tip int }

type modelRow struct{ n, from, token int } // from is a tick's id: a place in ticks

type worker struct {
	holds   bool
	token   int
	n       int
	row     int // from, as the row had it
	from    int // id of the tick
	fromID  int // its identity
	waiting string
	page    string // identities with the handler
	again   string // retries with the handler
	to      int
	toID    int
	busy    bool
}

func (s *modelState) key() string {
	b := make([]byte, 0, 256)
	b = s.db.append(b)
	for i := range s.workers {
		w := &s.workers[i]
		b = append(b, byte(w.token), byte(w.n), byte(w.row), byte(w.from), byte(w.fromID), byte(w.to), byte(w.toID))
		if w.holds {
			b = append(b, 'h')
		}
		if w.busy {
			b = append(b, 'b')
		}
		b = append(append(append(b, w.waiting...), '/'), w.page...)
		b = append(append(append(b, '/'), w.again...), '/')
	}
	b = append(b, byte(s.delivered), byte(s.events), byte(s.ticks), byte(s.tokens), byte(s.fails))
	for i := range s.history {
		b = s.history[i].append(append(b, '|'))
	}
	return string(b)
}

func (d *modelDB) append(b []byte) []byte {
	b = append(append(b, d.events...), '.')
	for _, t := range d.ticks {
		b = append(b, byte(t.identity), byte(t.tip))
	}
	b = append(b, '.', byte(d.row.n), byte(d.row.from), byte(d.row.token), byte(d.token), byte(d.owner))
	return append(b, d.failed...)
}

func (s *modelState) clone() *modelState {
	c := *s
	c.db = s.db.clone()
	c.history = append([]modelDB(nil), s.history...)
	return &c
}

func (d *modelDB) clone() modelDB {
	c := *d
	c.events = append([]uint8(nil), d.events...)
	c.ticks = append([]modelTick(nil), d.ticks...)
	return c
}

// commit changes the database.
func (s *modelState) commit(f func(*modelDB)) {
	s.history = append(s.history, s.db.clone())
	f(&s.db)
}

// How far the model goes. Two failovers, and one event of another lane.
const maxModelEvents, maxModelTicks, maxModelRows = 2, 3, 3

// steps returns the states that one step leads to.
func (s *modelState) steps(r rules, workers int) (next []*modelState) {
	add := func(f func(*modelState) bool) {
		if c := s.clone(); f(c) {
			next = append(next, c)
		}
	}
	add(func(c *modelState) bool {
		if c.events == maxModelEvents {
			return false
		}
		c.publish()
		return true
	})
	add(func(c *modelState) bool { return c.ticks < maxModelTicks && c.tick() })
	if s.fails > 0 {
		for i := range s.history {
			add(func(c *modelState) bool {
				c.db, c.history = c.history[i].clone(), nil
				c.fails--
				return true
			})
		}
	}
	add(func(c *modelState) bool { // of another lane: the tip moves, and here is nothing
		if len(c.db.events) > 0 {
			return false
		}
		c.commit(func(d *modelDB) { d.events = append(d.events, 0) })
		return true
	})
	for i := range workers {
		add(func(c *modelState) bool { return c.tokens < 3 && c.claim(i, r) })
		add(func(c *modelState) bool { return c.heartbeat(i, r) })
		add(func(c *modelState) bool { return c.read(i, r) })
		add(func(c *modelState) bool { return c.db.row.n < maxModelRows && c.finish(i, r, false) })
		add(func(c *modelState) bool { return c.db.row.n < maxModelRows && c.finish(i, r, true) })
	}
	return next
}

func (s *modelState) publish() {
	s.events++
	id := uint8(s.events)
	s.commit(func(d *modelDB) { d.events = append(d.events, id) })
}

func (s *modelState) tick() bool {
	last := s.db.ticks[len(s.db.ticks)-1]
	if last.tip == len(s.db.events) {
		return false
	}
	s.ticks++
	s.commit(func(d *modelDB) { d.ticks = append(d.ticks, modelTick{s.ticks, len(d.events)}) })
	return true
}

// claim takes the lane over, as from an owner that died, and adopts its row.
func (s *modelState) claim(i int, r rules) bool {
	w := &s.workers[i]
	if s.db.owner == i+1 && w.holds {
		return false
	}
	s.tokens++
	token := s.db.token + 1
	if r.tokenByChance {
		token = 10 + s.tokens
	}
	s.commit(func(d *modelDB) {
		d.token, d.owner = token, i+1
		d.row = modelRow{d.row.n + 1, d.row.from, token}
	})
	*w = worker{holds: true, token: token}
	s.adopt(w)
	return true
}

func (s *modelState) adopt(w *worker) {
	w.n, w.row, w.from, w.fromID = s.db.row.n, s.db.row.from, s.db.row.from, s.db.ticks[s.db.row.from].identity
	w.waiting = s.db.failed
	w.busy, w.page, w.again = false, "", ""
}

func (s *modelState) heartbeat(i int, r rules) bool {
	w := &s.workers[i]
	switch {
	case !w.holds:
		return false
	case s.db.owner != i+1 || s.db.token != w.token:
		*w = worker{}
	case r.heartbeat && !w.busy && w.n != s.db.row.n:
		s.adopt(w)
	default:
		return false
	}
	return true
}

// read reads a page and what waits. An empty batch is passed over in memory.
func (s *modelState) read(i int, r rules) bool {
	w := &s.workers[i]
	if !w.holds || w.busy {
		return false
	}
	last := len(s.db.ticks) - 1
	if w.from > last || r.tickTime && s.db.ticks[w.from].identity != w.fromID {
		if !r.tickTime { // an id that is not there is taken for the newest
			return false
		}
		if s.db.owner != i+1 || s.db.token != w.token {
			return false // the heartbeat will tell
		}
		s.adopt(w)
		return true
	}
	page := ""
	for at := s.db.ticks[w.from].tip; at < s.db.ticks[last].tip; at++ {
		if e := s.db.events[at]; e > 0 {
			page += string(rune('0' + e))
		}
	}
	again := ""
	for _, e := range w.waiting {
		if strings.ContainsRune(s.db.failed, e) {
			again += string(e)
		}
	}
	if w.from == last && again == "" {
		return false
	}
	w.busy, w.page, w.again, w.to, w.toID = true, page, again, last, s.db.ticks[last].identity
	if page == "" && again == "" { // passed over
		w.busy, w.from, w.fromID = false, last, w.toID
	}
	return true
}

// finish records what was with the handler: all handled, or all failed.
func (s *modelState) finish(i int, r rules, fail bool) bool {
	w := &s.workers[i]
	if !w.busy {
		return false
	}
	if !fail {
		for _, e := range w.page + w.again {
			s.delivered |= 1 << (e - '0')
		}
	}
	row := s.db.row
	same := row.token == w.token && row.from == w.row && (!r.rowNumber || row.n == w.n)
	there := w.to < len(s.db.ticks) && s.db.ticks[w.to].identity == w.toID
	if !same || !there { // refused: the lane reads its row again, if it still has it
		if s.db.owner == i+1 && s.db.token == w.token {
			s.adopt(w)
		} else {
			*w = worker{}
		}
		return true
	}
	s.commit(func(d *modelDB) {
		d.row = modelRow{row.n + 1, w.to, w.token}
		if fail {
			d.failed += w.page
			return
		}
		for _, e := range w.again {
			d.failed = strings.ReplaceAll(d.failed, string(e), "")
		}
	})
	if fail {
		w.waiting += w.page
	} else {
		for _, e := range w.again {
			w.waiting = strings.ReplaceAll(w.waiting, string(e), "")
		}
	}
	w.n, w.row, w.from, w.fromID, w.busy, w.page, w.again = s.db.row.n, w.to, w.to, w.toID, false, "", ""
	return true
}

// lost says what is not delivered although everything works from here on: an event of the database that nobody gets, or one that waits for ever.
func (s *modelState) lost(r rules) string {
	c := s.clone()
	c.fails = 0
	if !c.workers[0].holds && !c.workers[1].holds {
		c.claim(0, r)
	}
	c.tick()
	for range 12 {
		for i := range c.workers {
			c.heartbeat(i, r)
			c.read(i, r)
			c.finish(i, r, false)
		}
		if c.db.owner == 0 || !c.workers[c.db.owner-1].holds {
			c.claim(0, r) // its lease runs out
		}
	}
	for _, e := range c.db.events {
		if e > 0 && c.delivered&(1<<e) == 0 {
			return fmt.Sprintf("event %d is not delivered", e)
		}
	}
	if c.db.failed != "" {
		return "a failed event waits for ever: " + c.db.failed
	}
	return ""
}

// explore searches all states, and returns the first loss.
func explore(r rules, workers, limit int) (loss string, states int) {
	first := &modelState{db: modelDB{ticks: []modelTick{{0, 0}}}, fails: 2}
	seen := map[string]bool{first.key(): true}
	for queue := []*modelState{first}; len(queue) > 0 && len(seen) < limit; {
		s := queue[0]
		queue = queue[1:]
		if loss := s.lost(r); loss != "" {
			return loss, len(seen)
		}
		for _, n := range s.steps(r, workers) {
			if k := n.key(); !seen[k] {
				seen[k] = true
				queue = append(queue, n)
			}
		}
	}
	return "", len(seen)
}

// One dispatcher is searched to the end, two as far as patience goes.
func TestTheModelOfFailoversNeedsEachRule(t *testing.T) {
	t.Parallel()
	all := rules{tickTime: true, rowNumber: true, heartbeat: true, tokenByChance: true}
	const end = 1_000_000
	loss, states := explore(all, 1, end)
	if loss != "" || states >= end {
		t.Errorf("with all rules: %q after %d states", loss, states)
	}
	t.Logf("all rules: %d states", states)
	for name, without := range map[string]rules{
		"pages by id alone":                 {rowNumber: true, heartbeat: true, tokenByChance: true},
		"records without the row's number":  {tickTime: true, heartbeat: true, tokenByChance: true},
		"heartbeats that compare no number": {tickTime: true, rowNumber: true, tokenByChance: true},
	} {
		loss, states := explore(without, 1, end)
		if loss == "" {
			t.Errorf("%s: nothing is lost in %d states: the rule is not needed, or the model is blind", name, states)
		}
		t.Logf("%s: %s, found after %d states", name, loss, states)
	}
	// Tokens that count lose nothing here. By chance they also keep a former owner from recording under a successor's token.
	for _, r := range []rules{all, {tickTime: true, rowNumber: true, heartbeat: true}} {
		if loss, states := explore(r, 2, 60_000); loss != "" {
			t.Errorf("two dispatchers: %s after %d states", loss, states)
		}
	}
}
