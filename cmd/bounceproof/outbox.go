package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/outbox"
)

// outboxFlags are what all outbox commands have in common.
type outboxFlags struct {
	url     string
	config  outbox.Config
	timeout time.Duration
	given   func() bool // whether there is a url
}

func newOutbox() *cobra.Command {
	f := new(outboxFlags)
	cmd := &cobra.Command{
		Use:   "outbox",
		Short: "Look after an outbox",
		Long: `Look after an outbox.

The connection string is taken from --url, from DATABASE_URL, or from PGHOST and its like. It may lead through a pooler in
transaction mode.

Exit status: 0 if it was done, 1 if not, 130 if it was interrupted (tail: 0).`,
		Args: subcommand,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.PersistentFlags().StringVar(&f.url, "url", "", "connection string (others can see it in the list of processes: prefer DATABASE_URL)")
	f.given = func() bool { return cmd.PersistentFlags().Changed("url") }
	cmd.PersistentFlags().StringVar(&f.config.Schema, "schema", "outbox", "schema of the outbox's tables")
	cmd.PersistentFlags().DurationVar(&f.timeout, "timeout", time.Minute, "give up after this long (0 is never; tail never does)")
	cmd.AddCommand(newOutboxMigrate(f), newOutboxStatus(f), newOutboxRetry(f), newOutboxDiscard(f), newOutboxReplay(f),
		newOutboxTail(f), newOutboxUnsubscribe(f))
	return cmd
}

func newOutboxMigrate(f *outboxFlags) *cobra.Command {
	var rebase bool
	cmd := &cobra.Command{
		Use:   "migrate",
		Short: "Create the tables, or bring them up to date",
		Long: `Create the tables, or bring them up to date.

It runs in one transaction, waits for others that do the same, and changes nothing where nothing is to be done.
The first run fixes the number of lanes, which is how many dispatchers of one subscription can share the work.

After a restore into another cluster dispatchers refuse to work. With --rebase every subscription goes back to its first
event that was not delivered for certain: some may come again, none is lost.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return f.with(cmd.Context(), func(ctx context.Context, store *outbox.Store) error {
				if rebase {
					if err := store.Rebase(ctx); err != nil {
						return err
					}
				}
				if err := store.Migrate(ctx); err != nil {
					return err
				}
				_, err := fmt.Fprintf(cmd.OutOrStdout(), "The outbox in schema %s is ready.\n", f.config.Schema)
				return err
			})
		},
	}
	cmd.Flags().IntVar(&f.config.Lanes, "lanes", 0, "lanes of a new outbox (0 is the default, 16)")
	cmd.Flags().BoolVar(&rebase, "rebase", false, "after a restore into another cluster")
	return cmd
}

// with runs a function on a store.
func (f *outboxFlags) with(ctx context.Context, do func(context.Context, *outbox.Store) error) error {
	cfg, err := poolConfig(f.given(), f.url)
	if err != nil {
		return err
	}
	ctx, cancel, err := limit(ctx, f.timeout)
	if err != nil {
		return err
	}
	defer cancel()
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return err
	}
	defer pool.Close()
	// A few statements are not worth finding out whether they could be prepared, nor a warning that they could not.
	ex, err := executor.New(pool, executor.Config{PreparedStatements: executor.Off, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return err
	}
	defer func() { _ = ex.Close(context.WithoutCancel(ctx)) }()
	f.config.Logger = slog.New(slog.DiscardHandler)
	store, err := outbox.New(ex, f.config)
	if err != nil {
		return err
	}
	err = do(ctx, store)
	if errors.Is(err, outbox.ErrNotMigrated) {
		return fmt.Errorf("%w; bounceproof outbox migrate makes it", err)
	}
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok && pgErr.Code == "42501" { // insufficient_privilege
		return fmt.Errorf("%w; user %s needs usage on schema %s, select on its tables and its sequence, and what the command changes: have their owner grant it",
			err, cfg.ConnConfig.User, f.config.Schema)
	}
	return err
}
