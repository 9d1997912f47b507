package notify_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5/pgconn"
	"pgregory.net/rapid"

	"github.com/bounceproof/bounceproof/internal/logrec"
	"github.com/bounceproof/bounceproof/notify"
)

// refuse is a hook of a database whose encoding has no snowman.
func refuse(db *fakeDB) func(context.Context, int) error {
	return func(_ context.Context, n int) error {
		db.mu.Lock()
		defer db.mu.Unlock()
		if slices.ContainsFunc(db.seen[n-1].notes, func(note string) bool { return strings.Contains(note, "☃") }) {
			return &pgconn.PgError{Code: "22P05", Message: `character with byte sequence 0xe2 0x98 0x83 in encoding "UTF8" has no equivalent`}
		}
		return nil
	}
}

// taken returns the notes of the statements that the database did not refuse.
func taken(db *fakeDB) (notes []string) {
	for _, st := range db.statements() {
		if !slices.ContainsFunc(st.notes, func(note string) bool { return strings.Contains(note, "☃") }) {
			notes = append(notes, st.notes...)
		}
	}
	return notes
}

// One text that this database cannot represent costs nobody else anything: not its neighbours in the statement, with a
// payload or without, and not what comes later.
func TestRefusedNotificationIsGivenUpAlone(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newFakeDB()
		db.hook = refuse(db)
		log := &logrec.Recorder{}
		s := newSender(t, db, notify.SenderConfig{Logger: log.Logger()})
		notifyAll(t, s, "outbox", "")
		notifyAll(t, s, "a", "1", "☃", "é")
		notifyAll(t, s, "☃", "", "x")
		notifyAll(t, s, "b", "1")
		start := time.Now()
		var refused *pgconn.PgError
		if err := s.Flush(t.Context()); !errors.As(err, &refused) || refused.Code != "22P05" {
			t.Fatalf("Flush = %v, want the refusal of what was dropped", err)
		}
		if err := s.Flush(t.Context()); err != nil {
			t.Errorf("a second Flush = %v: what it waits for was not refused", err)
		}
		if took := time.Since(start); took > 200*time.Millisecond {
			t.Errorf("Flush took %v: the search is no failure and has no backoff", took)
		}
		if diff := cmp.Diff([]string{"outbox ", "a 1", "b 1", "a ", "a é"}, taken(db)); diff != "" {
			t.Errorf("(-want +got)\n%s", diff)
		}
		if second := db.statements()[1]; second.at != 10*time.Millisecond || len(second.notes) != 3 {
			t.Errorf("the second statement is %+v, want what cannot be at fault, a window later", second)
		}
		if st := s.Stats(); st.Dropped != 2 || st.Collapsed != 2 || st.Pending != 0 || st.Sent != 5 {
			t.Errorf("stats %+v", st)
		}
		notifyAll(t, s, "b", "2", "é")
		if err := s.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := taken(db); !slices.Contains(got, "b 2") || !slices.Contains(got, "b é") {
			t.Errorf("afterwards %q", got)
		}
		warnings := log.At(slog.LevelWarn)
		if len(warnings) != 1 || !strings.Contains(warnings[0], "sqlstate=22P05") || strings.Contains(log.All(), "0xe2") {
			t.Errorf("want one warning with the SQLSTATE and without the character:\n%s", log.All())
		}
	})
}

// A text of ASCII alone can be refused too, by a server that was built with smaller blocks (22023).
func TestRefusedASCIIIsFound(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newFakeDB()
		db.hook = func(_ context.Context, n int) error {
			db.mu.Lock()
			defer db.mu.Unlock()
			for _, note := range db.seen[n-1].notes {
				if len(note) > 4000 {
					return &pgconn.PgError{Code: "22023", Message: "payload string too long"}
				}
			}
			return nil
		}
		s := newSender(t, db, notify.SenderConfig{})
		for i := range 50 {
			notifyAll(t, s, "a", fmt.Sprint(i))
		}
		notifyAll(t, s, "b", strings.Repeat("x", 5000))
		notifyAll(t, s, "c", "")
		time.Sleep(time.Second)
		got := map[string]bool{}
		for _, st := range db.statements() {
			for _, note := range st.notes {
				got[note] = true
			}
		}
		for i := range 50 {
			if !got[fmt.Sprint("a ", i)] {
				t.Errorf("a %d did not go out", i)
			}
		}
		if st := s.Stats(); !got["b "] || !got["c "] || st.Dropped != 0 || st.Collapsed != 1 || st.Pending != 0 {
			t.Errorf("stats %+v", st)
		}
	})
}

