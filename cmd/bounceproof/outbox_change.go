package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/bounceproof/bounceproof/outbox"
)

func newOutboxRetry(f *outboxFlags) *cobra.Command {
	return newDecision(f, "retry", "retried", "Give dead events their attempts again", (*outbox.Subscription).Retry,
		`Give dead events their attempts again.

Name the events by their sequence numbers, or take --all. Events of the same key follow in order.

Exit status:
  0    all of them were retried, or with --all those that there were
  1    a number is not that of a dead event (the others were retried), or it failed`)
}

func newOutboxDiscard(f *outboxFlags) *cobra.Command {
	return newDecision(f, "discard", "discarded", "Remove dead events, so that their keys go on", (*outbox.Subscription).Discard,
		`Remove dead events, so that their keys go on.

Name the events by their sequence numbers, or take --all. They are not delivered to this subscription any more.

Exit status:
  0    all of them were discarded, or with --all those that there were
  1    a number is not that of a dead event (the others were discarded), or it failed`)
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
			for i, arg := range args[1:] {
				seq, err := strconv.ParseInt(arg, 10, 64)
				if err != nil || seq <= 0 {
					return fmt.Errorf("argument %d is no sequence number; outbox status counts dead events, the table failed and the logs have their numbers", i+2)
				}
				if !slices.Contains(seqs, seq) {
					seqs = append(seqs, seq)
				}
			}
			if all == (len(seqs) > 0) {
				return errors.New("name sequence numbers, or take --all")
			}
			return f.with(cmd.Context(), func(ctx context.Context, store *outbox.Store) error {
				sub, err := subscription(ctx, store, args[0])
				if err != nil {
					return err
				}
				dead, others, err := sortOut(ctx, sub, seqs)
				if err != nil {
					return err
				}
				n := int64(0)
				if all || len(dead) > 0 {
					if n, err = decide(sub, ctx, dead...); err != nil {
						return err
					}
				}
				if all || n > 0 {
					if _, err = fmt.Fprintf(cmd.OutOrStdout(), "%s %s.\n", some(int(n), "dead event"), done); err != nil {
						return err
					}
				}
				if len(others) > 0 {
					return fmt.Errorf("not %s: %s", done, strings.Join(others, "; "))
				}
				return nil
			})
		},
	}
	cmd.Flags().BoolVar(&all, "all", false, "all dead events of the subscription")
	return cmd
}

// sortOut tells the numbers of dead events from others, and says what these are.
func sortOut(ctx context.Context, sub *outbox.Subscription, seqs []int64) (dead []int64, others []string, err error) {
	for _, seq := range seqs {
		found, err := sub.Failed(ctx, "", seq-1, 1)
		if err != nil {
			return nil, nil, err
		}
		switch {
		case len(found) == 0 || found[0].Seq != seq:
			others = append(others, fmt.Sprintf("no event %d has failed in subscription %s", seq, sub.Name()))
		case found[0].State == outbox.StateDead:
			dead = append(dead, seq)
		case found[0].State == outbox.StateRetrying:
			others = append(others, fmt.Sprintf("event %d is not dead, it will be tried again by itself", seq))
		default:
			others = append(others, fmt.Sprintf("event %d is not dead, it waits behind a failed one of its key", seq))
		}
	}
	return dead, others, nil
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
		return outbox.Start{}, errors.New("--from is earliest, now, a time such as 2026-01-31T12:00:00Z, or a duration such as 90m")
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
					var st *outbox.Status
					if st, err = store.Status(ctx); err == nil {
						err = noSubscription(st, args[0])
					}
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
