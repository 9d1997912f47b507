package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/internal/await"
	"github.com/bounceproof/bounceproof/outbox"
	"github.com/bounceproof/bounceproof/testenv/place"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

// fixture is an outbox in a database of its own, and the program that uses it.
type fixture struct {
	t     *testing.T
	db    *postgres.Database
	url   string // through a pooler in transaction mode
	ex    *executor.Executor
	store *outbox.Store
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	at := place.New(place.TransactionRaw, "", "").Start(t)
	f := &fixture{t: t, db: at.DB, url: at.URL}
	pool, err := pgxpool.New(t.Context(), f.db.URL)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	if f.ex, err = executor.New(pool, executor.Config{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.ex.Close(context.WithoutCancel(t.Context())) })
	if f.store, err = outbox.New(f.ex, outbox.Config{Logger: slog.New(slog.DiscardHandler)}); err != nil {
		t.Fatal(err)
	}
	return f
}

// run runs an outbox command and returns what it prints.
func (f *fixture) run(args ...string) string {
	f.t.Helper()
	code, stdout, stderr := command(f.t.Context(), append([]string{"outbox", "--url", f.url}, args...)...)
	if code != exitOK || stderr != "" {
		f.t.Fatalf("%v: status %d, %s%s", args, code, stdout, stderr)
	}
	return stdout
}

// refuse runs an outbox command that must fail, and returns why it did.
func (f *fixture) refuse(args ...string) string {
	f.t.Helper()
	code, stdout, stderr := command(f.t.Context(), append([]string{"outbox", "--url", f.url}, args...)...)
	if code != exitFailed || stdout != "" {
		f.t.Fatalf("%v: status %d, %s%s", args, code, stdout, stderr)
	}
	return stderr
}

func (f *fixture) publish(events ...outbox.Event) {
	f.t.Helper()
	err := f.ex.InTx(f.t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
		return f.store.Publish(ctx, tx, events...)
	})
	if err != nil {
		f.t.Fatal(err)
	}
}

// dispatch delivers to a subscription until a condition holds.
func (f *fixture) dispatch(name string, handle outbox.HandlerFunc, until func(subscriptionJSON) bool) {
	f.t.Helper()
	sub, err := f.store.Subscribe(f.t.Context(), name, outbox.SubscriptionConfig{SkipOnDead: true})
	if err != nil {
		f.t.Fatal(err)
	}
	d, err := outbox.NewDispatcher(sub, handle, outbox.DispatcherConfig{MaxAttempts: 1, PollInterval: 20 * time.Millisecond})
	if err != nil {
		f.t.Fatal(err)
	}
	ctx, stop := context.WithCancel(f.t.Context())
	ended := make(chan error, 1)
	go func() { ended <- d.Run(ctx) }()
	f.await(func() bool { return until(f.status(name)) })
	stop()
	if err := <-ended; err != nil {
		f.t.Fatal(err)
	}
}

// status is what the command says of a subscription; the zero value if there is none.
func (f *fixture) status(name string) subscriptionJSON {
	f.t.Helper()
	var st statusJSON
	if err := json.Unmarshal([]byte(f.run("status", "--json")), &st); err != nil {
		f.t.Fatal(err)
	}
	for _, sub := range st.Subscriptions {
		if sub.Name == name {
			return sub
		}
	}
	return subscriptionJSON{}
}

func (f *fixture) await(ok func() bool) {
	f.t.Helper()
	await.True(f.t, "what the command was to bring about", ok)
}

