package notify_test

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/internal/pgscript"
	"github.com/bounceproof/bounceproof/notify"
)

// Listeners of one database, each with a connection of its own, for which one note is enough.

// peer is a process: a pool of its own to a server that it shares with others.
type peer struct {
	*scripted

	takes time.Duration // a statement

	mu        sync.Mutex    // guards what follows
	plain     bool          // notes carry no stamp
	elsewhere bool          // the pool leads to another server
	credulous bool          // looks are answered as if it did not
	delay     time.Duration // of what the server sends to the listener
	notes     int           // sent to prove delivery

	delayedUntil time.Time // the last of the model's faults
	looks        int
}

func (p *peer) with(change func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	change()
}

func (p *peer) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	time.Sleep(p.takes)
	p.mu.Lock()
	looks := strings.HasPrefix(sql, "select where")
	switch {
	case looks:
		p.looks++
	case strings.Contains(sql, "postmaster"):
		p.notes++
	}
	elsewhere := p.elsewhere && (!looks || !p.credulous)
	if p.plain {
		sql = "select pg_notify($1, $2)"
	}
	p.mu.Unlock()
	return p.execBy(ctx, elsewhere, sql, args...)
}

// Config leads to the server by connections on which what it sends arrives delay later, however much that is.
func (p *peer) Config() *pgxpool.Config {
	cfg := p.scripted.Config()
	dial := cfg.ConnConfig.DialFunc
	cfg.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		server, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		ours, theirs := net.Pipe()
		type piece struct {
			due   time.Time
			bytes []byte
		}
		pieces := make(chan piece, 10_000)
		go func() {
			defer close(pieces)
			for {
				b := make([]byte, 8192)
				n, err := server.Read(b)
				if err != nil {
					return
				}
				p.mu.Lock()
				pieces <- piece{time.Now().Add(p.delay), b[:n]}
				p.mu.Unlock()
			}
		}()
		go func() {
			defer ours.Close()
			for piece := range pieces {
				time.Sleep(time.Until(piece.due))
				if _, err := ours.Write(piece.bytes); err != nil {
					return
				}
			}
		}()
		go func() {
			defer server.Close()
			_, _ = io.Copy(onTheWay{server, p}, ours)
		}()
		return theirs, nil
	}
	return cfg
}

// onTheWay ends a connection by which a note would get here past a pool that leads elsewhere.
type onTheWay struct {
	net.Conn
	p *peer
}

func (w onTheWay) Write(b []byte) (int, error) {
	w.p.mu.Lock()
	defer w.p.mu.Unlock()
	if w.p.elsewhere && bytes.Contains(b, []byte("pg_notify")) {
		return 0, io.ErrClosedPipe
	}
	return w.Conn.Write(b)
}

// peers runs n listeners, each on channel "news" of the same server.
func peers(t *testing.T, n int, with func(*peer)) (pg *scripted, all []*peer, listeners []*listening) {
	t.Helper()
	pg = newScripted(t, pgscript.Options{})
	for range n {
		p := &peer{scripted: pg, takes: 20 * time.Millisecond}
		if with != nil {
			with(p)
		}
		all = append(all, p)
		listeners = append(listeners, listen(t, p, notify.ListenerConfig{Logger: slog.New(slog.DiscardHandler)}))
	}
	return pg, all, listeners
}

func (p *peer) counts() (notes, looks int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.notes, p.looks
}

// Counts, not clocks: what n listeners send to prove delivery does not grow with n.
func TestOneNoteProvesDeliveryToAll(t *testing.T) {
	t.Parallel()
	const beats = 60 // of 10s
	for _, c := range []struct {
		name           string
		n              int
		plain          bool
		least, most    int // notes
		mostLooksOfOne int
	}{
		{"one", 1, false, beats, beats * 5 / 4, 0},
		{"two", 2, false, beats, beats * 3 / 2, beats * 3 / 2},
		{"ten", 10, false, beats, beats * 3 / 2, beats * 3 / 2},
		{"two hundred", 200, false, beats, beats * 3, beats * 3 / 2},
		// The control: without a stamp no note is of use to another listener.
		{"forty, each for itself", 40, true, 40 * beats, 40 * beats * 5 / 4, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				_, all, listeners := peers(t, c.n, func(p *peer) { p.plain = c.plain })
				time.Sleep(30 * time.Second)
				sum := func() (notes, looks int) {
					for _, p := range all {
						n, l := p.counts()
						notes, looks = notes+n, looks+l
					}
					return notes, looks
				}
				notes, looks := sum()
				for range beats {
					for range 10 {
						time.Sleep(time.Second)
						synctest.Wait()
						for i, l := range listeners {
							if !l.Healthy() {
								t.Fatalf("listener %d: %+v", i, l.Status())
							}
						}
					}
				}
				notesNow, looksNow := sum()
				notes, looks = notesNow-notes, looksNow-looks
				t.Logf("%d listeners in %d Heartbeats: %d notes, %d looks", c.n, beats, notes, looks)
				if notes < c.least || notes > c.most {
					t.Errorf("%d notes, want %d to %d", notes, c.least, c.most)
				}
				if looks > c.mostLooksOfOne*c.n || !c.plain && c.n > 1 && looks < (c.n-1)*beats/2 {
					t.Errorf("%d looks of %d listeners, want at most %d of each", looks, c.n, c.mostLooksOfOne)
				}
				for _, l := range listeners {
					if st := l.Status(); st.Losses != 0 || st.Proofs < beats {
						t.Errorf("status %+v", st)
					}
					l.stop()
				}
			})
		})
	}
}

