package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/internal/startup"
)

const (
	// answerPatience is after how long without an answer the doctor looks at what is there.
	answerPatience = 2 * time.Second
	// serverPatience is for how much longer it waits where a pooler answers and does not tell whether it has a server.
	serverPatience = 5 * time.Second
	// consolePatience bounds that look.
	consolePatience = 2 * time.Second
)

// target is a host of a connection string: what pgx tries for it, with and without TLS.
type target struct {
	host  string
	port  uint16
	ways  []*pgconn.FallbackConfig
	whole *pgconn.Config
}

// targets returns the hosts of a connection string in their order.
func targets(cfg *pgxpool.Config) []target {
	cc := &cfg.ConnConfig.Config
	var all []target
	for _, way := range append([]*pgconn.FallbackConfig{{Host: cc.Host, Port: cc.Port, TLSConfig: cc.TLSConfig}}, cc.Fallbacks...) {
		if n := len(all); n == 0 || all[n-1].host != way.Host || all[n-1].port != way.Port {
			all = append(all, target{host: way.Host, port: way.Port, whole: cc})
		}
		last := &all[len(all)-1]
		last.ways = append(last.ways, way)
	}
	return all
}

// address is the host as the connection string has it, with its port; for a socket the file.
func (t target) address() string {
	if network, address := pgconn.NetworkAddress(t.host, t.port); network == "unix" {
		return address
	}
	return net.JoinHostPort(t.host, strconv.Itoa(int(t.port)))
}

// pin makes a configuration lead to this host alone.
func (t target) pin(cc *pgconn.Config) {
	cc.Host, cc.Port, cc.TLSConfig, cc.Fallbacks = t.host, t.port, t.ways[0].TLSConfig, t.ways[1:]
}

func (t target) config() *pgconn.Config {
	cc := t.whole.Copy()
	t.pin(cc)
	return cc
}

// host is what became of a host of the connection string.
type host struct {
	Address string  `json:"address"`
	Answers *bool   `json:"answers"` // null: not tried
	Error   *string `json:"error"`
}

// reach finds the host that a connection of this connection string ends at, as pgx does (pgconn.connectPreferred), and pins the
// configuration to it, so that one host is examined and not now this one, now that. It reports whether there is one.
func (d *diagnosis) reach(ctx context.Context, cfg *pgxpool.Config) bool {
	all := targets(cfg)
	d.Hosts = make([]host, len(all))
	for i, t := range all {
		d.Hosts[i].Address = t.address()
	}
	second := -1 // one that will do if none is preferred
	var last failure
	for i, t := range all {
		s, err := d.tryHost(ctx, t, t.config())
		if err == nil {
			d.reached(i, t, s, cfg)
			return true
		}
		last = d.explain(ctx, t, err)
		d.Hosts[i].Answers, d.Hosts[i].Error = new(false), &last.what
		if _, ok := errors.AsType[*pgconn.NotPreferredError](err); ok && second < 0 {
			second = i
		}
		if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok && slices.Contains([]string{"28P01", "3D000", "42501"}, pgErr.Code) {
			break
		}
		if ctx.Err() != nil {
			break
		}
	}
	if second >= 0 {
		t, cc := all[second], all[second].config()
		cc.ValidateConnect = nil
		if s, err := d.tryHost(ctx, t, cc); err == nil {
			cfg.ConnConfig.ValidateConnect = nil
			d.reached(second, t, s, cfg)
			return true
		}
	}
	if len(all) == 1 {
		d.find(problem, "no connection: "+last.what, last.remedy)
		return false
	}
	d.Address = nil
	d.find(problem, "no connection: none of the hosts answers as it should", last.remedy)
	return false
}

// reached takes down the host that a connection ends at.
func (d *diagnosis) reached(i int, t target, s *server, cfg *pgxpool.Config) {
	t.pin(&cfg.ConnConfig.Config)
	d.Server = s
	d.Address = new(t.address())
	d.Hosts[i].Answers, d.Hosts[i].Error = new(true), nil
	if i == 0 {
		return
	}
	d.find(note, fmt.Sprintf("every new connection tries %s first", d.Hosts[0].Address), "leave out the hosts that are gone")
}

