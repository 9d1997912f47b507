package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
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
tried again, parked ones stand behind a failed one of their key, dead ones wait for retry or discard.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return f.with(cmd.Context(), func(ctx context.Context, store *outbox.Store) error {
				st, err := store.Status(ctx)
				if err != nil {
					return err
				}
				if asJSON {
					enc := json.NewEncoder(cmd.OutOrStdout())
					enc.SetIndent("", "  ")
					return enc.Encode(st)
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
	v.line("Schema %s: %d lanes, %s drawn, %s kept, %s.", st.Schema, st.Lanes,
		some(int(st.Tip), "sequence number"), some(int(st.Ticks), "tick"), some(int(st.Scheduled), "scheduled event"))
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
	v.line("%s", draw(cells, 2))
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
		v.line("\nLanes of %s:\n%s", sub.Name, draw(cells, 9))
	}
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
		return nil, fmt.Errorf("there is no subscription %q", name)
	}
	return store.Subscribe(ctx, name, outbox.SubscriptionConfig{SkipOnDead: st.Subscriptions[i].SkipOnDead})
}
