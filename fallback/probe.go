package fallback

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

const (
	// probeBudget bounds everything a probe does after its first connection stands.
	probeBudget = 2 * time.Second
	// probePatience bounds one answer on the second connection. In session pooling with every server taken it would come after
	// query_wait_timeout, two minutes by default.
	probePatience = 500 * time.Millisecond
	// probeRounds is how often the two connections ask in turn. Against PgBouncer 1.18 with four servers and 16 busy clients one round
	// missed 11 of 60 times, five rounds never.
	probeRounds = 5
	// probeText is followed by a number that is this probe's own. A pooler that tracks keeps its statements by their texts and sends a server none
	// that it thinks is there; with a text that another probe had parsed, one that was taken away unseen would look as if it had not come.
	probeText = "select 1 /* bounceproof probe %s */"
	// namesText asks by which names the server knows a text.
	namesText = "select pg_catalog.pg_backend_pid(), s.name from (select 1) one" +
		" left join pg_catalog.pg_prepared_statements s on s.statement = $1"
)

// probeStatement returns a name and a text that nobody has used.
func probeStatement() (name, text string) {
	number := randomHex()
	return "bp_probe_" + number, fmt.Sprintf(probeText, number)
}

// Probe finds out what answers at the other end of dial. It opens its own connections, at most two, one after the other, and closes them;
// a direct connection costs one round trip, anything else at most 14 and two seconds after the first connection stands. It leaves nothing
// behind but one short statement in the cache of a pooler that tracks, which goes with the server connection or makes room for others.
//
//  1. The process id of the connection's BackendKeyData is compared with pg_backend_pid(). PgBouncer makes up its own (proto.c), as do
//     Odyssey, PgCat and Supavisor. Equal: direct, unless answers come in another order than PostgreSQL's. (A proxy that relays both is taken
//     for direct, and behaves like it.)
//  2. In one Sync group: Parse a random name, read pg_prepared_statements, Close it. Whichever name the server knows the text by shows
//     whether the pooler forwards names or keeps track of them under its own.
//  3. Two connections ask for their backend in turn. One backend on both, or a change under one of them: servers are shared.
//  4. BEGIN, on the second connection if there is one, shows statement pooling.
//
// What the probe did not see it does not claim: a statement that step 2 did not find by either name says nothing about tracking, and without
// evidence in step 3 the topology is [ModeSession], which a lost statement may correct later. Where a step could not be done it is Partial.
// An error means that nothing was found out; it wraps ctx.Err() if ctx was done.
//
// Probe is safe for concurrent use, if dial is.
func Probe(ctx context.Context, dial func(context.Context) (*pgconn.PgConn, error)) (Topology, error) {
	a, err := dialProbe(ctx, dial)
	if err != nil {
		return Topology{}, fmt.Errorf("fallback: probe: connect: %w", err)
	}
	defer a.close()
	budget, cancel := context.WithTimeout(ctx, probeBudget)
	defer cancel()

	backend, ordered, err := a.orderedBackend(budget)
	if err != nil {
		return Topology{}, probeError(ctx, err)
	}
	if backend == a.keyPID && ordered {
		return directTopology(backend), nil
	}
	p := newProbe(a.keyPID, backend)
	p.a, p.dial = a, dial

	if err := p.names(budget); err != nil {
		return Topology{}, probeError(ctx, err)
	}
	p.servers(budget)
	p.begin(budget)
	if err := ctx.Err(); err != nil {
		return Topology{}, probeError(ctx, err)
	}
	return p.top, nil
}

// probeError names the caller's context as the cause where it is, and only there.
func probeError(ctx context.Context, err error) error {
	if ctxErr := ctx.Err(); ctxErr != nil {
		return fmt.Errorf("fallback: probe: %w", ctxErr)
	}
	if isContextError(err) {
		return fmt.Errorf("fallback: probe: no answer within %v", probeBudget)
	}
	return fmt.Errorf("fallback: probe: %w", err)
}

// probe is one run behind a pooler.
type probe struct {
	a, b     *wire // b may be nil: refused, or lost
	dial     func(context.Context) (*pgconn.PgConn, error)
	rounds   int
	backends [2]uint32 // last seen on a and b; 0 = none yet
	top      Topology
}

// newProbe returns one that has seen the first answer: it is a pooler's.
func newProbe(keyPID, backend uint32) *probe {
	p := &probe{rounds: probeRounds, backends: [2]uint32{backend, 0}, top: Topology{Pooler: PoolerOther}}
	if backend == keyPID {
		p.note("the connection's process id %d is its backend's, but answers come out of order, so a proxy is in between", keyPID)
	} else {
		p.note("the connection's process id %d is not its backend's %d", keyPID, int32(backend)) // CockroachDB's -1
	}
	return p
}

// directTopology is that of a connection whose backend has the process id that the connection was given.
func directTopology(backend uint32) Topology {
	return Topology{Pooler: PoolerNone, Mode: ModeDirect, Evidence: []string{
		fmt.Sprintf("the connection's process id %d is its backend's", backend),
	}}
}