// attempt is what became of a connection attempt.
type attempt struct {
	server *server
	err    error
}

// tryHost connects and asks one thing, so that a pooler needs a server for the answer.
func (d *diagnosis) tryHost(ctx context.Context, t target, cc *pgconn.Config) (*server, error) {
	trying, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan attempt, 1)
	go func() {
		s, err := askServer(trying, cc)
		done <- attempt{s, err}
	}()
	timer := time.NewTimer(answerPatience)
	defer timer.Stop()
	select {
	case a := <-done:
		return a.server, a.err
	case <-timer.C:
	}
	seen := lookBehind(ctx, t.config())
	switch {
	case seen.servers == noServers:
		return nil, &noServerError{seen}
	case seen.pooler:
		timer.Reset(serverPatience)
	}
	select {
	case a := <-done:
		if a.err != nil && seen.pooler {
			a.err = &noServerError{seen}
		}
		return a.server, a.err
	case <-timer.C: // only where it was set again
		return nil, &noServerError{seen}
	}
}

const sqlServer = "select pg_catalog.current_setting('server_version'), pg_catalog.current_setting('server_version_num'), " +
	"pg_catalog.pg_is_in_recovery()::text"

func askServer(ctx context.Context, cc *pgconn.Config) (*server, error) {
	conn, err := pgconn.ConnectConfig(ctx, cc)
	if err != nil {
		return nil, err
	}
	row, err := startup.Ask(ctx, conn, sqlServer)
	if err != nil {
		return nil, err
	}
	if len(row) != 3 {
		return nil, errors.New("asked for its version it answers without one: this is not PostgreSQL")
	}
	number, _ := strconv.Atoi(string(row[1])) // 0 is older than everything
	return &server{PostgreSQL: string(row[0]), number: number, Standby: string(row[2]) == "true"}, nil
}

// behind is what the doctor sees of a pooler that gives no server.
type behind struct {
	pooler  bool   // a pooler answers
	version string // as its console says; empty if it does not let us in
	servers int    // connections to servers that stand for this database, or one of the following
	server  string // host:port of the server, empty if it is not known
}

const (
	noServers      = 0
	unknownServers = -1
)

// noServerError is a pooler that answers and gives no server.
type noServerError struct{ behind }

func (e *noServerError) Error() string {
	who := e.who()
	switch {
	case e.servers == noServers && e.server != "":
		return fmt.Sprintf("%s answers, but its server does not: it has no connection to %s for this database", who, e.server)
	case e.servers == noServers:
		return who + " answers, but its server does not: it has no connection to one for this database"
	case e.servers > 0:
		return fmt.Sprintf("%s answers, but gave no server in time: it has %s for this database, and all are in use", who, some(e.servers, "server connection"))
	}
	return who + " answers, but gave no server in time: its server is down, or all its server connections are in use"
}

func (e *noServerError) who() string {
	if e.version == "" {
		return "a pooler"
	}
	return e.version
}

func (e *noServerError) remedy() string {
	switch {
	case e.servers == noServers:
		return "start the server, or correct its host and port in the pooler's configuration; the pooler's log says why it cannot connect"
	case e.servers > 0:
		return "find out who holds them (SHOW CLIENTS on the console; idle in transaction?), or raise default_pool_size"
	}
	return "read the pooler's log; on its console SHOW POOLS shows whether it has servers (sv_active, sv_idle) and who waits (cl_waiting)"
}

