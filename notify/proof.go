package notify

import (
	"context"
	"crypto/rand"
	"errors"
	"math"
	mathrand "math/rand/v2"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// What a note says, and how one note proves delivery to every listener of the database.
//
// Up to PostgreSQL 18 a notifying commit wakes all listening connections of the database, so notes of each listener for itself cost the
// square of their number. Here all listen on one channel, and whoever's heartbeat is due first sends for all. A note of another listener
// shows only half of what has to be shown: that this connection hears its database. The other half, that publishers' notes go to that
// database too, is asked on their own path, by a statement that wakes nobody (a look). It is the server that compares, so it takes
// no more of a pool than Exec, and no clocks of two machines are compared.

// proofChannel is the one that notes are sent on.
const proofChannel = "bounceproof_proof"

// newProofChannel is a channel for the first note of a connection that goes through a pooler. Should its LISTEN stay behind, on a server
// that is others' by then, nobody will ever send anything there.
func newProofChannel() string { return "bounceproof_" + strings.ToLower(rand.Text()) }

const (
	// Which database of which server process answers, a standby being another one than its primary. No right is needed for it, and as
	// little of the server as can be: each listener asks once a Heartbeat.
	identitySQL = `((pg_catalog.date_part('epoch', pg_catalog.pg_postmaster_start_time()) * 1000000)::bigint || '.' || pg_catalog.current_database())`
	clockSQL    = `(pg_catalog.date_part('epoch', pg_catalog.clock_timestamp()) * 1000000)::bigint`

	// Asking for the usage moves the tail of a queue that is full for no reason any more: see retrySQL.
	usageSQL = ` where pg_catalog.pg_notification_queue_usage() is not null`
	noteSQL  = `select pg_catalog.pg_notify($1, $2::text || ' ' || ` + clockSQL + ` || ' ' || ` + identitySQL + `)` + usageSQL
	// plainSQL is the same where a function that the identity is made of is not allowed: such notes are proofs for their sender only.
	plainSQL = `select pg_catalog.pg_notify($1, $2)` + usageSQL

	// lookSQL has a row if it runs where a note came from, and that is not longer ago than some microseconds by the server's clock.
	lookSQL = `select where ` + identitySQL + ` = $1::text and ` + clockSQL + ` - $2::bigint between 0 and $3::bigint`
)

// stamp is what the server has added to a note.
type stamp struct {
	identity string
	clock    int64 // when it was made, in microseconds of the server's clock
}

// readNote returns a note's token, and false for a note without a stamp.
func readNote(payload string) (token string, st stamp, stamped bool) {
	token, rest, _ := strings.Cut(payload, " ")
	clock, identity, _ := strings.Cut(rest, " ") // in which there may be spaces
	us, err := strconv.ParseInt(clock, 10, 64)
	return token, stamp{identity, us}, err == nil && identity != ""
}

// look is the question whether publishers' notes go where this connection hears from.
type look struct {
	heard     time.Time // when the note was heard that it is about
	deadline  time.Time
	done      chan struct{}
	confirmed bool // set before done is closed
}

// pace is when a listener does what, counted from the note that was last a proof.
type pace struct {
	earliest time.Duration // after which a note of another listener is worth a look
	spread   time.Duration // of the looks of all listeners, after such a note
	late     time.Duration // how late a note may be heard and still be a proof
}

func (c *ListenerConfig) pace() pace {
	if c.Heartbeat < 0 {
		return pace{earliest: never}
	}
	shorter := min(c.Heartbeat, c.HeartbeatTimeout)
	return pace{earliest: c.Heartbeat / 2, spread: shorter/5 + 1, late: shorter / 10}
}

// nextBeat is when to send a note if none of another listener is a proof before. It is never later than Heartbeat after the one before,
// nor sooner than three fifths of it.
//
// The rest is drawn so that of any number of listeners few come first: each is as likely to be first as any other, and nearly all the
// others have heard its note before their turn comes. A uniform draw would let a hundred of them notify at once. The longer the time that
// it is drawn from, the later a note may be heard on a busy machine before others send one too.
func (c *ListenerConfig) nextBeat(after time.Time) time.Time {
	if c.Heartbeat < 0 {
		return after.Add(never)
	}
	return after.Add(c.Heartbeat*3/5 + towardsTheEnd(c.Heartbeat*2/5))
}

// towardsTheEnd draws from 0 to d, exponentially denser towards d: in each of ten equal parts some two and a half times as often as in the
// part before.
func towardsTheEnd(d time.Duration) time.Duration {
	const crowd = 20_000 // at so many listeners the first one comes at the beginning
	return time.Duration(float64(d) * math.Log1p(mathrand.Float64()*(crowd-1)) / math.Log(crowd))
}

// heard takes a note on the proof's channel, on the goroutine that reads.
func (k *link) heard(s *session, payload string) {
	token, st, stamped := readNote(payload)
	now := time.Now()
	switch {
	case token == s.token:
		if s.arrived = true; stamped {
			s.identity = st.identity
		}
	case !s.waiting:
		// In the middle of a statement a pooler may have lent a server on which somebody else's LISTEN has remained.
	case stamped && st.identity == s.identity && s.beat == nil && s.look == nil && !now.Before(s.lookFrom):
		s.heardAt, s.heardClock = now, st.clock
		if s.lookAt.IsZero() {
			s.lookAt = now.Add(mathrand.N(k.pace.spread))
		}
	}
}

// startLook asks on the way of publishers, on a goroutine of its own as a note is sent.
func (k *link) startLook(ctx context.Context, s *session) {
	now := time.Now()
	timeout := k.cfg.HeartbeatTimeout / 3
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), timeout)
	l := &look{heard: s.heardAt, deadline: now.Add(2 * timeout), done: make(chan struct{})}
	before := s.statement
	s.look, s.lookAt, s.statement = l, time.Time{}, l.done
	// What the server's clock says when it answers was true not before now. So a note that is no older then was heard in time.
	oldest := now.Sub(s.heardAt) + k.pace.late
	identity, clock := s.identity, s.heardClock
	go func() {
		defer cancel()
		if before != nil {
			<-before
		}
		tag, err := k.pool.Exec(ctx, lookSQL, pgx.QueryExecModeExec,
			identity, strconv.FormatInt(clock, 10), strconv.FormatInt(oldest.Microseconds(), 10))
		l.confirmed = err == nil && tag.RowsAffected() == 1
		k.mu.Lock()
		defer k.mu.Unlock()
		close(l.done)
		k.interruptLocked()
	}()
}

// checkLook returns when to look at it again. Where nothing is confirmed, for whatever reason, a note of one's own is due: what becomes of
// that is evidence, the answer to a look is none but of success.
func (k *link) checkLook(s *session, now time.Time) (again time.Time) {
	select {
	case <-s.look.done:
		if s.look.confirmed {
			k.proven(s, s.look.heard.Add(-k.pace.late), false)
			return s.nextBeat
		}
	default:
		if now.Before(s.look.deadline) {
			return s.look.deadline
		}
	}
	s.look, s.nextBeat = nil, now
	return now
}

// notAllowed reports whether a server refused a statement for what it asks about itself.
func notAllowed(err error) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && (pgErr.Code == "42501" || pgErr.Code == "42883") // insufficient_privilege, undefined_function
}
