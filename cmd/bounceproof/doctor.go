package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strconv"
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

// diagnosis is what the doctor finds. It is the output of --json.
type diagnosis struct {
	OK         bool        `json:"ok"`
	Address    string      `json:"address"`
	Database   string      `json:"database"`
	User       string      `json:"user"`
	Server     *server     `json:"server,omitempty"`
	Topology   *topology   `json:"topology,omitempty"`
	Strategies *strategies `json:"prepared_statements,omitempty"`
	Listen     *listening  `json:"listen,omitempty"`
	Findings   []finding   `json:"findings"`
}

type server struct {
	PostgreSQL string `json:"postgresql"`
	Pooler     string `json:"pooler,omitempty"` // as the pooler's console tells it, if it does
	Standby    bool   `json:"standby"`

	number int // server_version_num
}

type topology struct {
	Summary  string   `json:"summary"`
	Pooler   string   `json:"pooler"`
	Mode     string   `json:"mode"`
	Tracks   bool     `json:"tracks_prepared_statements"`
	Evidence []string `json:"evidence"`
}

// strategies are how an executor would send stable statements, by its Config.PreparedStatements.
type strategies struct {
	Auto   string `json:"auto"`
	Shared string `json:"shared"`
}

type listening struct {
	State  string `json:"state"`
	Reason string `json:"reason,omitempty"`
	// Millis is how long a notification took from another session to this one.
	Millis float64 `json:"milliseconds,omitempty"`
}

