package pgbouncer

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/testenv/internal/sandbox"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

// Bouncer is a PgBouncer. It is safe for concurrent use.
type Bouncer struct {
	version string
	server  *postgres.Server
	sandbox *sandbox.Sandbox
	log     *sandbox.Log

	mu      sync.Mutex // guards what follows, and is held while PgBouncer starts or stops
	options Options
	proc    *sandbox.Process
}

// URL returns the address of a database of the server through this PgBouncer, for pgx.Connect and pgxpool.New.
func (b *Bouncer) URL(database string) string {
	u := url.URL{
		Scheme:   "postgres",
		User:     url.User(postgres.Superuser),
		Host:     net.JoinHostPort(b.sandbox.Host, strconv.Itoa(b.sandbox.Port)),
		Path:     "/" + database,
		RawQuery: "sslmode=disable&password=" + postgres.Password(),
	}
	return u.String()
}

// Version returns major.minor, also when the options left it open.
func (b *Bouncer) Version() string { return b.version }

// FullVersion returns the version as the binary says it, such as 1.18.0.
func (b *Bouncer) FullVersion() string { return b.sandbox.Version }

// Runtime returns "container" or "process".
func (b *Bouncer) Runtime() string { return b.sandbox.Kind }

// Server returns the server behind.
func (b *Bouncer) Server() *postgres.Server { return b.server }

// Admin runs a command on PgBouncer's admin console, such as "show servers", "pause" or "reconnect". It returns the
// rows by column name, none for commands. The console knows only the simple query protocol, so nothing is quoted.
func (b *Bouncer) Admin(sql string) ([]map[string]string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	rows, err := b.admin(ctx, sql)
	if err != nil {
		return nil, fmt.Errorf("testenv: PgBouncer %s: %s: %w", b.version, sql, err)
	}
	return rows, nil
}

func (b *Bouncer) admin(ctx context.Context, sql string) ([]map[string]string, error) {
	conn, err := pgconn.Connect(ctx, b.URL("pgbouncer"))
	if err != nil {
		return nil, err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	results, err := conn.Exec(ctx, sql).ReadAll()
	if err != nil {
		return nil, err
	}
	var rows []map[string]string
	for _, result := range results {
		for _, values := range result.Rows {
			row := make(map[string]string, len(values))
			for i, v := range values {
				row[result.FieldDescriptions[i].Name] = string(v)
			}
			rows = append(rows, row)
		}
	}
	return rows, nil
}

// Set changes a setting of the running PgBouncer until the next Reload or start.
func (b *Bouncer) Set(tb postgres.TB, setting, value string) {
	tb.Helper()
	if _, err := b.Admin(fmt.Sprintf("set %s = '%s'", setting, strings.ReplaceAll(value, "'", "''"))); err != nil {
		tb.Fatalf("%v", err)
	}
}

// Reload writes settings into the configuration file, over those that stand there, and has PgBouncer read it again.
func (b *Bouncer) Reload(tb postgres.TB, settings map[string]string) {
	tb.Helper()
	b.mu.Lock()
	merged := maps.Clone(b.options.Settings)
	if merged == nil {
		merged = map[string]string{}
	}
	maps.Copy(merged, settings)
	b.options.Settings = merged
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	err := b.writeIniLocked(ctx)
	b.mu.Unlock()
	if err == nil {
		_, err = b.Admin("reload")
	}
	if err != nil {
		tb.Fatalf("%v", err)
	}
}

// Pin opens a transaction through url, which is an address of this PgBouncer, and so occupies one server connection of
// its pool until release is called. It is the deterministic way to make another client change servers: with
// server_round_robin off PgBouncer hands out the connection used last, so whoever used that one before Pin finds
// itself on another one afterwards. PgBouncer's own tests do it so (test/test_prepared.py).
func (b *Bouncer) Pin(ctx context.Context, url string) (release func(), err error) {
	conn, err := pgconn.Connect(ctx, url)
	if err != nil {
		return nil, fmt.Errorf("testenv: pin: %w", err)
	}
	// The pool assigns a server at the first query, and BEGIN is one.
	if _, err := conn.Exec(ctx, "begin").ReadAll(); err != nil {
		_ = conn.Close(context.WithoutCancel(ctx))
		return nil, fmt.Errorf("testenv: pin: %w", err)
	}
	return sync.OnceFunc(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		// Awaiting the end of ROLLBACK gives the connection back in a known state, which a mere close does not.
		_, _ = conn.Exec(ctx, "rollback").ReadAll()
		_ = conn.Close(ctx)
	}), nil
}

// Log returns what PgBouncer has logged so far.
func (b *Bouncer) Log() string { return b.log.String() }