// The search is bounded, in statements and in memory, and others do not wait for it.
func TestManyRefusedPayloadsBecomeOneEmptyOne(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newFakeDB()
		db.hook = refuse(db)
		s := newSender(t, db, notify.SenderConfig{})
		for i := range 900 {
			notifyAll(t, s, "a", fmt.Sprint("☃", i))
		}
		for i := range 100 { // one every 20ms, while the search goes on
			start := time.Since(db.born)
			notifyAll(t, s, "b", fmt.Sprint(i))
			time.Sleep(20 * time.Millisecond)
			synctest.Wait()
			sent := slices.ContainsFunc(db.statements(), func(st statement) bool {
				return st.at <= start+20*time.Millisecond && slices.Contains(st.notes, fmt.Sprint("b ", i))
			})
			if !sent && i > 0 { // the first shares the statement that is refused first
				t.Fatalf("b %d waited longer than two windows", i)
			}
		}
		if n := len(db.statements()); n > 310 {
			t.Errorf("%d statements", n)
		}
		if st := s.Stats(); st.Pending != 0 || st.Dropped != 0 || !slices.Contains(taken(db), "a ") {
			t.Errorf("stats %+v", st)
		}
	})
}

// Whatever comes together, is repeated, fails or is refused: what the server takes goes out as it is, of a payload that
// it refuses the channel does, and only a channel that it refuses is dropped.
func TestOnlyWhatIsRefusedIsGivenUp(t *testing.T) {
	t.Parallel()
	channels := []string{"a", "b", "é", "outbox", "☃"}
	payloads := []string{"", "1", "2", "3", "é", "éé", "☃", "1☃"}
	rapid.Check(t, func(rt *rapid.T) {
		steps := rapid.SliceOfN(rapid.IntRange(0, 60), 1, 60).Draw(rt, "steps")
		window := rapid.SampledFrom([]time.Duration{-1, time.Millisecond, 10 * time.Millisecond}).Draw(rt, "window")
		problem := ""
		synctest.Test(t, func(t *testing.T) {
			db := newFakeDB()
			var down bool
			refusing := refuse(db)
			failed := map[int]bool{}
			db.hook = func(ctx context.Context, n int) error {
				db.mu.Lock()
				fail := down
				failed[n-1] = fail
				db.mu.Unlock()
				if fail {
					return errors.New("down")
				}
				return refusing(ctx, n)
			}
			s := newSender(t, db, notify.SenderConfig{Window: window, RetryMax: 20 * time.Millisecond})
			type call struct {
				note string // as it has to go out; empty when its channel is refused
				at   time.Duration
			}
			var all []call
			for _, step := range steps {
				switch {
				case step < len(channels)*len(payloads):
					channel, payload := channels[step%len(channels)], payloads[step/len(channels)]
					notifyAll(t, s, channel, payload)
					n := call{channel + " " + payload, time.Since(db.born)}
					if strings.Contains(payload, "☃") {
						n.note = channel + " "
					}
					if channel == "☃" {
						n.note = ""
					}
					all = append(all, n)
				case step < 48:
					db.mu.Lock()
					down = !down
					db.mu.Unlock()
				default:
					time.Sleep(time.Duration(step-48) * time.Millisecond)
				}
			}
			db.mu.Lock()
			down = false
			db.mu.Unlock()
			before := len(db.statements())
			flushed := s.Flush(t.Context())
			got := db.statements()
			if n := len(got) - before; n > 4*len(steps)+4 {
				problem = fmt.Sprint(n, " statements")
			}
			channelRefused := false
			for _, n := range all {
				if n.note == "" {
					channelRefused = true
					continue
				}
				found := false
				for i, st := range got {
					refused := slices.ContainsFunc(st.notes, func(note string) bool { return strings.Contains(note, "☃") })
					found = found || st.at >= n.at && !failed[i] && !refused && slices.Contains(st.notes, n.note)
				}
				if !found {
					problem = fmt.Sprintf("%+v did not go out: %+v", n, got)
				}
			}
			var refusal *pgconn.PgError
			if flushed != nil && (!channelRefused || !errors.As(flushed, &refusal)) {
				problem = fmt.Sprint("Flush = ", flushed)
			}
			for i := 1; i < len(got); i++ {
				if d := got[i].at - got[i-1].at; d < window {
					problem = fmt.Sprintf("statements %v apart", d)
				}
			}
			if st := s.Stats(); st.Pending != 0 || st.Dropped > 0 != channelRefused {
				problem = fmt.Sprintf("stats %+v", st)
			}
		})
		if problem != "" {
			rt.Fatal(problem)
		}
	})
}