// finding is something that could be better. A problem fails the command, a note does not.
type finding struct {
	Severity string `json:"severity"` // "problem" or "note"
	What     string `json:"what"`
	Remedy   string `json:"remedy"`
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
It writes nothing to the database. Without an argument it takes DATABASE_URL, or else PGHOST and its like.

The exit status is 1 if there is a problem, 0 otherwise. Notes, such as LISTEN not working behind a pooler in transaction
mode, where the library polls, count only with --strict. Passwords are never printed.`,
		Example: `  bounceproof doctor postgres://app@127.0.0.1:6432/shop
  bounceproof doctor --json "$DATABASE_URL" | jq .prepared_statements`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			cfg, err := poolConfig(strings.Join(args, ""))
			if err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
			defer cancel()
			d := diagnose(ctx, cfg)
			if cmd.Context().Err() != nil {
				return cmd.Context().Err()
			}
			for _, f := range d.Findings {
				d.OK = d.OK && f.Severity != problem && !strict
			}
			if asJSON {
				enc := json.NewEncoder(cmd.OutOrStdout())
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
	cmd.Flags().DurationVar(&timeout, "timeout", 20*time.Second, "give up after this long")
	return cmd
}

// diagnose examines step by step, as far as it gets.
func diagnose(ctx context.Context, cfg *pgxpool.Config) *diagnosis {
	cc := cfg.ConnConfig
	d := &diagnosis{
		OK: true, Address: net.JoinHostPort(cc.Host, strconv.Itoa(int(cc.Port))), Database: cc.Database, User: cc.User,
		Findings: []finding{},
	}
	if cfg.MaxConns < 2 {
		cfg.MaxConns = 2
	}
	cfg.MinConns, cfg.MinIdleConns = 0, 0
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		d.find(problem, oneLine(err.Error()), "correct the connection string's settings")
		return d
	}
	defer pool.Close()
	quiet := slog.New(slog.DiscardHandler)
	ex, err := executor.New(pool, executor.Config{Logger: quiet})
	if err != nil {
		d.find(problem, oneLine(err.Error()), "")
		return d
	}
	defer func() { _ = ex.Close(context.WithoutCancel(ctx)) }()
	if err := d.connect(ctx, ex, cc.Config); err != nil {
		return d
	}
	d.listen(ctx, pool)
	return d
}

func (d *diagnosis) find(severity, what, remedy string) {
	d.Findings = append(d.Findings, finding{severity, what, remedy})
}

// connect finds out about the server, the pooler and prepared statements.
func (d *diagnosis) connect(ctx context.Context, ex *executor.Executor, cc pgconn.Config) error {
	s := new(server)
	err := ex.QueryRow(ctx, `select current_setting('server_version'), current_setting('server_version_num')::int, pg_is_in_recovery()`).
		Scan(&s.PostgreSQL, &s.number, &s.Standby)
	if err != nil {
		d.find(problem, "no connection: "+oneLine(err.Error()), connectRemedy(err))
		return err
	}
	d.Server = s
	top, err := ex.Topology(ctx)
	if err != nil {
		d.find(problem, "what is there could not be found out: "+oneLine(err.Error()), "try again, with a longer --timeout")
		return err
	}
	if top.Pooled() {
		s.Pooler = poolerVersion(ctx, cc)
	}
	d.Topology = &topology{
		Summary: top.String(), Pooler: string(top.Pooler), Mode: top.Mode.String(), Tracks: top.Tracks, Evidence: top.Evidence,
	}
	d.Strategies = &strategies{Auto: strategyUnder(executor.Auto, top), Shared: strategyUnder(executor.Shared, top)}
	d.checkTopology(top)
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
	if top.Strategy() == fallback.Unprepared {
		d.find(problem, "the pooler forwards prepared statements by their names to servers that do not have them: "+
			"an executor sends every statement with its text, and the server parses each execution anew",
			"set max_prepared_statements above 0 in PgBouncer 1.21 or newer (from 1.24 on it is 200), or set "+
				"executor.Config.PreparedStatements to shared if all clients of this role are trusted, or to off to do without the warning")
	}
}

// poolerVersion asks PgBouncer's console, which answers its administrators and those who may read its statistics.
func poolerVersion(ctx context.Context, cc pgconn.Config) string {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	console := cc.Copy()
	console.Database = "pgbouncer"
	conn, err := pgconn.ConnectConfig(ctx, console)
	if err != nil {
		return ""
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	results, err := conn.Exec(ctx, "show version").ReadAll()
	if err != nil || len(results) == 0 || len(results[0].Rows) == 0 || len(results[0].Rows[0]) == 0 {
		return ""
	}
	return string(results[0].Rows[0][0])
}

// connectRemedy says where to look after an error without a connection.
func connectRemedy(err error) string {
	var pgErr *pgconn.PgError
	var netErr net.Error
	switch {
	case errors.As(err, &pgErr) && strings.HasPrefix(pgErr.Code, "28"):
		return "check user and password, and pg_hba.conf or PgBouncer's auth_file"
	case errors.As(err, &pgErr) && pgErr.Code == "3D000":
		return "create the database, or check its name"
	case errors.As(err, &pgErr) && strings.Contains(pgErr.Message, "unsupported startup parameter"):
		return "leave the parameter out of the connection string, or name it in PgBouncer's ignore_startup_parameters"
	case errors.As(err, &netErr):
		return "check host and port, and that the server listens there"
	default:
		return "read the server's and the pooler's logs"
	}
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
	d.Listen = &listening{State: s.State.String(), Reason: s.Reason}
	switch s.State {
	case notify.Proven:
		d.Listen.Millis = float64(s.ProofTime.Microseconds()) / 1000
	case notify.Isolated:
		d.find(note, "LISTEN does not work on this connection: listeners poll, by default every second",
			"set notify.ListenerConfig.Direct to a connection string that leads to the server itself, or to a pooler in session mode")
	case notify.Disconnected, notify.Unknown:
		d.find(problem, "whether LISTEN works could not be found out: "+s.Reason, "try again")
	}
}

// print prints a diagnosis for people.
func (d *diagnosis) print(v *view) {
	v.fact("address", fmt.Sprintf("%s, database %s, user %s", d.Address, d.Database, d.User))
	if s := d.Server; s != nil {
		said := "PostgreSQL " + s.PostgreSQL
		if s.Standby {
			said += ", a standby"
		}
		v.fact("server", said)
		if s.Pooler != "" {
			v.fact("pooler", s.Pooler+", by its own account")
		}
	}
	if t := d.Topology; t != nil {
		v.fact("found", t.Summary)
		v.fact("evidence", t.Evidence...)
	}
	if s := d.Strategies; s != nil {
		said := s.Auto
		if s.Shared != s.Auto {
			said = fmt.Sprintf("%s with PreparedStatements auto, %s with shared", s.Auto, s.Shared)
		} else if d.Topology.Mode == fallback.ModeSession.String() {
			said += "; should one get lost nonetheless, an executor runs it again and goes on without"
		}
		v.fact("statements", said)
	}
	if l := d.Listen; l != nil {
		said := l.State
		switch {
		case l.Millis > 0:
			said += fmt.Sprintf(": a notification from another session took %.1f ms", l.Millis)
		case l.Reason != "":
			said += ": " + l.Reason
		}
		v.fact("LISTEN", said)
	}
	for _, f := range d.Findings {
		v.finding(f)
	}
	if len(d.Findings) == 0 {
		v.check(check{true, "nothing to be improved"})
	}
}
