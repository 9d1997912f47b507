package notify

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/internal/backoff"
)

// How delivery is proven. A note with a random token is sent to a channel that only this connection listens on, by
// another session, while this one only reads. A note from the same session would prove nothing: PgBouncer hands idle
// servers out last in, first out, so behind transaction mode the same server usually answers, and a notification to
// oneself arrives before ReadyForQuery, while server and client are still linked.
//
// The same note is the heartbeat. It tests the whole path, which neither TCP keepalive (a live proxy before a dead server)
// nor a question to the listening session (nothing about senders) does.

const proofPrefix = "bounceproof_"

func newProofChannel() string { return proofPrefix + strings.ToLower(rand.Text()) }

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

var errNoProof = errors.New("a note from another session did not arrive")

// startBeat sends a note on a goroutine of its own: a pool may have no free connection for a while.
//
// Nothing but its own time ends the statement: not that the note has arrived, and not the end of Run. pgx answers a context that
// ends with a cancel request, and a pooler may have lent the server to somebody else before that gets there (PgBouncer up to 1.17,
// pgbouncer/pgbouncer#717). So statements of several beats could overlap; each waits for the one before it.
func (k *link) startBeat(ctx context.Context, s *session, timeout time.Duration) {
	s.token, s.arrived, s.sentAt = rand.Text(), false, time.Now()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), timeout)
	proven, giveUp := context.WithCancel(ctx)
	b := &beat{deadline: s.sentAt.Add(timeout), giveUp: giveUp, done: make(chan struct{})}
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

// endBeat leaves the statement to end by itself.
func (s *session) endBeat() {
	if s.beat != nil {
		s.beat.giveUp()
		s.beat = nil
	}
}

// sendNote goes through the pool. When that has no connection to give, one is made for the note, unless given up meanwhile: a
// busy pool says nothing about the listener. Each gets a third of the time, and the last third is left for asking the session itself.
func (k *link) sendNote(ctx, notGivenUp context.Context, timeout time.Duration, channel, token string) error {
	// Asking for the usage moves the tail of a queue that is full for no reason any more: see retrySQL.
	const sql = `select pg_catalog.pg_notify($1, $2) where pg_catalog.pg_notification_queue_usage() is not null`
	first, cancel := context.WithTimeout(ctx, timeout/3)
	defer cancel()
	// Exec mode prepares nothing, so this works on any pool behind any pooler.
	_, poolErr := k.pool.Exec(first, sql, pgx.QueryExecModeExec, channel, token)
	if poolErr == nil {
		return nil
	}
	second, cancel := context.WithTimeout(notGivenUp, timeout/3)
	defer cancel()
	conn, err := k.connect(second, nil)
	if err == nil {
		_, err = conn.ExecParams(second, sql, [][]byte{[]byte(channel), []byte(token)}, nil, nil, nil).Close()
		closeConn(conn)
	}
	if err != nil {
		return fmt.Errorf("cannot send a note: %w", errors.Join(poolErr, err))
	}
	return nil
}

