package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/outbox"
	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

// box is an outbox in a database of its own, and the program that uses it.
type box struct {
	t     *testing.T
	db    *postgres.Database
	url   string // through a pooler in transaction mode
	ex    *executor.Executor
	store *outbox.Store
}

func newBox(t *testing.T) *box {
	t.Helper()
	s := postgres.Start(t, postgres.Options{})
	b := &box{t: t, db: s.NewDatabase(t)}
	b.url = pgbouncer.Start(t, s, pgbouncer.Options{}).URL(b.db.Name)
	pool, err := pgxpool.New(t.Context(), b.db.URL)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	if b.ex, err = executor.New(pool, executor.Config{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = b.ex.Close(context.WithoutCancel(t.Context())) })
	if b.store, err = outbox.New(b.ex, outbox.Config{Logger: slog.New(slog.DiscardHandler)}); err != nil {
		t.Fatal(err)
	}
	return b
}

// run runs an outbox command and returns what it prints.
func (b *box) run(args ...string) string {
	b.t.Helper()
	code, stdout, stderr := command(b.t.Context(), append([]string{"outbox", "--url", b.url}, args...)...)
	if code != exitOK || stderr != "" {
		b.t.Fatalf("%v: status %d, %s%s", args, code, stdout, stderr)
	}
	return stdout
}

// refuse runs an outbox command that must fail, and returns why it did.
func (b *box) refuse(args ...string) string {
	b.t.Helper()
	code, stdout, stderr := command(b.t.Context(), append([]string{"outbox", "--url", b.url}, args...)...)
	if code != exitFailed || stdout != "" {
		b.t.Fatalf("%v: status %d, %s%s", args, code, stdout, stderr)
	}
	return stderr
}

func (b *box) publish(events ...outbox.Event) {
	b.t.Helper()
	err := b.ex.InTx(b.t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
		return b.store.Publish(ctx, tx, events...)
	})
	if err != nil {
		b.t.Fatal(err)
	}
}

// dispatch delivers to a subscription until a condition holds.
func (b *box) dispatch(name string, handle outbox.HandlerFunc, until func(outbox.SubscriptionStatus) bool) {
	b.t.Helper()
	sub, err := b.store.Subscribe(b.t.Context(), name, outbox.SubscriptionConfig{SkipOnDead: true})
	if err != nil {
		b.t.Fatal(err)
	}
	d, err := outbox.NewDispatcher(sub, handle, outbox.DispatcherConfig{MaxAttempts: 1, PollInterval: 20 * time.Millisecond})
	if err != nil {
		b.t.Fatal(err)
	}
	ctx, stop := context.WithCancel(b.t.Context())
	ended := make(chan error, 1)
	go func() { ended <- d.Run(ctx) }()
	b.await(func() bool { return until(b.status(name)) })
	stop()
	if err := <-ended; err != nil {
		b.t.Fatal(err)
	}
}

// status is what the command says of a subscription; the zero value if there is none.
func (b *box) status(name string) outbox.SubscriptionStatus {
	b.t.Helper()
	var st outbox.Status
	if err := json.Unmarshal([]byte(b.run("status", "--json")), &st); err != nil {
		b.t.Fatal(err)
	}
	for _, sub := range st.Subscriptions {
		if sub.Name == name {
			return sub
		}
	}
	return outbox.SubscriptionStatus{}
}

