package notify_test

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/notify"
)

// statement is one Exec that a fakeDB saw.
type statement struct {
	at    time.Duration // since the fakeDB was made
	sql   string
	notes []string // "channel payload" in the order sent
	args  []any
}

// fakeDB records statements. It takes no time unless told to.
type fakeDB struct {
	born time.Time
	hook func(ctx context.Context, n int) error // called for the n-th statement, counted from 1

	mu   sync.Mutex
	seen []statement
}

func newFakeDB() *fakeDB { return &fakeDB{born: time.Now()} }

func (db *fakeDB) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	st := statement{at: time.Since(db.born), sql: sql, args: args}
	switch last := args[len(args)-1].(type) {
	case []string:
		for i, channel := range args[len(args)-2].([]string) {
			st.notes = append(st.notes, channel+" "+last[i])
		}
	case string:
		st.notes = []string{args[len(args)-2].(string) + " " + last}
	}
	db.mu.Lock()
	db.seen = append(db.seen, st)
	n := len(db.seen)
	db.mu.Unlock()
	if db.hook != nil {
		if err := db.hook(ctx, n); err != nil {
			return pgconn.CommandTag{}, err
		}
	}
	return pgconn.NewCommandTag("SELECT 1"), nil
}

func (db *fakeDB) statements() []statement {
	db.mu.Lock()
	defer db.mu.Unlock()
	return slices.Clone(db.seen)
}

// times returns when the statements ran, in milliseconds.
func (db *fakeDB) times() []int64 {
	var ms []int64
	for _, st := range db.statements() {
		ms = append(ms, st.at.Milliseconds())
	}
	return ms
}

func newSender(t *testing.T, db notify.Execer, cfg notify.SenderConfig) *notify.Sender {
	t.Helper()
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	s, err := notify.NewSender(db, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func notifyAll(t *testing.T, s *notify.Sender, channel string, payloads ...string) {
	t.Helper()
	for _, p := range payloads {
		if err := s.Notify(channel, p); err != nil {
			t.Fatalf("Notify(%q) = %v", channel, err)
		}
	}
}