// explain says in a sentence why a host was not reached.
func (d *diagnosis) explain(ctx context.Context, t target, err error) failure {
	if e, ok := errors.AsType[*noServerError](err); ok {
		return failure{e.Error(), e.remedy()}
	}
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok {
		if noServer(pgErr) {
			seen := lookBehind(ctx, t.config())
			seen.pooler = true
			if seen.servers != noServers {
				seen.servers = noServers // it says so itself
			}
			e := &noServerError{seen}
			return failure{fmt.Sprintf("%s (it says: %s)", e.Error(), oneLine(pgErr.Message)), e.remedy()}
		}
		return failure{said(pgErr), serverRemedy(pgErr)}
	}
	if e, ok := errors.AsType[*net.DNSError](err); ok {
		if e.IsNotFound {
			return failure{"there is no host of that name", "correct the host, or ask for it where names are known (DNS, /etc/hosts)"}
		}
		return failure{"the host's name could not be looked up: " + e.Err, "try again; check the name server"}
	}
	if _, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		return failure{"the server's certificate is not accepted: " + cause(err), "check sslrootcert and the host's name, or choose another sslmode"}
	}
	if ctx.Err() != nil || errors.Is(err, context.DeadlineExceeded) {
		return failure{"no answer in time", "check host and port, and what stands in between (a firewall drops packets, a listener that is no server says nothing), or take a longer --timeout"}
	}
	switch text := cause(err); {
	case strings.Contains(text, "connection refused"):
		return failure{"connection refused: nothing listens there", "start the server or the pooler, or correct host and port"}
	case strings.Contains(text, "no such file"):
		return failure{"there is no such socket: no server of this machine listens there", "start the server, or name the host and the port"}
	case strings.Contains(text, "server refused TLS"):
		return failure{"the server has no TLS, and sslmode asks for it", "configure TLS on the server, or set sslmode=disable if nobody can listen in"}
	case strings.Contains(text, "unexpected EOF"), strings.Contains(text, "connection reset"):
		return failure{"the other side closed the connection: " + text, "check that this is PostgreSQL's port or a pooler's; read its log"}
	default:
		return failure{text, "check that this is PostgreSQL's port or a pooler's; read its log"}
	}
}

// noServer reports whether a pooler says that its server cannot be reached.
func noServer(e *pgconn.PgError) bool {
	if e.Routine != "" {
		return false
	}
	return slices.ContainsFunc([]string{"server login has been failing", "pgbouncer cannot connect to server", "connect failed", "server login failed"},
		func(text string) bool { return strings.HasPrefix(e.Message, text) })
}

// said is what a server or a pooler said.
func said(e *pgconn.PgError) string {
	who := "the server"
	if e.Routine == "" {
		who = "the pooler"
	}
	return fmt.Sprintf("%s says: %s (SQLSTATE %s)", who, oneLine(e.Message), e.Code)
}

// pgconn writes in front of a cause whom it tried to reach, which the doctor says in its own way.
var (
	attemptPrefix = regexp.MustCompile("^failed to connect to `[^`]*`:\\s*")
	hostPrefix    = regexp.MustCompile(`^\S+ \([^)]*\): `)
)

// cause is the first cause of a connection error, in one line.
func cause(err error) string {
	text, _, _ := strings.Cut(attemptPrefix.ReplaceAllString(err.Error(), ""), "\n")
	return oneLine(hostPrefix.ReplaceAllString(text, ""))
}

// serverRemedy says where to look after an answer that is an error.
func serverRemedy(e *pgconn.PgError) string {
	verdict := fallback.Classify(e, fallback.Context{Phase: fallback.PhaseConnect})
	switch {
	case strings.HasPrefix(e.Message, "unsupported startup parameter"), strings.HasPrefix(e.Message, "unsupported options startup parameter"):
		return "set it with ALTER ROLE … IN DATABASE … SET and leave it out of the connection string, or let PgBouncer 1.20 or newer pass it on with " +
			"track_extra_parameters, if the server reports it (search_path from PostgreSQL 18 on). ignore_startup_parameters lets you in too, but then " +
			"PgBouncer drops the setting and says nothing"
	case strings.HasPrefix(e.Code, "28"), strings.Contains(e.Message, "authentication failed"):
		return "check user and password, and pg_hba.conf or PgBouncer's auth_file"
	case e.Code == "3D000", strings.HasPrefix(e.Message, "no such database"):
		return "create the database, or correct its name; a pooler also needs it in its own configuration"
	case e.Code == "42704":
		return "correct the name of the parameter in the connection string"
	case e.Code == "22023":
		return "correct the value of the parameter in the connection string"
	case e.Code == "53300", verdict.Reason == fallback.ReasonPoolerBusy:
		return "try again; if it stays so, raise the limit (max_connections, max_client_conn, default_pool_size) or use fewer connections"
	case e.Code == "57P03":
		return "wait until the server has started"
	default:
		return "read the server's and the pooler's logs"
	}
}