func (b *box) await(ok func() bool) {
	b.t.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for !ok() {
		if time.Now().After(deadline) {
			b.t.Fatal("it did not happen in 30 s")
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func TestOutboxMigrate(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	if said := b.refuse("status"); !strings.Contains(said, "bounceproof outbox migrate") {
		t.Errorf("without tables: %s", said)
	}
	for _, args := range [][]string{{"migrate"}, {"migrate"}, {"migrate", "--rebase"}} { // the second time there is nothing to do
		if said := b.run(args...); said != "The outbox in schema outbox is ready.\n" {
			t.Error(said)
		}
	}
	if said := b.run("status"); !strings.HasPrefix(said, "Schema outbox: 16 lanes") || !strings.Contains(said, "no subscription") {
		t.Error(said)
	}
	if said := b.refuse("migrate", "--lanes", "4"); !strings.Contains(said, "lanes") {
		t.Errorf("another number of lanes: %s", said)
	}
	b.run("migrate", "--schema", "second", "--lanes", "4")
	if said := b.run("status", "--schema", "second"); !strings.HasPrefix(said, "Schema second: 4 lanes") {
		t.Error(said)
	}
	if said := b.refuse("migrate", "--schema", "no good"); !strings.Contains(said, "schema") {
		t.Error(said)
	}
}

func TestOutboxWithoutServer(t *testing.T) {
	t.Parallel()
	code, stdout, stderr := command(t.Context(), "outbox", "migrate", "--url", "postgres://app:s3cr3t@127.0.0.1:1/x")
	if code != exitFailed || stdout != "" || !strings.Contains(stderr, "connection refused") || strings.Contains(stderr, "s3cr3t") {
		t.Errorf("status %d, %s%s", code, stdout, stderr)
	}
}

func TestOutboxReadsTheEnvironment(t *testing.T) {
	b := newBox(t)
	t.Setenv(envURL, b.url)
	if code, _, stderr := command(t.Context(), "outbox", "migrate"); code != exitOK {
		t.Errorf("status %d, %s", code, stderr)
	}
}

func TestOutboxDecidesAboutDeadEvents(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	b.run("migrate")
	for i := range 3 {
		b.publish(outbox.Event{Type: "test", Key: fmt.Sprintf("key-%d", i), Payload: []byte("x")})
	}
	var seqs []int64
	fail := func(_ context.Context, d outbox.Delivery) error { return errors.New("no") }
	b.dispatch("mailer", fail, func(s outbox.SubscriptionStatus) bool { return s.Dead == 3 })
	rows, err := b.ex.Query(t.Context(), "select seq from outbox.failed order by seq")
	if err == nil {
		seqs, err = pgx.CollectRows(rows, pgx.RowTo[int64])
	}
	if err != nil || len(seqs) != 3 {
		t.Fatal(seqs, err)
	}

	for _, args := range [][]string{{"retry", "mailer"}, {"discard", "mailer"}, {"retry", "mailer", "1", "--all"}} {
		if said := b.refuse(args...); !strings.Contains(said, "--all") {
			t.Errorf("%v: %s", args, said)
		}
	}
	if said := b.refuse("retry", "mailer", "x"); !strings.Contains(said, "no sequence number") {
		t.Error(said)
	}
	if said := b.run("discard", "mailer", fmt.Sprint(seqs[1])); said != "1 dead event discarded.\n" {
		t.Error(said)
	}
	if said := b.run("retry", "mailer", fmt.Sprint(seqs[0]), fmt.Sprint(seqs[1])); said != "1 dead event retried.\n" {
		t.Error(said)
	}
	if s := b.status("mailer"); s.Dead != 1 || s.Retrying != 1 || !s.SkipOnDead {
		t.Errorf("%+v", s)
	}
	if said := b.run("retry", "mailer", "--all"); said != "1 dead event retried.\n" {
		t.Error(said)
	}
	var again atomic.Int64
	succeed := func(context.Context, outbox.Delivery) error { again.Add(1); return nil }
	b.dispatch("mailer", succeed, func(s outbox.SubscriptionStatus) bool { return s.Dead+s.Retrying+s.Parked == 0 })
	if n := again.Load(); n != 2 {
		t.Errorf("%d events came again, want 2", n)
	}
	if said := b.run("discard", "mailer", "--all"); said != "no dead events discarded.\n" {
		t.Error(said)
	}
}

func TestOutboxReplaysAndUnsubscribes(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	b.run("migrate")
	b.publish(outbox.Event{Type: "test"}, outbox.Event{Type: "test"})
	none := func(s outbox.SubscriptionStatus) bool { return s.Pending == 0 }
	succeed := func(context.Context, outbox.Delivery) error { return nil }
	b.dispatch("mailer", succeed, none)
	if said := b.run("replay", "mailer", "--from", "earliest"); said != "Subscription mailer goes on from earliest.\n" {
		t.Error(said)
	}
	if s := b.status("mailer"); s.Pending != 2 || !s.SkipOnDead {
		t.Errorf("%+v", s)
	}
	b.run("replay", "mailer", "--from", "now")
	if s := b.status("mailer"); s.Pending != 0 {
		t.Errorf("%+v", s)
	}
	b.run("replay", "mailer", "--from", "90m")
	if s := b.status("mailer"); s.Pending != 2 {
		t.Errorf("%+v", s)
	}
	said := b.run("status", "--lanes")
	for _, want := range []string{"│ mailer", "Lanes of mailer:", "│ 15 "} {
		if !strings.Contains(said, want) {
			t.Errorf("%q is not in\n%s", want, said)
		}
	}
	// A name that is misspelt makes no subscription.
	for _, args := range [][]string{{"replay", "mialer", "--from", "now"}, {"retry", "mialer", "--all"}, {"unsubscribe", "mialer"}} {
		if said := b.refuse(args...); !strings.Contains(said, `no subscription "mialer"`) {
			t.Errorf("%v: %s", args, said)
		}
	}
	if s := b.status("mialer"); s.Name != "" {
		t.Errorf("there is one: %+v", s)
	}
	b.run("unsubscribe", "mailer")
	if s := b.status("mailer"); s.Name != "" {
		t.Errorf("it is still there: %+v", s)
	}
}

func TestParseStart(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 1, 31, 12, 0, 0, 0, time.UTC)
	for from, want := range map[string]outbox.Start{
		"earliest": outbox.Earliest, "now": outbox.Now,
		"90m":                  outbox.At(time.Date(2026, 1, 31, 10, 30, 0, 0, time.UTC)),
		"2026-01-30T00:00:00Z": outbox.At(time.Date(2026, 1, 30, 0, 0, 0, 0, time.UTC)),
	} {
		if got, err := parseStart(from, now); err != nil || got != want {
			t.Errorf("%s: %v, %v", from, got, err)
		}
	}
	for _, from := range []string{"", "yesterday", "-5m", "0s", "2026-01-30"} {
		if _, err := parseStart(from, now); err == nil {
			t.Errorf("%q is accepted", from)
		}
	}
}

func TestOutboxTail(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	b.run("migrate")
	b.publish(
		outbox.Event{Type: "order.paid", Key: "7", Payload: []byte(`{"id":7}`), Headers: map[string]string{"a": "b"}},
		outbox.Event{Type: "order.paid", Key: "7", Payload: []byte("\xff\x00")},
	)
	var got []eventJSON
	for line := range strings.Lines(b.run("tail", "--from", "earliest", "--json", "-n", "2")) {
		var e eventJSON
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			t.Fatal(err)
		}
		if e.Seq == 0 || e.PublishedAt.IsZero() {
			t.Error(line)
		}
		e.Seq, e.Lane, e.PublishedAt = 0, 0, time.Time{}
		got = append(got, e)
	}
	want := []eventJSON{
		{Type: "order.paid", Key: "7", Payload: json.RawMessage(`{"id":7}`), Headers: map[string]string{"a": "b"}},
		{Type: "order.paid", Key: "7", Base64: []byte("\xff\x00")},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	lines := strings.Split(b.run("tail", "--from", "earliest", "-n", "2"), "\n")
	if !strings.HasSuffix(lines[0], `  order.paid  7  {"id":7}`) || !strings.HasSuffix(lines[1], "  order.paid  7  (2 bytes)") {
		t.Errorf("%q", lines)
	}
}

func TestOutboxTailLeavesNothing(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	b.run("migrate")
	// One that was killed long ago, one that was killed just now (it may be about to start), and one of somebody else's.
	old := tailPrefix + "2026-01-01T00:00:00Z abc"
	young := tailPrefix + time.Now().UTC().Format(time.RFC3339) + " abc"
	for _, name := range []string{old, young, "tail recorder"} {
		if _, err := b.store.Subscribe(t.Context(), name, outbox.SubscriptionConfig{}); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	out := &watched{text: "first", found: cancel}
	code := make(chan int, 1)
	go func() { code <- run(ctx, []string{"outbox", "tail", "--url", b.url}, out, out) }()
	b.await(func() bool { // what was published before it began is not its business
		b.publish(outbox.Event{Type: "first"})
		return ctx.Err() != nil
	})
	if c := <-code; c != exitOK {
		t.Errorf("an interrupted tail: status %d\n%s", c, out)
	}
	st, err := b.store.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var left []string
	for _, sub := range st.Subscriptions {
		left = append(left, sub.Name)
	}
	if diff := cmp.Diff([]string{young, "tail recorder"}, left); diff != "" {
		t.Error(diff)
	}
}

func TestPrintable(t *testing.T) {
	t.Parallel()
	for s, want := range map[string]string{
		"plain": "plain", "": "", "a\nb": `"a\nb"`, "\x1b[31m": `"\x1b[31m"`, "\xff": "(1 byte)",
		"0123456789ab": "012345678…", "äöüäöüäöüäöü": "äöüäöüäöü…",
	} {
		if got := printable(s, 10); got != want {
			t.Errorf("%q: %q, want %q", s, got, want)
		}
	}
}
