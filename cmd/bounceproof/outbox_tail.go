package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/jedib0t/go-pretty/v6/text"
	"github.com/spf13/cobra"

	"github.com/bounceproof/bounceproof/outbox"
)

// tailWidth is how much of a payload a line shows.
const tailWidth = 100

func newOutboxTail(f *outboxFlags) *cobra.Command {
	var from string
	var asJSON bool
	var limit int
	cmd := &cobra.Command{
		Use:   "tail",
		Short: "Print events as they are committed",
		Long: `Print events as they are committed, until it is interrupted.

It reads the log and writes nothing to it: nobody notices, retention does not wait for it, and nothing is left behind however
it ends. Events of one key come in order. Payloads are shortened, except with --json, where they are base64 if they are no JSON,
and null is what an event does not have.

Exit status:
  0    it was interrupted, or --number events were printed
  1    it cannot read the log, or cannot print`,
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
	out     io.Writer
	view    *view
	json    bool
	limit   int
	printed int
}

// errEnough ends a tail that has printed what it was asked for.
var errEnough = errors.New("enough")

func (t *tail) run(ctx context.Context, store *outbox.Store, start outbox.Start) error {
	err := store.Tail(ctx, start, t.handle)
	if errors.Is(err, errEnough) || errors.Is(err, syscall.EPIPE) { // whoever read it has what they want
		return nil
	}
	return err
}

// handle prints an event.
func (t *tail) handle(_ context.Context, d outbox.Delivery) (err error) {
	if t.json {
		err = json.NewEncoder(visibleWriter{t.out}).Encode(jsonDelivery(d))
	} else {
		_, err = fmt.Fprintln(t.out, t.line(d))
	}
	t.printed++
	if err == nil && t.printed == t.limit {
		err = errEnough
	}
	return err
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

// eventJSON is a line of --json. Of the two payloads one is null.
type eventJSON struct {
	Seq         int64             `json:"seq"`
	Lane        int               `json:"lane"`
	PublishedAt time.Time         `json:"published_at"`
	Type        string            `json:"type"`
	Key         *string           `json:"key"`
	Headers     map[string]string `json:"headers"`
	Payload     json.RawMessage   `json:"payload"`
	Base64      []byte            `json:"payload_base64"`
}

func jsonDelivery(d outbox.Delivery) eventJSON {
	e := eventJSON{Seq: d.Seq, Lane: d.Lane, PublishedAt: d.PublishedAt, Type: d.Type, Key: known(d.Key), Headers: d.Headers}
	if json.Valid(d.Payload) {
		e.Payload = d.Payload
	} else {
		e.Base64 = d.Payload
	}
	return e
}
