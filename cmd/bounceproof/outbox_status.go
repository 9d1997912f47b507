package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/bounceproof/bounceproof/outbox"
)

func newOutboxStatus(f *outboxFlags) *cobra.Command {
	var lanes, asJSON bool
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Say how far each subscription is, and what has failed",
		Long: `Say how far each subscription is, and what has failed.

Pending events are counted one by one, so this takes its time where many are. Retrying events have failed and will be
tried again, parked ones stand behind a failed one of their key, dead ones wait for retry or discard. In a narrow terminal
the table becomes a list; --json has null for what there is not, such as the oldest of no pending events.

Exit status:
  0    the status was printed, whatever it says
  1    it could not be read, or the command line is wrong`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return f.with(cmd.Context(), func(ctx context.Context, store *outbox.Store) error {
				st, err := store.Status(ctx)
				if err != nil {
					return err
				}
				if asJSON {
					enc := json.NewEncoder(visibleWriter{cmd.OutOrStdout()})
					enc.SetIndent("", "  ")
					enc.SetEscapeHTML(false)
					return enc.Encode(jsonStatus(st))
				}
				printStatus(newView(cmd.OutOrStdout()), st, lanes, time.Now())
				return nil
			})
		},
	}
	cmd.Flags().BoolVar(&lanes, "lanes", false, "show every lane")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func printStatus(v *view, st *outbox.Status, lanes bool, now time.Time) {
	v.wrapped(fmt.Sprintf("Schema %s: %d lanes, %s drawn, %s kept, %s.", st.Schema, st.Lanes,
		some(int(st.Tip), "sequence number"), some(int(st.Ticks), "tick"), some(int(st.Scheduled), "scheduled event")))
	if len(st.Subscriptions) == 0 {
		v.line("There is no subscription: nobody reads the events.")
		return
	}
	cells := [][]string{{"subscription", "dispatchers", "pending", "oldest", "retrying", "parked", "dead"}}
	for _, sub := range st.Subscriptions {
		cells = append(cells, []string{
			sub.Name, thousands(sub.Dispatchers), thousands(int(sub.Pending)), age(sub.Oldest, now),
			thousands(int(sub.Retrying)), thousands(int(sub.Parked)), thousands(int(sub.Dead)),
		})
	}
	v.tableOrList(cells, 2)
	if !lanes {
		return
	}
	for _, sub := range st.Subscriptions {
		cells := [][]string{{"lane", "pending", "delivered up to tick", "open to tick", "position", "crashes", "token", "owner"}}
		for _, l := range sub.Lanes {
			open, pos := "", ""
			if l.To != 0 {
				open, pos = fmt.Sprint(l.To), fmt.Sprint(l.Pos)
			}
			cells = append(cells, []string{
				fmt.Sprint(l.Lane), thousands(int(l.Pending)), fmt.Sprint(l.From), open, pos, fmt.Sprint(l.Crashes), fmt.Sprint(l.Token), owner(l),
			})
		}
		v.line("")
		v.wrapped(fmt.Sprintf("Lanes of %s:", sub.Name))
		v.tableOrList(cells, 9)
	}
}

// statusJSON is the output of --json. It has names of its own, so that renaming a field of the library breaks nobody's script.
type statusJSON struct {
	Schema        string             `json:"schema"`
	Lanes         int                `json:"lanes"`
	Tip           int64              `json:"tip"`
	NewestTick    int64              `json:"newest_tick"`
	Ticks         int64              `json:"ticks"`
	Scheduled     int64              `json:"scheduled"`
	Subscriptions []subscriptionJSON `json:"subscriptions"`
}

type subscriptionJSON struct {
	Name        string     `json:"name"`
	SkipOnDead  bool       `json:"skip_on_dead"`
	Dispatchers int        `json:"dispatchers"`
	Pending     int64      `json:"pending"`
	Oldest      *time.Time `json:"oldest"` // null: nothing is pending
	Retrying    int64      `json:"retrying"`
	Parked      int64      `json:"parked"`
	Dead        int64      `json:"dead"`
	Lanes       []laneJSON `json:"lanes"`
}

type laneJSON struct {
	Lane    int     `json:"lane"`
	Owner   *string `json:"owner"` // null: nobody
	Alive   bool    `json:"alive"`
	Crashes int     `json:"crashes"`
	Token   int64   `json:"token"`
	From    int64   `json:"from_tick"`
	To      *int64  `json:"to_tick"`  // null: no batch is open
	Pos     *int64  `json:"position"` // in the open batch
	Pending int64   `json:"pending"`
}

func jsonStatus(st *outbox.Status) statusJSON {
	out := statusJSON{
		Schema: st.Schema, Lanes: st.Lanes, Tip: st.Tip, NewestTick: st.NewestTick, Ticks: st.Ticks, Scheduled: st.Scheduled,
		Subscriptions: []subscriptionJSON{},
	}
	for _, sub := range st.Subscriptions {
		s := subscriptionJSON{
			Name: sub.Name, SkipOnDead: sub.SkipOnDead, Dispatchers: sub.Dispatchers, Pending: sub.Pending,
			Retrying: sub.Retrying, Parked: sub.Parked, Dead: sub.Dead, Lanes: []laneJSON{},
		}
		if !sub.Oldest.IsZero() {
			s.Oldest = new(sub.Oldest.UTC())
		}
		for _, l := range sub.Lanes {
			lane := laneJSON{
				Lane: l.Lane, Owner: known(l.Owner), Alive: l.Alive, Crashes: l.Crashes, Token: l.Token, From: l.From, Pending: l.Pending,
			}
			if l.To != 0 {
				lane.To, lane.Pos = new(l.To), new(l.Pos)
			}
			s.Lanes = append(s.Lanes, lane)
		}
		out.Subscriptions = append(out.Subscriptions, s)
	}
	return out
}

// age is how long ago something was; the two clocks need not agree.
func age(at, now time.Time) string {
	if at.IsZero() {
		return ""
	}
	return max(0, now.Sub(at)).Round(time.Second).String()
}

func owner(l outbox.LaneStatus) string {
	if l.Owner != "" && !l.Alive {
		return l.Owner + " (run out)"
	}
	return cmp.Or(l.Owner, "-")
}

// subscription returns a subscription that exists: a slip of the pen must not make a new one.
func subscription(ctx context.Context, store *outbox.Store, name string) (*outbox.Subscription, error) {
	st, err := store.Status(ctx)
	if err != nil {
		return nil, err
	}
	i := slices.IndexFunc(st.Subscriptions, func(sub outbox.SubscriptionStatus) bool { return sub.Name == name })
	if i < 0 {
		return nil, noSubscription(st, name)
	}
	return store.Subscribe(ctx, name, outbox.SubscriptionConfig{SkipOnDead: st.Subscriptions[i].SkipOnDead})
}

// noSubscription names those that there are. A name that may be something else, put in the wrong place, is not repeated.
func noSubscription(st *outbox.Status, name string) error {
	said := "there is no such subscription"
	if plainWord.MatchString(name) {
		said = fmt.Sprintf("there is no subscription %q", name)
	}
	var names []string
	for _, sub := range st.Subscriptions {
		names = append(names, strconv.Quote(sub.Name))
	}
	const most = 10
	switch {
	case len(names) == 0:
		return errors.New(said + ", nor any other in schema " + st.Schema)
	case len(names) > most:
		names = append(names[:most], "…")
	}
	return errors.New(said + "; there are " + strings.Join(names, ", "))
}
