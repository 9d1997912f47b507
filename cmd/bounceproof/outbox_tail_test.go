package main

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/bounceproof/bounceproof/outbox"
)

func TestOutboxTail(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.run("migrate")
	f.publish(
		outbox.Event{Type: "order.paid", Key: "7", Payload: []byte(`{"id":7}`), Headers: map[string]string{"a": "b"}},
		outbox.Event{Type: "order.paid", Key: "7", Payload: []byte("\xff\x00")},
	)
	var got []eventJSON
	for line := range strings.Lines(f.run("tail", "--from", "earliest", "--json", "-n", "2")) {
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
		{Type: "order.paid", Key: new("7"), Payload: json.RawMessage(`{"id":7}`), Headers: map[string]string{"a": "b"}},
		{Type: "order.paid", Key: new("7"), Payload: json.RawMessage("null"), Base64: []byte("\xff\x00")},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	lines := strings.Split(f.run("tail", "--from", "earliest", "-n", "2"), "\n")
	if !strings.HasSuffix(lines[0], `  order.paid  7  {"id":7}`) || !strings.HasSuffix(lines[1], "  order.paid  7  (2 bytes)") {
		t.Errorf("%q", lines)
	}
}

// A tail that ends in order, and one that is killed, leave nothing behind: there is nothing. Other subscriptions are not its business.
func TestOutboxTailLeavesNothing(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.run("migrate")
	if _, err := f.store.Subscribe(t.Context(), "tail recorder", outbox.SubscriptionConfig{}); err != nil {
		t.Fatal(err)
	}
	left := func() (names []string) {
		t.Helper()
		st, err := f.store.Status(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, sub := range st.Subscriptions {
			names = append(names, sub.Name)
		}
		return names
	}
	ctx, cancel := context.WithCancel(t.Context())
	var running []string
	out := &watched{text: "first", found: func() { running = left(); cancel() }} // as a SIGKILL finds it
	code := make(chan int, 1)
	go func() { code <- run(ctx, []string{"outbox", "tail", "--url", f.url}, out, out) }()
	f.await(func() bool { // what was published before it began is not its business
		f.publish(outbox.Event{Type: "first"})
		return ctx.Err() != nil
	})
	if c := <-code; c != exitOK {
		t.Errorf("an interrupted tail: status %d\n%s", c, out)
	}
	for _, names := range [][]string{running, left()} {
		if diff := cmp.Diff([]string{"tail recorder"}, names); diff != "" {
			t.Error(diff)
		}
	}
}
