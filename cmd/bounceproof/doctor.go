package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/internal/selector"
	"github.com/bounceproof/bounceproof/notify"
)

// diagnosis is what the doctor finds. It is the output of --json, where null is what it does not know.
type diagnosis struct {
	OK         bool        `json:"ok"`
	Address    *string     `json:"address"` // the host that everything below is about
	Hosts      []host      `json:"hosts"`   // of the connection string, in its order
	Database   string      `json:"database"`
	User       string      `json:"user"`
	Server     *server     `json:"server"`
	Topology   *topology   `json:"topology"`
	Strategies *strategies `json:"prepared_statements"`
	Settings   []setting   `json:"settings"` // that the connection string asks for
	Listen     *listening  `json:"listen"`
	Findings   []finding   `json:"findings"`
}

type server struct {
	PostgreSQL string  `json:"postgresql"`
	Pooler     *string `json:"pooler"` // as the pooler's console tells it, if it does
	Standby    bool    `json:"standby"`

	number int // server_version_num
}

type topology struct {
	Summary  string   `json:"summary"`
	Pooler   string   `json:"pooler"`
	Mode     *string  `json:"mode"`
	Tracks   *bool    `json:"tracks_prepared_statements"` // null: not seen, or there is no pooler
	Evidence []string `json:"evidence"`
}

// strategies are how an executor would send stable statements, by its Config.PreparedStatements.
type strategies struct {
	Auto   string `json:"auto"`
	Shared string `json:"shared"`
}

type listening struct {
	State  string  `json:"state"`
	Reason *string `json:"reason"`
	// Millis is how long a notification took from another session to this one.
	Millis *float64 `json:"milliseconds"`
}

// finding is something that could be better. A problem fails the command, a note does not.
type finding struct {
	Severity string  `json:"severity"` // "problem" or "note"
	What     string  `json:"what"`
	Remedy   *string `json:"remedy"`
}

const (
	problem = "problem"
	note    = "note"
)

