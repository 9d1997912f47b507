package notify

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// How delivery is proven. A note with a random token is sent to a channel that this connection listens on, by another session, while this
// one only reads. A note from the same session would prove nothing: PgBouncer hands idle servers out last in, first out, so behind
// transaction mode the same server usually answers, and a notification to oneself arrives before ReadyForQuery, while server and client
// are still linked.
//
// The same note is the heartbeat. It tests the whole path, which neither TCP keepalive (a live proxy before a dead server)
// nor a question to the listening session (nothing about senders) does. A note of another listener can take its place: see proof.go.

// beat is one heartbeat: a note under way.
type beat struct {
	deadline time.Time
	overtime bool               // the deadline has passed once
	giveUp   context.CancelFunc // for what is not a statement on the pool
	done     chan struct{}      // closed when the note was sent, or could not be
	err      error              // set before done is closed
}

// never is longer than any connection lasts.
const never = 100 * 365 * 24 * time.Hour

// startBeat sends a note on a goroutine of its own: a pool may have no free connection for a while.
//
// Nothing but its own time ends the statement: not that the note has arrived, and not the end of Run. pgx answers a context that
// ends with a cancel request, and a pooler may have lent the server to somebody else before that gets there (PgBouncer up to 1.17,
// pgbouncer/pgbouncer#717). So statements of several beats could overlap; each waits for the one before it.
func (k *link) startBeat(ctx context.Context, s *session, timeout time.Duration) {
	s.endBeat()
	s.token, s.arrived, s.sentAt = rand.Text(), false, time.Now()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), timeout)
	proven, giveUp := context.WithCancel(ctx)
	b := &beat{deadline: s.sentAt.Add(timeout - timeout/overtime), giveUp: giveUp, done: make(chan struct{})}
	before := s.statement
	s.beat, s.statement = b, b.done
	channel, token := s.proof, s.token
	go func() {
		defer cancel()
		if before != nil {
			<-before // bounded as this one is
		}
		b.err = k.sendNote(ctx, proven, timeout, channel, token)
		k.mu.Lock()
		defer k.mu.Unlock()
		close(b.done) // before the interrupt, or who is woken by it would find nothing and wait for the deadline
		if b.err != nil {
			k.interruptLocked()
		}
	}()
}

// endBeat leaves the statement to end by itself, and forgets what was heard of other listeners.
func (s *session) endBeat() {
	if s.beat != nil {
		s.beat.giveUp()
	}
	s.beat, s.look, s.lookAt = nil, nil, time.Time{}
}

// sendNote goes through the pool. When that has no connection to give, one is made for the note, unless given up meanwhile: a
// busy pool says nothing about the listener. Each gets a third of the time, and the last third is left for asking the session itself.
func (k *link) sendNote(ctx, notGivenUp context.Context, timeout time.Duration, channel, token string) error {
	sql := noteSQL
	if k.plain.Load() {
		sql = plainSQL
	}
	first, cancel := context.WithTimeout(ctx, timeout/3)
	defer cancel()
	// Exec mode prepares nothing, so this works on any pool behind any pooler.
	_, poolErr := k.pool.Exec(first, sql, pgx.QueryExecModeExec, channel, token)
	if notAllowed(poolErr) && sql != plainSQL {
		sql = plainSQL
		k.plain.Store(true)
		_, poolErr = k.pool.Exec(first, sql, pgx.QueryExecModeExec, channel, token)
	}
	if poolErr == nil {
		return nil
	}
	second, cancel := context.WithTimeout(notGivenUp, timeout/3)
	defer cancel()
	// Never by Direct: whatever that leads to, publishers use the pool.
	conn, err := k.connectAsPool(second, nil)
	if err == nil {
		_, err = conn.ExecParams(second, sql, [][]byte{[]byte(channel), []byte(token)}, nil, nil, nil).Close()
		closeConn(conn)
	}
	if err != nil {
		return fmt.Errorf("cannot send a note: %w; nor by a connection of its own: %w", poolErr, err)
	}
	return nil
}

