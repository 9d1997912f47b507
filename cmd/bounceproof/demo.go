package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
	"github.com/bounceproof/bounceproof/testenv/place"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

const (
	demoEvents   = 10_000
	demoPoolSize = 4

	// demoTime is how long the demo may take where it has a choice.
	demoTime = time.Minute
)

// row is one line of the demo's table: one way to reach the server.
type row struct {
	name     string
	title    string // name, if empty
	place    place.Place
	policy   executor.PreparedStatements
	warnings int  // how many warnings there should be
	named    bool // statements should be prepared, so hardly any should be parsed
	optional bool // left out on a slow machine

	outcome *outcome
	checks  []check
	logged  []record
	err     error  // why there is no outcome
	omitted string // if that is no failure: "missing" or "skipped"
}

// demoRows are the ways to a server of a version that the demo goes.
func demoRows(server string) []*row {
	old, current := place.New(place.TransactionRaw, "1.18", server), place.New(place.TransactionTracked, "1.24", server)
	return []*row{
		{name: "direct " + server, title: "Direct PostgreSQL " + server, place: place.New(place.Direct, "", server), named: true},
		{name: "PgBouncer 1.18", place: old, warnings: 1},
		{
			name: "PgBouncer 1.18", title: "PgBouncer 1.18, with executor.Config{PreparedStatements: executor.Shared}",
			place: old, policy: executor.Shared, optional: true,
		},
		{name: "PgBouncer 1.24", place: current, named: true},
	}
}

// ok reports whether the row did what it should. What was left out is no failure.
func (r *row) ok() bool {
	for _, c := range r.checks {
		if !c.ok {
			return false
		}
	}
	return r.omitted != "" || r.err == nil
}

// strategy is how most statements were sent.
func (r *row) strategy() string {
	s := strategyOf(r.outcome.stats).String()
	if r.policy == executor.Shared {
		s += " (opt-in)"
	}
	return s
}

// warned is how many warnings the library logged.
func (r *row) warned() int { return count(r.logged, slog.LevelWarn) }

// errors is how many failures there were, logged errors included.
func (r *row) errors() int { return r.outcome.failures + count(r.logged, slog.LevelError) }

func newDemo() *cobra.Command {
	var events int
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Publish and deliver events through real servers, and check every one",
		Long: fmt.Sprintf(`Publish and deliver events through real servers, and check every one.

The demo starts PostgreSQL 17 and PgBouncer 1.18 and 1.24 in transaction mode with %d server connections. Directly and
through each PgBouncer, %d goroutines run business transactions that update a row and publish an event, half of them
under one of %d keys; %d dispatchers deliver the events. Then everything is checked against the database.

Versions that are not to be had are left out, with the reason. The exit status is 0 if all checks hold. Everything that
was started ends with the command.`, demoPoolSize, demoPublishers, demoKeys, demoDispatchers),
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return errors.New("demo takes no arguments: it starts servers of its own")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			if events < 1 {
				return fmt.Errorf("--events %d: want at least 1", events)
			}
			return runDemo(cmd.Context(), newView(cmd.OutOrStdout()), events)
		},
	}
	cmd.Flags().IntVar(&events, "events", demoEvents, "events to publish through each")
	return cmd
}