// AwaitLog waits until PgBouncer has logged text, and fails the test if that takes longer than ten seconds. Logs come
// through a pipe, so a line may lie a moment behind its event.
func (b *Bouncer) AwaitLog(tb postgres.TB, text string) {
	tb.Helper()
	if !b.log.Await(text, 10*time.Second) {
		tb.Fatalf("testenv: not in the log: %q", text)
	}
}

// LogContains reports whether PgBouncer has logged text.
func (b *Bouncer) LogContains(text string) bool { return strings.Contains(b.log.String(), text) }

// Stop shuts PgBouncer down at once, without waiting for clients. It does nothing when PgBouncer does not run.
func (b *Bouncer) Stop(tb postgres.TB) {
	tb.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.endLocked(b.stopSignal()); err != nil {
		tb.Fatalf("%v", err)
	}
}

// stopSignal is the one for an immediate shutdown: from 1.23 on SIGTERM waits for the clients (NEWS of 1.23.0).
func (b *Bouncer) stopSignal() string {
	if atLeast(b.version, 23) {
		return "QUIT"
	}
	return "TERM"
}

// Kill ends PgBouncer with SIGKILL. It does nothing when PgBouncer does not run.
func (b *Bouncer) Kill(tb postgres.TB) {
	tb.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.endLocked("KILL"); err != nil {
		tb.Fatalf("%v", err)
	}
}

// Start starts PgBouncer again after Stop or Kill, on the same port.
func (b *Bouncer) Start(tb postgres.TB) {
	tb.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	b.startAgainLocked(tb)
}

// Restart stops PgBouncer if it runs and starts it again, on the same port.
func (b *Bouncer) Restart(tb postgres.TB) {
	tb.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.endLocked(b.stopSignal()); err != nil {
		tb.Fatalf("%v", err)
	}
	b.startAgainLocked(tb)
}

func (b *Bouncer) startAgainLocked(tb postgres.TB) {
	tb.Helper()
	if b.proc != nil && !b.proc.Ended() {
		tb.Fatalf("testenv: PgBouncer %s runs already", b.version)
	}
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	if err := b.startLocked(ctx); err != nil {
		tb.Fatalf("%v", err)
	}
}

func (b *Bouncer) writeIniLocked(ctx context.Context) error {
	host, port := b.server.AddressFor(b.sandbox)
	conf := ini(endpoint{b.sandbox.ListenHost, b.sandbox.ListenPort}, endpoint{host, port}, b.sandbox.Path("userlist.txt"), b.options)
	return b.sandbox.Write(ctx, "pgbouncer.ini", []byte(conf))
}

func (b *Bouncer) startLocked(ctx context.Context) error {
	mark := b.log.Mark()
	p, err := b.sandbox.Start(ctx, "pgbouncer", b.log, b.sandbox.Bin("pgbouncer"), b.sandbox.Path("pgbouncer.ini"))
	if err != nil {
		return fmt.Errorf("testenv: PgBouncer %s: %w", b.version, err)
	}
	b.proc = p
	err = b.awaitReady(ctx, p)
	if err == nil {
		return nil
	}
	said := b.log.Since(mark)
	if strings.Contains(said, "Address already in use") {
		return fmt.Errorf("testenv: PgBouncer %s: %w", b.version, sandbox.ErrPortTaken)
	}
	return fmt.Errorf("testenv: PgBouncer %s did not start: %w\n%s", b.version, err, sandbox.Tail(said, 30))
}

// awaitReady returns when PgBouncer answers, or p has ended.
func (b *Bouncer) awaitReady(ctx context.Context, p *sandbox.Process) error {
	for {
		err := b.identify(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-p.Done():
			return errors.New("the process ended")
		case <-ctx.Done():
			return errors.Join(ctx.Err(), err)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// identify checks that it is this PgBouncer that answers: its list of users lies in a directory of its own.
func (b *Bouncer) identify(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	rows, err := b.admin(ctx, "show config")
	if err != nil {
		return err
	}
	for _, row := range rows {
		if row["key"] == "auth_file" && row["value"] == b.sandbox.Path("userlist.txt") {
			return nil
		}
	}
	return fmt.Errorf("port %d belongs to another PgBouncer", b.sandbox.Port)
}

func (b *Bouncer) endLocked(signal string) error {
	if b.proc == nil || b.proc.Ended() {
		return nil
	}
	if err := b.proc.Signal(signal); err != nil {
		return fmt.Errorf("testenv: PgBouncer %s: SIG%s: %w", b.version, signal, err)
	}
	select {
	case <-b.proc.Done():
		return nil
	case <-time.After(startTimeout):
		return fmt.Errorf("testenv: PgBouncer %s still runs after SIG%s", b.version, signal)
	}
}

func (b *Bouncer) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	return b.sandbox.Close(ctx)
}
