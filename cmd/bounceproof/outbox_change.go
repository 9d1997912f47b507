package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/bounceproof/bounceproof/outbox"
)

func newOutboxRetry(f *outboxFlags) *cobra.Command {
	return newDecision(f, "retry", "retried", "Give dead events their attempts again", (*outbox.Subscription).Retry,
		`Give dead events their attempts again.

Name the events by their sequence numbers, or take --all. Events of the same key follow in order.`)
}

func newOutboxDiscard(f *outboxFlags) *cobra.Command {
	return newDecision(f, "discard", "discarded", "Remove dead events, so that their keys go on", (*outbox.Subscription).Discard,
		`Remove dead events, so that their keys go on.

Name the events by their sequence numbers, or take --all. They are not delivered to this subscription any more.`)
}

// newDecision is a command that decides about dead events.
func newDecision(
	f *outboxFlags, verb, done, short string, decide func(*outbox.Subscription, context.Context, ...int64) (int64, error), long string,
) *cobra.Command {
	var all bool
	cmd := &cobra.Command{
		Use:   verb + " subscription [sequence number...]",
		Short: short,
		Long:  long,
		Args:  cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			var seqs []int64
			for _, arg := range args[1:] {
				seq, err := strconv.ParseInt(arg, 10, 64)
				if err != nil {
					return fmt.Errorf("%q is no sequence number", arg)
				}
				seqs = append(seqs, seq)
			}
			if all == (len(seqs) > 0) {
				return errors.New("name sequence numbers, or take --all")
			}
			return f.with(cmd.Context(), func(ctx context.Context, store *outbox.Store) error {
				sub, err := subscription(ctx, store, args[0])
				if err != nil {
					return err
				}
				n, err := decide(sub, ctx, seqs...)
				if err != nil {
					return err
				}
				_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s %s.\n", some(int(n), "dead event"), done)
				return err
			})
		},
	}
	cmd.Flags().BoolVar(&all, "all", false, "all dead events of the subscription")
	return cmd
}

func newOutboxReplay(f *outboxFlags) *cobra.Command {
	var from string
	cmd := &cobra.Command{
		Use:   "replay subscription --from earliest|now|TIME|DURATION",
		Short: "Move a subscription back, or ahead",
		Long: `Move a subscription back, or ahead.

It goes on from the oldest event that is kept (earliest), from what commits from now on (now), from a time such as
2026-01-31T12:00:00Z, or from a while ago, such as 90m. A little before the time may come too. Events that failed stay where
they are.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			start, err := parseStart(from, time.Now())
			if err != nil {
				return err
			}
			return f.with(cmd.Context(), func(ctx context.Context, store *outbox.Store) error {
				sub, err := subscription(ctx, store, args[0])
				if err != nil {
					return err
				}
				if err := sub.Replay(ctx, start); err != nil {
					return err
				}
				_, err = fmt.Fprintf(cmd.OutOrStdout(), "Subscription %s goes on from %s.\n", args[0], from)
				return err
			})
		},
	}
	cmd.Flags().StringVar(&from, "from", "", "where to go")
	_ = cmd.MarkFlagRequired("from") // it exists
	return cmd
}

// parseStart reads a place in the log.
func parseStart(from string, now time.Time) (outbox.Start, error) {
	switch from {
	case "earliest":
		return outbox.StartEarliest(), nil
	case "now":
		return outbox.StartNow(), nil
	}
	if d, err := time.ParseDuration(from); err == nil && d > 0 {
		return outbox.StartAt(now.Add(-d)), nil
	}
	at, err := time.Parse(time.RFC3339, from)
	if err != nil {
		return outbox.Start{}, fmt.Errorf("%q: want earliest, now, a time such as 2026-01-31T12:00:00Z, or a duration such as 90m", from)
	}
	return outbox.StartAt(at), nil
}

func newOutboxUnsubscribe(f *outboxFlags) *cobra.Command {
	return &cobra.Command{
		Use:   "unsubscribe subscription",
		Short: "Remove a subscription, with its place in the log and its failed events",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return f.with(cmd.Context(), func(ctx context.Context, store *outbox.Store) error {
				removed, err := store.Unsubscribe(ctx, args[0])
				if err == nil && !removed {
					err = fmt.Errorf("there is no subscription %q", args[0])
				}
				if err != nil {
					return err
				}
				_, err = fmt.Fprintf(cmd.OutOrStdout(), "Subscription %s is removed.\n", args[0])
				return err
			})
		},
	}
}