func TestOutboxMigrate(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	if said := f.refuse("status"); !strings.Contains(said, "bounceproof outbox migrate") {
		t.Errorf("without tables: %s", said)
	}
	for _, args := range [][]string{{"migrate"}, {"migrate"}, {"migrate", "--rebase"}} { // the second time there is nothing to do
		if said := f.run(args...); said != "The outbox in schema outbox is ready.\n" {
			t.Error(said)
		}
	}
	if said := f.run("status"); !strings.HasPrefix(said, "Schema outbox: 16 lanes") || !strings.Contains(said, "no subscription") {
		t.Error(said)
	}
	if said := f.refuse("migrate", "--lanes", "4"); !strings.Contains(said, "lanes") {
		t.Errorf("another number of lanes: %s", said)
	}
	f.run("migrate", "--schema", "second", "--lanes", "4")
	if said := f.run("status", "--schema", "second"); !strings.HasPrefix(said, "Schema second: 4 lanes") {
		t.Error(said)
	}
	if said := f.refuse("migrate", "--schema", "no good"); !strings.Contains(said, `Config.Schema "no good"`) {
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
	f := newFixture(t)
	t.Setenv(envURL, f.url)
	if code, _, stderr := command(t.Context(), "outbox", "migrate"); code != exitOK {
		t.Errorf("status %d, %s", code, stderr)
	}
}

func TestOutboxDecidesAboutDeadEvents(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.run("migrate")
	for i := range 3 {
		f.publish(outbox.Event{Type: "test", Key: fmt.Sprintf("key-%d", i), Payload: []byte("x")})
	}
	var seqs []int64
	fail := func(_ context.Context, d outbox.Delivery) error { return errors.New("no") }
	f.dispatch("mailer", fail, func(s subscriptionJSON) bool { return s.Dead == 3 })
	rows, err := f.ex.Query(t.Context(), "select seq from outbox.failed order by seq")
	if err == nil {
		seqs, err = pgx.CollectRows(rows, pgx.RowTo[int64])
	}
	if err != nil || len(seqs) != 3 {
		t.Fatal(seqs, err)
	}

	for _, args := range [][]string{{"retry", "mailer"}, {"discard", "mailer"}, {"retry", "mailer", "1", "--all"}} {
		if said := f.refuse(args...); !strings.Contains(said, "--all") {
			t.Errorf("%v: %s", args, said)
		}
	}
	for _, arg := range []string{"x", "0", "-1", "postgres://app:sesame@h/db"} {
		if said := f.refuse("retry", "mailer", "--", arg); !strings.Contains(said, "argument 2 is no sequence number") || strings.Contains(said, "sesame") {
			t.Error(said)
		}
	}
	if said := f.refuse("retry", "mailer", "99"); !strings.Contains(said, "no event 99 has failed in subscription mailer") {
		t.Error(said)
	}
	if said := f.run("discard", "mailer", fmt.Sprint(seqs[1])); said != "1 dead event discarded.\n" {
		t.Error(said)
	}
	// What is known is done, what is not is named, and the status is that of a failure.
	code, stdout, stderr := command(t.Context(), "outbox", "--url", f.url, "retry", "mailer", fmt.Sprint(seqs[0]), fmt.Sprint(seqs[1]))
	if code != exitFailed || stdout != "1 dead event retried.\n" || !strings.Contains(stderr, fmt.Sprintf("not retried: no event %d has failed", seqs[1])) {
		t.Errorf("status %d, %s%s", code, stdout, stderr)
	}
	if said := f.refuse("discard", "mailer", fmt.Sprint(seqs[0])); !strings.Contains(said, "is not dead, it will be tried again by itself") {
		t.Error(said)
	}
	if s := f.status("mailer"); s.Dead != 1 || s.Retrying != 1 || !s.SkipOnDead {
		t.Errorf("%+v", s)
	}
	if said := f.run("retry", "mailer", "--all"); said != "1 dead event retried.\n" {
		t.Error(said)
	}
	var again atomic.Int64
	succeed := func(context.Context, outbox.Delivery) error { again.Add(1); return nil }
	f.dispatch("mailer", succeed, func(s subscriptionJSON) bool { return s.Dead+s.Retrying+s.Parked == 0 })
	if n := again.Load(); n != 2 {
		t.Errorf("%d events came again, want 2", n)
	}
	if said := f.run("discard", "mailer", "--all"); said != "no dead events discarded.\n" {
		t.Error(said)
	}
}

func TestOutboxReplaysAndUnsubscribes(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.run("migrate")
	f.publish(outbox.Event{Type: "test"}, outbox.Event{Type: "test"})
	none := func(s subscriptionJSON) bool { return s.Pending == 0 }
	succeed := func(context.Context, outbox.Delivery) error { return nil }
	f.dispatch("mailer", succeed, none)
	if said := f.run("replay", "mailer", "--from", "earliest"); said != "Subscription mailer goes on from earliest.\n" {
		t.Error(said)
	}
	if s := f.status("mailer"); s.Pending != 2 || !s.SkipOnDead {
		t.Errorf("%+v", s)
	}
	f.run("replay", "mailer", "--from", "now")
	if s := f.status("mailer"); s.Pending != 0 {
		t.Errorf("%+v", s)
	}
	f.run("replay", "mailer", "--from", "90m")
	if s := f.status("mailer"); s.Pending != 2 {
		t.Errorf("%+v", s)
	}
	said := f.run("status", "--lanes")
	for _, want := range []string{"│ mailer", "Lanes of mailer:", "│ 15 "} {
		if !strings.Contains(said, want) {
			t.Errorf("%q is not in\n%s", want, said)
		}
	}
	// A name that is misspelt makes no subscription.
	for _, args := range [][]string{{"replay", "mialer", "--from", "now"}, {"retry", "mialer", "--all"}, {"unsubscribe", "mialer"}} {
		if said := f.refuse(args...); !strings.Contains(said, `no subscription "mialer"; there are "mailer"`) {
			t.Errorf("%v: %s", args, said)
		}
	}
	if s := f.status("mialer"); s.Name != "" {
		t.Errorf("there is one: %+v", s)
	}
	f.run("unsubscribe", "mailer")
	if s := f.status("mailer"); s.Name != "" {
		t.Errorf("it is still there: %+v", s)
	}
}

func TestParseStart(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 1, 31, 12, 0, 0, 0, time.UTC)
	for from, want := range map[string]outbox.Start{
		"earliest": outbox.StartEarliest(), "now": outbox.StartNow(),
		"90m":                  outbox.StartAt(time.Date(2026, 1, 31, 10, 30, 0, 0, time.UTC)),
		"2026-01-30T00:00:00Z": outbox.StartAt(time.Date(2026, 1, 30, 0, 0, 0, 0, time.UTC)),
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

// A missing right is named, with whose it is. The control: with it the command works, tail with no more than the right to read.
func TestOutboxNamesAMissingRight(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.run("migrate")
	f.publish(outbox.Event{Type: "seen"})
	role := "reader_" + f.db.Name
	exec := func(sql string) {
		t.Helper()
		if _, err := f.ex.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	exec("create role " + role + " login password '" + postgres.Password() + "'")
	t.Cleanup(func() {
		_, _ = f.ex.Exec(context.WithoutCancel(t.Context()), "drop owned by "+role)
		_, _ = f.ex.Exec(context.WithoutCancel(t.Context()), "drop role "+role)
	})
	exec("grant usage on schema outbox to " + role)
	exec("grant select on all tables in schema outbox to " + role)
	f.url = strings.Replace(f.db.URL, "postgres@", role+"@", 1)
	for _, args := range [][]string{{"status"}, {"tail", "--from", "earliest", "-n", "1"}} {
		if said := f.refuse(args...); !strings.Contains(said, "event_seq") || !strings.Contains(said, "user "+role+" needs") {
			t.Errorf("%v: %s", args, said)
		}
	}
	exec("grant select on sequence outbox.event_seq to " + role)
	f.run("status")
	if said := f.run("tail", "--from", "earliest", "-n", "1"); !strings.Contains(said, "seen") {
		t.Error(said)
	}
}

// closed is a pipe whose reader has gone, as head does.
type closed struct{}

func (closed) Write([]byte) (int, error) {
	return 0, &os.PathError{Op: "write", Path: "|1", Err: syscall.EPIPE}
}

func TestOutboxTailEndsWithItsReader(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.run("migrate")
	f.publish(outbox.Event{Type: "test"})
	var stderr strings.Builder
	if code := run(t.Context(), []string{"outbox", "tail", "--from", "earliest", "--url", f.url}, closed{}, &stderr); code != exitOK || stderr.Len() > 0 {
		t.Errorf("status %d, %s", code, &stderr)
	}
}

// A status fits into a narrow terminal, and its JSON has the usual names.
func TestOutboxStatusFits(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 1, 31, 12, 0, 0, 0, time.UTC)
	st := &outbox.Status{Schema: "outbox", Lanes: 16, Tip: 1234567, NewestTick: 9, Ticks: 120, Scheduled: 3, Subscriptions: []outbox.SubscriptionStatus{
		{
			Name: "a subscription with a name that is rather long, as some programs make them", Dispatchers: 2, Pending: 1234567, Oldest: at,
			Retrying: 12, Parked: 1300, Dead: 4, Lanes: []outbox.LaneStatus{
				{Lane: 0, Owner: "host-1.example/4711/abcdef", Alive: true, Token: 12, From: 7, To: 9, Pos: 1200000, Pending: 1234567},
				{Lane: 15, From: 9},
			},
		},
		{Name: "mailer"},
	}}
	var all strings.Builder
	for _, width := range []int{60, 120} {
		var out strings.Builder
		printStatus(&view{out: &out, terminal: true, width: width}, st, true, at.Add(90*time.Second))
		for line := range strings.Lines(out.String()) {
			if n := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); n > width {
				t.Errorf("%d columns at a width of %d: %q", n, width, line)
			}
		}
		fmt.Fprintf(&all, "--- %d columns\n%s", width, &out)
	}
	golden(t, "outbox_status", all.String())
	document, err := json.MarshalIndent(jsonStatus(st), "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	snakeCase(t, string(document))
	golden(t, "outbox_status_json", string(document)+"\n")
	if none, err := json.Marshal(jsonStatus(&outbox.Status{})); err != nil || !strings.Contains(string(none), `"subscriptions":[]`) {
		t.Errorf("%s, %v", none, err)
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