func runDemo(ctx context.Context, v *view, events int) error {
	begin := time.Now()
	e := &env{log: func(line string) { v.line("%s", line) }}
	defer e.close()
	d := &demo{view: v, env: e, events: events}
	rows, err := d.start(ctx)
	if err != nil {
		return err
	}
	// What may be left out comes last.
	order := slices.Clone(rows)
	slices.SortStableFunc(order, func(a, b *row) int { return cmp.Compare(rank(a), rank(b)) })
	failed := 0
	var longest time.Duration
	for _, r := range order {
		if err := ctx.Err(); err != nil {
			return err
		}
		start := time.Now()
		if r.optional && start.Add(longest).Sub(begin) > demoTime {
			r.omitted, r.err = "skipped", fmt.Errorf("left out on a slow machine: the rest has taken %.0f s, more than %.0f", start.Sub(begin).Seconds(), demoTime.Seconds())
		}
		d.run(ctx, r)
		longest = max(longest, time.Since(start))
		if !r.ok() {
			failed++
		}
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	v.table(rows)
	if failed > 0 {
		v.line("%d of %d rows FAILED, in %.0f s", failed, len(rows), time.Since(begin).Seconds())
		return errSilent
	}
	missing := 0
	for _, r := range rows {
		if r.omitted != "" {
			missing++
		}
	}
	if missing > 0 {
		v.line("All checks hold on the %d rows that ran, in %.0f s; left out: %d, for the reasons above.",
			len(rows)-missing, time.Since(begin).Seconds(), missing)
		return nil
	}
	v.line("All checks hold, in %.0f s.", time.Since(begin).Seconds())
	return nil
}

func rank(r *row) int {
	if r.optional {
		return 1
	}
	return 0
}

// demo is a run of the command.
type demo struct {
	view   *view
	env    *env
	events int
	server *postgres.Server
}

// start starts the server and returns the rows, with a first one for a direct version that is missing.
func (d *demo) start(ctx context.Context) (rows []*row, err error) {
	const want = "17"
	version := want
	missing := postgres.Available(want)
	if missing != nil {
		version = "" // any
		rows = append(rows, &row{name: "direct " + want, title: "Direct PostgreSQL " + want, err: missing, omitted: "missing"})
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	err = d.env.attempt(func() { d.server = postgres.Start(d.env, postgres.Options{Version: version, Dedicated: true}) })
	if err != nil {
		return nil, err
	}
	d.view.title(fmt.Sprintf("Bounceproof: %s events through each of these, %d publishers, %d dispatchers",
		thousands(d.events), demoPublishers, demoDispatchers))
	d.view.fact("server", fmt.Sprintf("PostgreSQL %s in a %s, data in memory, fsync off: compare the rows with each other, not with your server",
		d.server.FullVersion(), d.server.Runtime()))
	return append(rows, demoRows(d.server.Version())...), nil
}

// run makes one row.
func (d *demo) run(ctx context.Context, r *row) {
	if r.place.Bouncer != "" && r.err == nil {
		if err := pgbouncer.Available(r.place.Bouncer); err != nil {
			r.err, r.omitted = err, "missing"
		}
	}
	d.view.title(cmp.Or(r.title, r.name))
	if r.omitted == "" {
		r.err = d.measure(ctx, r)
	}
	switch {
	case ctx.Err() != nil:
	case r.omitted != "":
		d.view.fact(r.omitted, oneLine(r.err.Error()))
	case r.err != nil:
		d.view.check(check{false, oneLine(r.err.Error())})
	}
}

// asUsersHaveIt leaves PgBouncer at its defaults but for the number of server connections.
func asUsersHaveIt(o *pgbouncer.Options) {
	o.PoolSize, o.MaxPreparedStatements, o.Settings = demoPoolSize, 0, nil
}

// measure starts what the row needs, runs the load, and checks it.
func (d *demo) measure(ctx context.Context, r *row) error {
	e := &env{log: d.env.log}
	defer e.close()
	var at *place.Running
	err := e.attempt(func() { at = r.place.StartOn(e, d.server, asUsersHaveIt) })
	if err != nil {
		return err
	}
	auditor, err := pgx.Connect(ctx, at.DB.URL)
	if err != nil {
		return err
	}
	defer func() { _ = auditor.Close(context.WithoutCancel(ctx)) }()
	if _, err := auditor.Exec(ctx, strings.ReplaceAll(demoSchema, "$accounts", strconv.Itoa(demoAccounts))); err != nil {
		return err
	}
	if at.Bouncer != nil {
		d.view.fact("pooler", fmt.Sprintf("PgBouncer %s in a %s, transaction mode, %d server connections",
			at.Bouncer.FullVersion(), at.Bouncer.Runtime(), demoPoolSize))
	}
	logged := newRecorder()
	l := &load{url: at.URL, policy: r.policy, events: d.events, logger: slog.New(logged)}
	stop := func() {}
	l.found = func(top fallback.Topology) {
		d.view.fact("found", top.String())
		d.view.fact("evidence", top.Evidence...)
		stop = d.view.progress(l)
	}
	r.outcome, err = l.run(ctx)
	stop()
	r.logged = logged.records()
	for _, w := range r.logged {
		d.view.warning(w)
	}
	if err != nil {
		return err
	}
	t, err := readStored(ctx, auditor)
	if err != nil {
		r.outcome = nil
		return fmt.Errorf("audit: %w", err)
	}
	if at.Bouncer != nil {
		stats, err := at.Bouncer.Admin("show stats")
		if err = errors.Join(err, t.readCounters(stats, at.DB.Name)); err != nil {
			r.outcome = nil
			return fmt.Errorf("audit: %w", err)
		}
	}
	r.checks = append(audit(r.outcome, t), auditStatements(r, r.outcome, t, r.logged)...)
	for _, c := range r.checks {
		d.view.check(c)
	}
	return nil
}