// received is called by pgconn, on the goroutine that reads.
func (k *link) received(s *session, n *pgconn.Notification) {
	if n.Channel == s.proof {
		k.heard(s, n.Payload)
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	inboxes, merged := 0, 0
	for l := range k.listeners {
		for _, in := range l.inboxes[n.Channel] {
			inboxes++
			if in.put(Notified, n.Payload) {
				merged++
			}
		}
	}
	k.state.received(inboxes, merged)
}

// prove sends the first note of a connection and waits for it.
func (k *link) prove(ctx context.Context, s *session) *refusal {
	deadline, _ := ctx.Deadline()
	k.startBeat(ctx, s, time.Until(deadline))
	for !s.arrived {
		if err := s.conn.WaitForNotification(ctx); err != nil {
			if s.conn.IsClosed() {
				return &refusal{state: Disconnected, reason: "connection lost", err: err}
			}
			break
		}
	}
	if s.arrived {
		k.proven(s, s.sentAt, true)
		return nil
	}
	select {
	case <-s.beat.done:
		if s.beat.err != nil {
			return k.unsent(s, s.beat.err)
		}
	default:
		return k.unsent(s, errUnderWay)
	}
	// One miss may be the fault of a link that stood still for a moment. Two are not.
	s.unheard++
	if s.unheard == 1 {
		reason := fmt.Sprintf("%v within %v; this will be tried again soon", errNoProof, k.cfg.HeartbeatTimeout*9/20)
		return &refusal{reason: reason, atOnce: true}
	}
	r := &refusal{
		state: Isolated, reason: "LISTEN succeeded, but " + errNoProof.Error(), settled: true,
		remedy: k.remedyForSilence(s.pooled),
	}
	switch {
	case s.pooled:
		r.reason += ": the pooler does not keep a server connection per client"
	case k.direct != nil:
		r.reason += ": the pool leads to another server or database"
	default:
		r.reason += ": the pool and the listener were led to different servers"
	}
	return r
}

var errUnderWay = errors.New("the note's statement has not ended")

// proven settles a heartbeat: a note came back that was sent then, its own or that of another listener.
func (k *link) proven(s *session, sent time.Time, own bool) {
	s.endBeat()
	s.next, s.unheard, s.late = time.Time{}, 0, 0
	s.nextBeat, s.lookFrom = k.cfg.nextBeat(sent), sent.Add(k.pace.earliest)
	if s.proof != proofChannel {
		s.proof = proofChannel
		k.mu.Lock()
		k.moved = true // to be listened on, and the other one not any more
		k.mu.Unlock()
	}
	if k.state.proven(sent, own) {
		// What publishers sent meanwhile may have gone elsewhere, on this connection too.
		k.resyncAll(s)
	} else {
		k.resync(s)
	}
}

// read waits for notifications on a connection that was proven, until ctx is done (nil: the connection is as good as before) or it is
// lost.
func (k *link) read(ctx context.Context, s *session) *refusal {
	for {
		if why := k.updateChannels(ctx, s); why != nil {
			return why
		}
		deadline, why := k.checkHeartbeat(ctx, s)
		if why != nil {
			return why
		}
		wait, cancel := k.interruptible(ctx, deadline)
		s.waiting = true
		err := s.conn.WaitForNotification(wait)
		s.waiting = false
		interrupted := wait.Err() != nil
		cancel()
		switch {
		case err == nil:
		case s.conn.IsClosed() || !interrupted:
			return lost(err)
		case ctx.Err() != nil:
			s.nextBeat, s.lookAt = time.Now(), time.Time{} // whoever goes on has it proven first
			return nil
		}
	}
}

func lost(err error) *refusal {
	return &refusal{state: Disconnected, reason: "connection lost", err: err}
}

// updateChannels listens for those who came since, and not for those who left.
func (k *link) updateChannels(ctx context.Context, s *session) *refusal {
	ctx, cancel := k.unhurried(ctx, k.cfg.HeartbeatTimeout)
	defer cancel()
	if err := k.listen(ctx, s); err != nil {
		return lost(err)
	}
	k.resync(s)
	return nil
}

// checkHeartbeat starts a heartbeat that is due, or looks what has become of it, and returns when to look again, or why the connection
// has to end.
func (k *link) checkHeartbeat(ctx context.Context, s *session) (time.Time, *refusal) {
	now := time.Now()
	if s.look != nil {
		if again := k.checkLook(s, now); now.Before(again) {
			return again, nil
		}
	}
	if s.beat == nil {
		switch {
		case !s.lookAt.IsZero() && now.Before(s.lookAt):
			return s.lookAt, nil
		case !s.lookAt.IsZero():
			k.startLook(ctx, s)
			return s.look.deadline, nil
		case now.Before(s.nextBeat):
			return s.nextBeat, nil
		}
		k.startBeat(ctx, s, k.cfg.HeartbeatTimeout)
		return s.beat.deadline, nil
	}
	if s.arrived {
		k.proven(s, s.sentAt, true)
		return s.nextBeat, nil
	}
	select {
	case <-s.beat.done:
		if s.beat.err != nil {
			return k.unproven(ctx, s, s.beat.err)
		}
	default:
		if !now.Before(s.beat.deadline) {
			return k.unproven(ctx, s, errUnderWay)
		}
	}
	if now.Before(s.beat.deadline) {
		return s.beat.deadline, nil
	}
	// The note has left its sender, so nothing excuses the silence, neither other notifications nor a session that answers: they
	// come from elsewhere than publishers do by now.
	if !s.beat.overtime {
		// This process may have stood still, with the note long arrived: a read whose time is up does not even look.
		s.beat.overtime = true
		return now.Add(k.cfg.HeartbeatTimeout / overtime), nil
	}
	s.unheard++
	return time.Time{}, lost(errNoProof)
}

// overtime is the part of HeartbeatTimeout that is kept for looking once more.
const overtime = 50

// unproven is what follows when no note could be sent, from the pool or otherwise: nothing is known then. That is not the fault of the
// connection as long as it answers, which is kept: what others send may well be heard.
func (k *link) unproven(ctx context.Context, s *session, err error) (time.Time, *refusal) {
	s.late++
	why := k.unsent(s, err)
	k.state.late(&refusal{reason: why.reason, err: why.err, remedy: why.remedy})
	if why.settled && s.late > 1 {
		return time.Time{}, why
	}
	bounded, cancel := k.unhurried(ctx, k.cfg.HeartbeatTimeout/3)
	defer cancel()
	if err := s.stillListens(bounded); err != nil {
		return time.Time{}, lost(err)
	}
	s.endBeat()
	s.nextBeat = time.Now().Add(k.retry.Delay(s.late))
	return s.nextBeat, nil
}
