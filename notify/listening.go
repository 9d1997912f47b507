package notify

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// What a connection listens on: brought in line with what the running listeners want, in one statement. A channel that the server refuses
// is the fault of whoever wants it, and of nobody else.

var errMoved = errors.New("another server connection answered: the pooler no longer keeps one per client")

// refusedChannel is a channel for which LISTEN failed while the connection lived on.
type refusedChannel struct {
	err   error
	again time.Time // when to try it again
}

// listen has the session listen for those who came since, and no longer for those who left. What it tells the tracker is what the
// server has answered, not what is wanted by then.
func (k *link) listen(ctx context.Context, s *session) error {
	want, wanted := k.wanted(s)
	if !wanted {
		return nil
	}
	var add, drop []string
	for _, channel := range slices.Sorted(maps.Keys(want)) {
		if r := s.refused[channel]; !s.listening[channel] && (r == nil || !time.Now().Before(r.again)) {
			add = append(add, channel)
		}
	}
	for channel := range s.listening {
		if !want[channel] {
			drop = append(drop, channel)
		}
	}
	if len(add)+len(drop) > 0 {
		if err := k.change(ctx, s, add, drop); err != nil {
			return err
		}
	}
	s.fresh = append(s.fresh, k.state.listening(s.listening, s.refused))
	return nil
}

// wanted returns the channels of all running listeners and the proof's, and false when that is what it was the last time.
func (k *link) wanted(s *session) (map[string]bool, bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	again := false
	for _, r := range s.refused {
		again = again || !time.Now().Before(r.again)
	}
	if !k.moved && !again && s.listening != nil {
		return nil, false
	}
	k.moved = false
	want := map[string]bool{s.proof: true}
	for l := range k.listeners {
		for channel := range l.inboxes {
			want[channel] = true
		}
	}
	return want, true
}

// change runs the statement. Where the server refuses it, the channels at fault are found by halves.
func (k *link) change(ctx context.Context, s *session, add, drop []string) error {
	err := s.run(ctx, add, drop)
	if err == nil || !refuses(s, err) {
		return err
	}
	// Without the proof's channel there is nothing to prove: the server refuses LISTEN as such.
	if !s.listening[s.proof] {
		if err := s.run(ctx, []string{s.proof}, nil); err != nil {
			return err
		}
	}
	if err := s.run(ctx, nil, drop); err != nil {
		return err
	}
	groups := [][]string{slices.DeleteFunc(slices.Clone(add), func(channel string) bool { return channel == s.proof })}
	for len(groups) > 0 {
		group := groups[len(groups)-1]
		groups = groups[:len(groups)-1]
		switch err := s.run(ctx, group, nil); {
		case err == nil:
		case !refuses(s, err):
			return err
		case len(group) > 1:
			groups = append(groups, group[:len(group)/2], group[len(group)/2:])
		default:
			if s.refused == nil {
				s.refused = make(map[string]*refusedChannel)
			}
			again := time.Now().Add(k.cfg.Reprove)
			if k.cfg.Reprove < 0 {
				again = again.Add(never)
			}
			if s.refused[group[0]] == nil {
				k.state.refused(group[0], err)
			}
			s.refused[group[0]] = &refusedChannel{err, again}
		}
	}
	return nil
}

func refuses(s *session, err error) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && !s.conn.IsClosed()
}

// run is one simple query, so one transaction, and the pid that ran it.
func (s *session) run(ctx context.Context, add, drop []string) error {
	if len(add)+len(drop) == 0 {
		return nil
	}
	var sql strings.Builder
	for _, channel := range add {
		sql.WriteString("listen " + pgx.Identifier{channel}.Sanitize() + "; ")
	}
	for _, channel := range drop {
		sql.WriteString("unlisten " + pgx.Identifier{channel}.Sanitize() + "; ")
	}
	backend, err := one(ctx, s.conn, sql.String()+backendSQL)
	if err != nil {
		return err
	}
	if s.listening == nil {
		s.listening = make(map[string]bool)
	}
	for _, channel := range add {
		s.listening[channel] = true
		delete(s.refused, channel)
	}
	for _, channel := range drop {
		delete(s.listening, channel)
	}
	if backend != s.backend {
		s.backend = backend // where the LISTEN is to be undone
		return errMoved
	}
	return nil
}

// resync has the handlers look that wait for channels which are heard since.
func (k *link) resync(s *session) {
	fresh := s.fresh
	s.fresh = nil
	for _, channels := range fresh {
		for l, names := range channels {
			for _, channel := range names {
				for _, in := range l.inboxes[channel] {
					in.put(Resynced, "")
				}
			}
		}
	}
}

// resyncAll has everybody look whose channels are heard.
func (k *link) resyncAll(s *session) {
	s.fresh = nil
	k.mu.Lock()
	defer k.mu.Unlock()
	for l := range k.listeners {
		for channel, inboxes := range l.inboxes {
			if !s.listening[channel] {
				continue
			}
			for _, in := range inboxes {
				in.put(Resynced, "")
			}
		}
	}
}

func (k *link) listenRefused(s *session, err error) *refusal {
	switch {
	case errors.Is(err, errMoved):
		return &refusal{state: Isolated, reason: "LISTEN cannot work", err: err, remedy: k.remedyForSharing(), settled: true}
	case refuses(s, err):
		// 58P01, for example: the queue holds an entry whose transaction status was vacuumed away (before the minor releases
		// of early 2026, and in all of 13). Or a standby.
		who := "the pool"
		if k.direct != nil {
			who = "ListenerConfig.Direct"
		}
		return &refusal{state: Isolated, reason: "the server refused LISTEN", err: err, remedy: remedyForRefusal(err, who)}
	default:
		return &refusal{state: Disconnected, reason: "cannot LISTEN", err: err}
	}
}

// stillListens asks the session itself whether it is still the one that listens, when no note can be sent from elsewhere.
func (s *session) stillListens(ctx context.Context) error {
	answer, err := one(ctx, s.conn, `select pg_catalog.pg_backend_pid() || case when exists (
	select from pg_catalog.pg_listening_channels() as c where c = '`+s.proof+`') then '' else ' not listening' end`)
	if err != nil {
		return err
	}
	if answer != s.backend {
		return fmt.Errorf("%w or no longer listens", errMoved)
	}
	return nil
}
