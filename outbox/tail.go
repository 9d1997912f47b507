package outbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/internal/backoff"
	"github.com/bounceproof/bounceproof/prepare"
)

const (
	tailPoll   = 200 * time.Millisecond
	tailPage   = 100 // events a statement
	tailOutage = time.Second
)

// Tail calls handle for every event that commits, in the order of commits within a key, until ctx is done, when it returns nil, or handle returns
// an error, which it returns. It is for looking on: it makes no subscription, so it leaves nothing behind however it ends, retention does
// not wait for it, and an event that is swept before it was read is not shown. Each event comes once. Deliveries have no Subscription, and Attempt 0. It
// reads the log every 200 ms, needs the right to select from it, and goes on after the server was away. handle is called by one goroutine; Tail is
// safe for concurrent use.
func (s *Store) Tail(ctx context.Context, start Start, handle func(context.Context, Delivery) error) error {
	if handle == nil {
		panic("outbox: Tail: nil handle")
	}
	lanes, err := s.verify(ctx, s.ex, prepare.Stable)
	if err != nil {
		return err
	}
	t := &tail{s: s, handle: handle, lanes: make([]int16, lanes), page: text(s.schema, "tail_page"), look: text(s.schema, "tail_look")}
	for i := range t.lanes {
		t.lanes[i] = int16(i)
	}
	if err := t.start(ctx, start); err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return fmt.Errorf("outbox: tail: %w", err)
	}
	for {
		wait, begun := tailPoll, time.Now()
		err := t.step(ctx)
		switch {
		case t.handled != nil:
			return t.handled
		case ctx.Err() != nil:
			return nil
		case err != nil && !passes(err):
			return fmt.Errorf("outbox: tail: %w", err)
		case err != nil:
			wait = tailOutage
		}
		// Behind an old open transaction a look reads much: half of the time at most.
		wait = max(wait, min(time.Since(begun), 10*time.Second))
		if backoff.Wait(ctx, wait) != nil {
			return nil
		}
	}
}

// tail is a place in the log: everything that seen sees was handed over.
type tail struct {
	s          *Store
	handle     func(context.Context, Delivery) error
	lanes      []int16
	page, look string

	seen string // a snapshot
	// next is the snapshot that is being read up to, empty if none is, and pos the number up to which that is done.
	next string
	pos  int64
	// low is a number that the events which seen does not see are above; marks bring it on.
	low     int64
	marks   []tailMark
	handled error // what handle returned
}

// tailMark says that transactions with this id or a later one draw numbers above tip: the id was given out by a statement behind the one that
// read the tip, and publishers have their id before they draw a number. That is what a tick says, too, but without dispatchers there are none.
type tailMark struct{ xid, tip int64 }

func (t *tail) start(ctx context.Context, start Start) error {
	how := "earliest"
	var at *time.Time
	switch {
	case start.now:
		how = "now"
	case !start.at.IsZero():
		how, at = "at", &start.at
	}
	return t.s.ex.QueryRow(ctx, text(t.s.schema, "tail_start"), how, at).Scan(&t.seen, &t.low)
}

// step hands over what has become visible since the last one. After an error the next one goes on where this one stopped.
func (t *tail) step(ctx context.Context) error {
	if t.next == "" {
		now, tip, oldest := "", int64(0), int64(0)
		if err := t.s.ex.QueryRow(ctx, t.look, prepare.Stable, t.seen).Scan(&now, &tip, &oldest); err != nil {
			return err
		}
		if now == t.seen {
			return nil // no transaction has ended
		}
		t.rise(oldest)
		if n := len(t.marks); tip > t.low && (n == 0 || tip > t.marks[n-1].tip) {
			if err := t.mark(ctx, tip); err != nil {
				return err
			}
		}
		t.next, t.pos = now, t.low
	}
	for {
		n, err := t.read(ctx)
		if err != nil {
			return err
		}
		if n < tailPage {
			t.seen, t.next = t.next, ""
			return nil
		}
	}
}

// rise brings low on to the last mark before the oldest transaction that seen does not see.
func (t *tail) rise(oldest int64) {
	n := 0
	for n < len(t.marks) && t.marks[n].xid <= oldest {
		t.low = t.marks[n].tip
		n++
	}
	t.marks = slices.Delete(t.marks, 0, n)
}

// mark takes a transaction id, once for each time that something was published. A standby has none to give: there low stays.
func (t *tail) mark(ctx context.Context, tip int64) error {
	m := tailMark{tip: tip}
	err := t.s.ex.QueryRow(ctx, "select pg_current_xact_id()::text::bigint", prepare.Stable).Scan(&m.xid)
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok && (pgErr.Code == "55000" || pgErr.Code == "25006") {
		return nil // "cannot assign TransactionIds during recovery" (xact.c)
	}
	if err == nil {
		t.marks = append(t.marks, m)
	}
	return err
}

// read hands over a page.
func (t *tail) read(ctx context.Context) (n int, err error) {
	rows, err := t.s.ex.Query(ctx, t.page, prepare.Stable, t.lanes, t.seen, t.next, t.pos, tailPage)
	if err != nil {
		return 0, err
	}
	list, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (d Delivery, err error) {
		var key *string
		err = row.Scan(&d.Lane, &d.Seq, &d.Type, &key, &d.Payload, &d.Headers, &d.PublishedAt)
		if key != nil {
			d.Key = *key
		}
		return d, err
	})
	if err != nil {
		return 0, err
	}
	for _, d := range list {
		if t.handled = t.handle(ctx, d); t.handled != nil {
			return 0, t.handled
		}
		t.pos = d.Seq
		if ctx.Err() != nil {
			return 0, ctx.Err()
		}
	}
	return len(list), nil
}

// passes reports whether an error is one of a server or a pooler that is away for a while.
func passes(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	if !ok {
		return !errors.Is(err, executor.ErrClosed)
	}
	return slices.ContainsFunc([]string{"08", "53", "57", "40"}, func(class string) bool { return strings.HasPrefix(pgErr.Code, class) })
}
