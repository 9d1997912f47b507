package notify

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"unicode/utf8"

	"github.com/jackc/pgx/v5/pgconn"
)

// A server refuses a statement as a whole when it cannot represent one of its texts (class 22): an encoding without
// that character (22P05), or a text that its encoding makes too long (22023). It does not tell which one. What it may be
// waits in a queue of its own and is sent in groups, which become half as long with every refusal, down to the one note
// that is at fault, and twice as long with every success. Only that note gives up its payload, or, if it is the channel that
// the server refuses, is dropped. Everything else goes by other statements meanwhile.

// maxRefusals is how many statements may be refused before the payloads that are still in doubt become one empty payload
// per channel. It bounds the search where many payloads are at fault; what they announce is announced all the same.
const maxRefusals = 100

// refused is what the server may not take. It has no lock: the Sender that owns it has.
type refused struct {
	queue
	known    bool // the server has refused something
	hadTurn  bool // the last statement was a group of these
	group    int  // how many go together
	refusals int  // since nothing was in doubt
}

// takeGroup removes the notes of the next statement.
func (r *refused) takeGroup() []note {
	r.hadTurn = true
	notes := r.take()
	n := min(max(r.group, 1), len(notes))
	for _, rest := range notes[n:] {
		r.push(rest) // where it was before: there is room
	}
	return notes[:n:n]
}

// accepted is called when the server has taken a group.
func (r *refused) accepted() {
	r.group = min(2*max(r.group, 1), maxQueueChannels)
	if r.len() == 0 {
		r.refusals = 0
	}
}

// mayBeRefused reports whether some encoding lacks a character of n. None lacks those of ASCII.
func (n *note) mayBeRefused() bool { return !isASCII(n.channel) || !isASCII(n.payload) }

func isASCII(s string) bool {
	for i := range len(s) {
		if s[i] >= utf8.RuneSelf {
			return false
		}
	}
	return true
}

// setAsideLocked moves what the server may refuse to a queue of its own, and returns the rest. Caller must hold mu.
func (s *Sender) setAsideLocked(notes []note) (rest []note) {
	for _, n := range notes {
		if n.send && n.mayBeRefused() {
			s.addLocked(&s.refused.queue, n)
		} else {
			rest = append(rest, n)
		}
	}
	return rest
}

// refusedLocked settles a statement that the server refused for good. Caller must hold mu.
func (s *Sender) refusedLocked(b batch, code string, err error) {
	s.stats.Failures++
	s.stats.LastError = err
	s.reachableLocked()
	if !s.refused.known {
		s.refused.known = true
		// Not the error: it quotes the character.
		s.cfg.Logger.LogAttrs(context.Background(), slog.LevelWarn,
			"bounceproof: notify: the server refused a notification, which goes without its payload, or not at all",
			slog.String("sqlstate", code))
	}
	s.refused.refusals++
	rest := b.notes
	if !b.alone {
		if rest = s.setAsideLocked(b.notes); len(rest) < len(b.notes) {
			s.putBackLocked(&s.pending, rest) // hardly at fault, so they are next
			s.refused.hadTurn = true
			s.refused.group = max(1, s.refused.len()/2)
			rest = nil
		}
	}
	switch {
	case len(rest) == 1:
		s.giveUpLocked(rest[0])
	case len(rest) > 1:
		s.putBackLocked(&s.refused.queue, rest)
		s.refused.group = len(rest) / 2
	}
	if s.refused.refusals >= maxRefusals {
		s.refused.refusals = 0
		for _, n := range s.refused.take() {
			if n.payload != "" {
				s.giveUpLocked(n)
			} else {
				s.addLocked(&s.refused.queue, n)
			}
		}
	}
}

// giveUpLocked gives up what is needed of a note: its payload, or the note when it has none. Caller must hold mu.
func (s *Sender) giveUpLocked(n note) {
	if n.payload == "" {
		s.stats.Dropped++
		s.tellWaitersLocked(n, s.stats.LastError)
		return
	}
	n.payload = ""
	q := &s.pending
	if n.mayBeRefused() {
		q = &s.refused.queue
	}
	if s.addLocked(q, n) == addedNew {
		s.stats.Collapsed++
	}
}

// dataException reports class 22, and its SQLSTATE: the server cannot represent a text it was given, and never will.
func dataException(err error) (sqlstate string, ok bool) {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) && strings.HasPrefix(pgErr.Code, "22") {
		return pgErr.Code, true
	}
	return "", false
}
