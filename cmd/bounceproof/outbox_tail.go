package main

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/jedib0t/go-pretty/v6/text"
	"github.com/spf13/cobra"

	"github.com/bounceproof/bounceproof/outbox"
)

const (
	tailPrefix = "tail "
	// tailLost is how old a tail without a dispatcher is when the next one removes it: it was killed, and keeps events from
	// being swept.
	tailLost = time.Hour
	// tailWidth is how much of a payload a line shows.
	tailWidth = 100
)

func newOutboxTail(f *outboxFlags) *cobra.Command {
	var from string
	var asJSON bool
	var limit int
	cmd := &cobra.Command{
		Use:   "tail",
		Short: "Print events as they are committed",
		Long: `Print events as they are committed, until it is interrupted.

It is a subscription of its own, which nobody else notices, and which is removed at the end. Events of one key come in
order. Payloads are shortened, except with --json, where they are base64 if they are no JSON.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			start, err := parseStart(from, time.Now())
			if err != nil {
				return err
			}
			f.timeout = 0 // it goes on
			return f.with(cmd.Context(), func(ctx context.Context, store *outbox.Store) error {
				t := &tail{out: cmd.OutOrStdout(), view: newView(cmd.OutOrStdout()), json: asJSON, limit: limit}
				return t.run(ctx, store, start)
			})
		},
	}
	cmd.Flags().StringVar(&from, "from", "now", "earliest, now, a time, or a duration ago")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object a line")
	cmd.Flags().IntVarP(&limit, "number", "n", 0, "end after so many events (0 is never)")
	return cmd
}

// tail prints deliveries.
type tail struct {
	out   io.Writer
	view  *view
	json  bool
	limit int

	mu      sync.Mutex // guards what follows, and the output
	printed int
	err     error
	stop    context.CancelFunc
}

func (t *tail) run(ctx context.Context, store *outbox.Store, start outbox.Start) (err error) {
	if err := removeLost(ctx, store, time.Now()); err != nil {
		return err
	}
	name := tailPrefix + time.Now().UTC().Format(time.RFC3339) + " " + strings.ToLower(rand.Text()[:8])
	sub, err := store.Subscribe(ctx, name, outbox.SubscriptionConfig{Start: start})
	if err != nil {
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		_, removeErr := store.Unsubscribe(ctx, name)
		err = errors.Join(err, removeErr)
	}()
	d, err := outbox.NewDispatcher(sub, outbox.HandlerFunc(t.handle), outbox.DispatcherConfig{
		Concurrency: 1, PollInterval: 200 * time.Millisecond, MaxAttempts: 1, Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		return err
	}
	running, stop := context.WithCancel(ctx)
	defer stop()
	t.stop = stop
	err = d.Run(running)
	t.mu.Lock()
	defer t.mu.Unlock()
	return errors.Join(err, t.err)
}

// handle prints an event. Whether that worked makes no difference to the outbox.
func (t *tail) handle(_ context.Context, d outbox.Delivery) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.err != nil || t.limit > 0 && t.printed == t.limit {
		return nil
	}
	if t.json {
		t.err = json.NewEncoder(t.out).Encode(jsonDelivery(d))
	} else {
		_, t.err = fmt.Fprintln(t.out, t.line(d))
	}
	t.printed++
	if t.err != nil || t.printed == t.limit {
		t.stop()
	}
	return nil
}

func (t *tail) line(d outbox.Delivery) string {
	key := d.Key
	if key == "" {
		key = "-"
	}
	return fmt.Sprintf("%s  %d  %s  %s  %s",
		t.view.color(d.PublishedAt.Local().Format("15:04:05.000"), text.Faint), d.Seq,
		t.view.color(printable(d.Type, tailWidth), text.FgCyan), printable(key, tailWidth), printable(string(d.Payload), tailWidth))
}

// printable makes text of what may be anything, on one line and not longer than width runes.
func printable(s string, width int) string {
	if !utf8.ValidString(s) {
		return fmt.Sprintf("(%s)", some(len(s), "byte"))
	}
	if strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) {
		s = strconv.Quote(s)
	}
	if utf8.RuneCountInString(s) > width {
		s = string([]rune(s)[:width-1]) + "…"
	}
	return s
}

// eventJSON is a line of --json.
type eventJSON struct {
	Seq         int64             `json:"seq"`
	Lane        int               `json:"lane"`
	PublishedAt time.Time         `json:"published_at"`
	Type        string            `json:"type"`
	Key         string            `json:"key,omitempty"`
	Headers     map[string]string `json:"headers,omitempty"`
	Payload     json.RawMessage   `json:"payload,omitempty"`
	Base64      []byte            `json:"payload_base64,omitempty"`
}

func jsonDelivery(d outbox.Delivery) eventJSON {
	e := eventJSON{Seq: d.Seq, Lane: d.Lane, PublishedAt: d.PublishedAt, Type: d.Type, Key: d.Key, Headers: d.Headers}
	if json.Valid(d.Payload) {
		e.Payload = d.Payload
	} else {
		e.Base64 = d.Payload
	}
	return e
}

// removeLost removes tails that were killed.
func removeLost(ctx context.Context, store *outbox.Store, now time.Time) error {
	st, err := store.Status(ctx)
	if err != nil {
		return err
	}
	for _, sub := range st.Subscriptions {
		at, found := strings.CutPrefix(sub.Name, tailPrefix)
		if !found || sub.Dispatchers > 0 {
			continue
		}
		stamp, _, _ := strings.Cut(at, " ")
		if begun, err := time.Parse(time.RFC3339, stamp); err != nil || now.Sub(begun) < tailLost {
			continue
		}
		if _, err := store.Unsubscribe(ctx, sub.Name); err != nil {
			return err
		}
	}
	return nil
}