// A note of another listener says nothing about where this one's publishers notify, nor about what it will hear later.
func TestTheNoteOfAnotherIsHalfAProof(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		spoil  func(*peer)
		spoilt bool
	}{
		"nothing is wrong":           {func(*peer) {}, false},
		"the pool leads elsewhere":   {func(p *peer) { p.elsewhere = true }, true},
		"all is heard 20s late":      {func(p *peer) { p.delay = 20 * time.Second }, true},
		"all is heard a second late": {func(p *peer) { p.delay = time.Second }, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				pg, all, listeners := peers(t, 3, nil)
				time.Sleep(33 * time.Second)
				first := listeners[0]
				first.must(t, notify.Proven)
				all[0].with(func() { c.spoil(all[0]) })
				start := time.Now()
				lied := false
				for time.Since(start) < 2*time.Minute {
					time.Sleep(time.Second)
					synctest.Wait()
					all[0].mu.Lock()
					wrong := all[0].elsewhere || all[0].delay > 15*time.Second
					all[0].mu.Unlock()
					lied = lied || wrong && time.Since(start) > 15*time.Second && first.Healthy()
					for _, l := range listeners[1:] {
						if !l.Healthy() {
							t.Fatalf("another listener: %+v", l.Status())
						}
					}
				}
				if lied {
					t.Error("healthy for longer than 15s")
				}
				pg.Notify("news", "at the end")
				time.Sleep(2 * time.Second)
				if !c.spoilt && !first.heard("at the end") {
					t.Error("nothing heard")
				}
				if st := first.Status(); (st.Losses > 0) != c.spoilt || first.Healthy() == c.spoilt {
					t.Errorf("status %+v", st)
				}
				for _, l := range listeners {
					l.stop()
				}
				time.Sleep(time.Minute)
			})
		})
	}
}

// A pooler may have lent a server on which the LISTEN of another client has remained, for as long as a statement takes.
func TestANoteInTheMiddleOfAStatementIsNoProof(t *testing.T) {
	t.Parallel()
	for name, inTheMiddle := range map[string]bool{"while it waits": false, "in the middle of a statement": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				pg, all, listeners := peers(t, 1, nil)
				l := listeners[0]
				time.Sleep(time.Second)
				l.must(t, notify.Proven)
				time.Sleep(6 * time.Second)
				note := func() { pg.Notify(notify.ProofChannel, "another's "+pg.Stamp()) }
				asked := false
				pg.OnExecute(func(sql string) *pgproto3.ErrorResponse {
					if asked = strings.HasPrefix(sql, "listen "); asked && inTheMiddle {
						note()
						time.Sleep(time.Millisecond) // it is sent before the answer
					}
					return nil
				})
				_, stop := l.share(t, "other", &recorder{})
				synctest.Wait()
				time.Sleep(10 * time.Millisecond)
				if !inTheMiddle {
					note()
				}
				time.Sleep(1100 * time.Millisecond)
				if notes, looks := all[0].counts(); looks != map[bool]int{true: 0, false: 1}[inTheMiddle] || notes != 1 {
					t.Errorf("%d looks, %d notes", looks, notes)
				}
				stop()
				l.stop()
			})
		})
	}
}

// A server that does not tell who it is gets notes all the same, each listener's for itself.
func TestAServerThatDoesNotTellWhoItIs(t *testing.T) {
	virtual(t, notify.ListenerConfig{}, func(t *testing.T, pg *scripted, l *listening) {
		l.must(t, notify.Proven)
		pg.with(func() { pg.discreet = true })
		pg.CutAll()
		time.Sleep(2 * time.Second)
		l.must(t, notify.Proven)
		before := pg.proofs
		for range 100 {
			pg.Notify(notify.ProofChannel, "another's "+pg.Stamp())
			time.Sleep(6 * time.Second)
			l.must(t, notify.Proven)
		}
		if st := l.Status(); pg.looks != 0 || pg.proofs != before || pg.plains < 60 || st.Losses != 1 {
			t.Errorf("%d looks, %d stamped notes after the first, %d plain ones; status %+v", pg.looks, pg.proofs-before, pg.plains, st)
		}
	})
}