// received is called by pgconn, on the goroutine that reads.
func (k *link) received(s *session, n *pgconn.Notification) {
	if n.Channel == s.proof {
		if n.Payload != s.token || s.arrived {
			return // a note of an earlier beat
		}
		s.arrived = true
		k.state.proven(s.sentAt)
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	inboxes, merged := 0, 0
	for l := range k.listeners {
		if in := l.inboxes[n.Channel]; in != nil {
			inboxes++
			if in.put(Notified, n.Payload) {
				merged++
			}
		}
	}
	k.state.received(inboxes, merged)
	if inboxes > 0 {
		s.lastReceived = time.Now()
	}
}

// prove sends the first note of a connection and waits for it.
func (k *link) prove(ctx context.Context, s *session) *refusal {
	deadline, _ := ctx.Deadline()
	k.startBeat(ctx, s, time.Until(deadline))
	defer s.endBeat()
	for !s.arrived {
		if err := s.conn.WaitForNotification(ctx); err != nil {
			if s.conn.IsClosed() {
				return &refusal{state: Disconnected, reason: "connection lost", err: err}
			}
			break
		}
	}
	if s.arrived {
		return nil
	}
	select {
	case <-s.beat.done:
		if s.beat.err != nil {
			return &refusal{state: Isolated, reason: "delivery cannot be proven", err: s.beat.err}
		}
	default:
	}
	reason := "LISTEN succeeded, but " + errNoProof.Error()
	if s.pooled {
		reason += ": the pooler does not keep a server connection per client"
	} else if k.direct != nil {
		reason += ": the pool leads to another server or database"
	}
	return &refusal{state: Isolated, reason: reason, settled: true}
}

// proven announces a fresh connection: LISTEN is committed and delivery works, so everybody may look now.
func (k *link) proven(s *session) {
	s.lastReceived = time.Now()
	s.nextBeat = k.nextBeat()
	k.resync(true)
	k.state.set(Proven, "", nil)
}

// resync tells the listeners that have not been told on this connection, or all of them.
func (k *link) resync(all bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for l, told := range k.listeners {
		if told && !all {
			continue
		}
		k.listeners[l] = true
		for _, channel := range sortedChannels(l.inboxes) {
			l.inboxes[channel].put(Resynced, "")
		}
	}
}

// nextBeat is never later than Heartbeat from now, and jittered so that many processes do not notify together.
func (k *link) nextBeat() time.Time {
	if k.cfg.Heartbeat < 0 {
		return time.Now().Add(never)
	}
	return time.Now().Add(backoff.Spread(k.cfg.Heartbeat*9/10, 0.1))
}

// read waits for notifications on a proven connection until ctx is done (nil: the connection is as good as before) or it is lost.
func (k *link) read(ctx context.Context, s *session) error {
	defer s.endBeat()
	for {
		if err := k.updateChannels(ctx, s); err != nil {
			return err
		}
		deadline, err := k.checkHeartbeat(ctx, s)
		if err != nil {
			return err
		}
		wait, cancel := k.interruptible(ctx, deadline)
		err = s.conn.WaitForNotification(wait)
		interrupted := wait.Err() != nil
		cancel()
		switch {
		case err == nil:
		case s.conn.IsClosed() || !interrupted:
			return err
		case ctx.Err() != nil:
			s.nextBeat = time.Now() // whoever goes on has it proven first
			return nil
		}
	}
}

// updateChannels listens for those who came since, and not for those who left.
func (k *link) updateChannels(ctx context.Context, s *session) error {
	ctx, cancel := context.WithTimeout(ctx, k.cfg.HeartbeatTimeout)
	defer cancel()
	if err := k.listen(ctx, s); err != nil {
		return err
	}
	k.resync(false)
	return nil
}

// checkHeartbeat starts a heartbeat that is due, or looks what has become of it, and returns when to look again.
func (k *link) checkHeartbeat(ctx context.Context, s *session) (time.Time, error) {
	now := time.Now()
	if s.beat == nil {
		if now.Before(s.nextBeat) {
			return s.nextBeat, nil
		}
		k.startBeat(ctx, s, k.cfg.HeartbeatTimeout)
		return s.beat.deadline, nil
	}
	finish := func() (time.Time, error) {
		s.endBeat()
		s.nextBeat = k.nextBeat()
		return s.nextBeat, nil
	}
	if s.arrived {
		return finish()
	}
	select {
	case <-s.beat.done:
		if s.beat.err == nil {
			break
		}
		// No note could be sent, from the pool or otherwise. That is not the listener's fault as long as it answers.
		err := s.beat.err
		bounded, cancel := context.WithTimeout(ctx, k.cfg.HeartbeatTimeout/3)
		defer cancel()
		if sessionErr := s.stillListens(bounded); sessionErr != nil {
			return time.Time{}, errors.Join(sessionErr, err)
		}
		return finish()
	default:
	}
	if now.Before(s.beat.deadline) {
		return s.beat.deadline, nil
	}
	if s.lastReceived.After(s.sentAt) {
		return finish() // other notifications did arrive: the note waits at its sender's
	}
	if !s.beat.overtime {
		// This process may have stood still, with the note long arrived: a read whose time is up does not even look.
		s.beat.overtime = true
		return now.Add(k.cfg.HeartbeatTimeout / 50), nil
	}
	return time.Time{}, errNoProof
}