func newDoctor() *cobra.Command {
	var asJSON, strict bool
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "doctor [connection string]",
		Short: "Say what a connection string leads to, and what works there",
		Long: `Say what a connection string leads to, and what works there.

The doctor finds out by its behaviour whether a pooler stands in between, in which mode, and what becomes of prepared
statements; how an executor would send statements; and whether a notification sent by one session arrives at another.
It also compares the settings that the connection string asks for with those that hold. It writes nothing to the database.
Without an argument it takes DATABASE_URL, or else PGHOST and its like.

Passwords are never printed, nor any piece of a connection string that cannot be read.

Exit status:
  0    no problem was found; there may be notes, such as LISTEN not working where the library polls
  1    there is a problem, or with --strict a note; or the command line is wrong
  130  it was interrupted`,
		Example: `  bounceproof doctor postgres://app@127.0.0.1:6432/shop
  bounceproof doctor --json "$DATABASE_URL" | jq .prepared_statements`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 1 {
				return errors.New("one connection string is enough; put it between quotes if it has spaces")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			cfg, err := poolConfig(len(args) > 0, strings.Join(args, ""))
			if err != nil {
				return err
			}
			ctx, cancel, err := limit(cmd.Context(), timeout)
			if err != nil {
				return err
			}
			defer cancel()
			d := diagnose(ctx, cfg)
			if cmd.Context().Err() != nil {
				return cmd.Context().Err()
			}
			for _, f := range d.Findings {
				d.OK = d.OK && f.Severity != problem && !strict
			}
			if asJSON {
				enc := json.NewEncoder(visibleWriter{cmd.OutOrStdout()})
				enc.SetIndent("", "  ")
				enc.SetEscapeHTML(false)
				err = enc.Encode(d)
			} else {
				d.print(newView(cmd.OutOrStdout()))
			}
			if err == nil && !d.OK {
				err = errSilent
			}
			return err
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	cmd.Flags().BoolVar(&strict, "strict", false, "let notes fail the command too")
	cmd.Flags().DurationVar(&timeout, "timeout", 20*time.Second, "give up after this long (0 is never)")
	return cmd
}

// limit bounds a context, 0 meaning not at all.
func limit(ctx context.Context, timeout time.Duration) (context.Context, context.CancelFunc, error) {
	switch {
	case timeout < 0:
		return nil, nil, errors.New("--timeout is negative; 0 is no limit")
	case timeout == 0:
		ctx, cancel := context.WithCancel(ctx)
		return ctx, cancel, nil
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	return ctx, cancel, nil
}

// diagnose examines step by step, as far as it gets.
func diagnose(ctx context.Context, cfg *pgxpool.Config) *diagnosis {
	cc := &cfg.ConnConfig.Config
	d := &diagnosis{
		OK: true, Database: cmp.Or(cc.Database, cc.User), User: cc.User, // PostgreSQL's default, too
		Settings: []setting{}, Findings: []finding{},
	}
	if all := targets(cfg); len(all) == 1 {
		d.Address = new(all[0].address())
	}
	if !d.reach(ctx, cfg) {
		return d
	}
	cfg.MaxConns = max(cfg.MaxConns, 2)
	cfg.MinConns, cfg.MinIdleConns = 0, 0
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		d.find(problem, oneLine(err.Error()), "correct the connection string's settings")
		return d
	}
	defer pool.Close()
	quiet := slog.New(slog.DiscardHandler)
	ex, err := executor.New(pool, executor.Config{Logger: quiet, ProbeTimeout: -1})
	if err != nil {
		d.find(problem, oneLine(err.Error()), "")
		return d
	}
	defer func() { _ = ex.Close(context.WithoutCancel(ctx)) }()
	if err := d.look(ctx, ex, cc); err != nil {
		return d
	}
	d.compareSettings(ctx, cc)
	d.listen(ctx, pool)
	return d
}

func (d *diagnosis) find(severity, what, remedy string) {
	d.Findings = append(d.Findings, finding{severity, what, known(remedy)})
}

// known is null for what is not known.
func known(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}

// look finds out about the pooler and prepared statements.
func (d *diagnosis) look(ctx context.Context, ex *executor.Executor, cc *pgconn.Config) error {
	top, err := ex.Topology(ctx)
	if err != nil {
		d.find(problem, "what stands in between could not be found out: "+cause(err), "try again, with a longer --timeout")
		return err
	}
	if top.Pooled() {
		d.Server.Pooler = known(poolerVersion(ctx, cc))
	}
	d.Topology = &topology{
		Summary: top.String(), Pooler: string(top.Pooler), Tracks: tracks(top), Evidence: top.Evidence,
	}
	if top.Mode != fallback.ModeUnknown {
		d.Topology.Mode = new(top.Mode.String())
	}
	d.Strategies = &strategies{Auto: strategyUnder(executor.Auto, top), Shared: strategyUnder(executor.Shared, top)}
	d.checkTopology(top)
	return nil
}

// tracks is whether the pooler keeps track of prepared statements, nil where it was not seen, or where there is none.
func tracks(top fallback.Topology) *bool {
	if top.Mode == fallback.ModeDirect {
		return nil
	}
	switch top.Tracking() {
	case fallback.TrackingYes:
		return new(true)
	case fallback.TrackingNo:
		return new(false)
	case fallback.TrackingUnknown:
	}
	return nil
}

// strategyUnder asks the very code that an executor asks.
func strategyUnder(policy executor.PreparedStatements, top fallback.Topology) string {
	return selector.Policy(policy).Strategy(top).String()
}

const oldestServer = 130000

// checkTopology says what could be better about the connection.
func (d *diagnosis) checkTopology(top fallback.Topology) {
	if d.Server.number < oldestServer {
		d.find(problem, "PostgreSQL before 13 has no snapshots that the outbox can store", "use PostgreSQL 13 or newer for the outbox")
	}
	if d.Server.Standby {
		d.find(note, "this is a standby: it takes no writes, no LISTEN and no NOTIFY", "publish and listen on the primary")
	}
	if top.Mode == fallback.ModeStatement {
		d.find(problem, "the pooler is in statement mode: no transactions, except those that only publish", "set pool_mode = transaction")
	}
	if top.Strategy() != fallback.Unprepared {
		return
	}
	if tracks(top) == nil {
		d.find(note, "whether the pooler keeps track of prepared statements was not seen: an executor sends every statement with its text until it has",
			"run the doctor again; on the pooler's console SHOW CONFIG has max_prepared_statements, and above 0 PgBouncer 1.21 or newer keeps track of them")
	} else {
		d.find(problem, "the pooler forwards prepared statements by their names to servers that do not have them: "+
			"an executor sends every statement with its text, and the server parses each execution anew",
			"set max_prepared_statements above 0 in PgBouncer 1.21 or newer (from 1.24 on it is 200), or set "+
				"executor.Config.PreparedStatements to shared if all clients of this role are trusted, or to off to do without the warning")
	}
}

// poolerVersion asks PgBouncer's console.
func poolerVersion(ctx context.Context, cc *pgconn.Config) string {
	ctx, cancel := context.WithTimeout(ctx, consolePatience)
	defer cancel()
	conn, err := console(ctx, cc)
	if err != nil {
		return ""
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	for _, row := range ask(ctx, conn, "show version") {
		for _, version := range row {
			return version
		}
	}
	return ""
}

// listen proves by a notification from another session that LISTEN works, or finds that it does not.
func (d *diagnosis) listen(ctx context.Context, pool *pgxpool.Pool) {
	if d.Server.Standby {
		return
	}
	l, err := notify.NewListener(pool, notify.ListenerConfig{
		HeartbeatTimeout: 3 * time.Second, PollInterval: -1, ProvenPollInterval: -1, Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		d.find(problem, oneLine(err.Error()), "")
		return
	}
	l.Handle("bounceproof_doctor", notify.HandlerFunc(func(context.Context, notify.Event) {}))
	listening, stop := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = l.Run(listening) // what it finds is in its status
	}()
	s := awaitProof(ctx, l)
	stop()
	<-ended
	d.checkListening(s)
}

// awaitProof returns the listener's first verdict.
func awaitProof(ctx context.Context, l *notify.Listener) notify.Status {
	ticker := time.NewTicker(10 * time.Millisecond)
	defer ticker.Stop()
	for {
		if s := l.Status(); s.State != notify.Unknown && (s.State != notify.Disconnected || s.Reason != "") {
			return s
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return notify.Status{State: notify.Unknown, Reason: ctx.Err().Error()}
		}
	}
}

// checkListening takes down what the listener found.
func (d *diagnosis) checkListening(s notify.Status) {
	d.Listen = &listening{State: s.State.String(), Reason: known(s.Reason)}
	switch s.State {
	case notify.Proven:
		d.Listen.Millis = new(float64(s.ProofTime.Microseconds()) / 1000)
	case notify.Isolated:
		d.find(note, "LISTEN does not work on this connection: listeners poll, by default every second",
			"set notify.ListenerConfig.Direct to a connection string that leads to the server itself, or to a pooler in session mode")
	case notify.Disconnected, notify.Unknown:
		d.find(problem, "whether LISTEN works could not be found out: "+s.Reason, "try again")
	}
}