// sharesBecauseItTracks spares a look at the servers.
func (p *probe) sharesBecauseItTracks() {
	p.top.Mode = ModeTransaction
	p.note("PgBouncer tracks statements only where it shares servers")
}

func (p *probe) note(format string, args ...any) {
	p.top.Evidence = append(p.top.Evidence, fmt.Sprintf(format, args...))
}

// names is step 2.
func (p *probe) names(ctx context.Context) error {
	name, text := probeStatement()
	rows, err := p.a.group(ctx, func(w *wire) {
		w.parse(name, text)
		w.query(namesText, text)
		w.closeStatement(name)
	})
	if err != nil {
		var pgErr *pgconn.PgError
		if p.a.dead || !errors.As(err, &pgErr) {
			return err
		}
		// The error skipped the Close. It may reach another server now; the random name then harms nobody.
		_, _ = p.a.group(ctx, func(w *wire) { w.closeStatement(name) })
		p.rounds-- // in which this one was not planned
		p.note("asking for prepared statements failed with SQLSTATE %s", pgErr.Code)
		return nil
	}
	p.judgeNames(name, rows)
	return nil
}

// judgeNames takes the answer to step 2.
func (p *probe) judgeNames(name string, rows [][][]byte) {
	var other string
	for _, row := range rows {
		if len(row) != 2 {
			continue
		}
		p.sees(0, parsePID(row[0]))
		switch {
		case string(row[1]) == name:
			p.top.Forwards = true
			p.note("it forwards the names of prepared statements as they are")
			return
		case row[1] != nil:
			other = string(row[1])
		}
	}
	if other == "" {
		p.note("the server did not show a statement that was parsed a moment before")
		return
	}
	p.top.Tracks = true
	if maker := renamedBy(other); maker != PoolerUnknown {
		p.top.Pooler = maker
	}
	p.note("it tracks prepared statements: the server knows ours as %q", other)
}

// sees records on which backend a connection (0 or 1) was answered, and what follows from it.
func (p *probe) sees(conn int, backend uint32) {
	last := p.backends[conn]
	p.backends[conn] = backend
	switch {
	case p.top.Mode != ModeUnknown || int32(backend) <= 0: // the same -1 from everywhere says nothing
	case last != 0 && last != backend:
		p.top.Mode = ModeTransaction
		p.note("one connection was answered by backends %d and %d", last, backend)
	case p.backends[1-conn] == backend:
		p.top.Mode = ModeTransaction
		p.note("two open connections were answered by the same backend %d", backend)
	}
}

// servers is step 3. Whatever goes wrong in it is no evidence.
func (p *probe) servers(ctx context.Context) {
	if p.top.Mode == ModeUnknown && p.top.Pooler == PoolerPgBouncer {
		p.sharesBecauseItTracks()
	}
	if p.top.Mode != ModeUnknown {
		return
	}
	defer func() {
		if p.top.Mode == ModeUnknown {
			p.top.Mode = ModeSession
			p.note("no change of backend was seen")
		}
	}()
	patience, cancel := context.WithTimeout(ctx, probePatience)
	b, err := dialProbe(patience, p.dial)
	cancel()
	if err != nil {
		p.note("a second connection was refused")
		p.top.Partial = !isContextError(err)
	}
	p.b = b
	for range p.rounds {
		for i, w := range [2]*wire{p.a, p.b} {
			if w == nil || w.dead {
				continue
			}
			patience, cancel := context.WithTimeout(ctx, probePatience)
			backend, err := w.backend(patience)
			cancel()
			if err != nil {
				w.close()
				p.note("connection %d was not answered", i+1)
				if !isContextError(err) {
					p.top.Partial = true // ended, and not kept waiting for a server, as a session pooler does that has given away all
				}
				continue
			}
			p.sees(i, backend)
			if p.top.Mode != ModeUnknown {
				return
			}
		}
	}
}

// begin is step 4. It ends the second connection, or the first where there is no second.
func (p *probe) begin(ctx context.Context) {
	w := p.b
	if w == nil || w.dead {
		w = p.a
	}
	defer func() {
		if p.b != nil {
			p.b.close()
		}
	}()
	if w.dead {
		p.top.Partial = true
		return
	}
	_, err := w.group(ctx, func(w *wire) { w.query("begin") })
	var pgErr *pgconn.PgError
	switch {
	case err == nil:
		_, _ = w.group(ctx, func(w *wire) { w.query("rollback") })
	case errors.As(err, &pgErr) && Classify(pgErr, Context{}).Reason == ReasonStatementMode:
		p.top.Mode = ModeStatement
		p.note("it refuses transactions: %s", pgErr.Message)
	default:
		p.top.Partial = true
		p.note("whether it refuses transactions was not seen")
	}
}

func parsePID(text []byte) uint32 {
	n, err := strconv.ParseInt(string(text), 10, 64)
	if err != nil {
		return 0
	}
	return uint32(n) // CockroachDB answers -1, a process id fits
}

func randomHex() string {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails, crypto/rand
	return hex.EncodeToString(b[:])
}
