package executor

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/internal/selector"
	"github.com/bounceproof/bounceproof/internal/statement"
)

// Topology looks at what the pool's connections lead to, or returns what an earlier look found. It fails when the server cannot be
// reached within Config.ProbeTimeout; the executor then runs unprepared and looks again later.
func (ex *Executor) Topology(ctx context.Context) (fallback.Topology, error) {
	if top := ex.selector.Decision().Topology; top.Known() {
		return top, nil
	}
	if ex.closed.Load() {
		return fallback.Topology{}, ErrClosed
	}
	return ex.probe(ctx, nil)
}

// decide returns the present way of sending stable statements. The first caller, and later one whenever it is time to look again, probes
// under its own context; others go on meanwhile as it was decided, at first unprepared. It is asked once a request, before anything of it is
// sent, and never looks from within an open transaction: a pooler's only server would be the one that the transaction holds. The next Begin
// looks instead.
func (ex *Executor) decide(ctx context.Context, c *statement.Conn, stable bool) *selector.Decision {
	if !stable {
		return ex.selector.Decision()
	}
	if c.PgConn().TxStatus() == 'I' {
		ex.probeIfDue(ctx, c)
		if ex.shared.owes() && ex.selector.Decision().Strategy == fallback.Shared {
			ex.closeEvicted(ctx, c)
		}
	} else if !ex.probeAtBegin.Load() {
		ex.probeAtBegin.Store(true)
	}
	return ex.selector.Decision()
}

// probeIfDue probes if it is time to. What it found out, or that it did not, is with the selector. c is an idle connection of the pool's that the
// caller holds, nil for none.
func (ex *Executor) probeIfDue(ctx context.Context, c *statement.Conn) {
	if ex.selector.ShouldProbe() {
		_, _ = ex.probe(ctx, c)
	}
}

// statementMode reports whether the pooler is known to refuse transactions.
func (ex *Executor) statementMode() bool {
	return ex.selector.Decision().Topology.Mode == fallback.ModeStatement
}

// probe looks at the pooler on connections of its own, and where it is refused one, on one of the pool's: c, or one that is free.
func (ex *Executor) probe(ctx context.Context, c *statement.Conn) (fallback.Topology, error) {
	probeCtx := ctx
	if ex.cfg.ProbeTimeout > 0 {
		var cancel context.CancelFunc
		probeCtx, cancel = context.WithTimeout(ctx, ex.cfg.ProbeTimeout)
		defer cancel()
	}
	ex.counters.probes.Add(1)
	start := time.Now()
	top, err := fallback.Probe(probeCtx, ex.dial)
	if err != nil && refusedConnection(err) {
		if own, ownErr := ex.probeOwn(probeCtx, c); ownErr == nil {
			top, err = own, nil
		}
	}
	ex.cfg.Trace.probed(top, time.Since(start), err)
	if err != nil {
		ex.selector.ProbeFailed(ctx, err)
		return fallback.Topology{}, fmt.Errorf("executor: probe: %w", err)
	}
	ex.selector.Probed(ctx, top)
	ex.checkSettings(probeCtx, top)
	return top, nil
}

// refusedConnection reports whether a probe got no connection because the server or the pooler said no, as when the pool has taken all that the
// role may have. One that does not answer is not asked a second time.
func refusedConnection(err error) bool {
	var connectErr *pgconn.ConnectError
	var pgErr *pgconn.PgError
	return errors.As(err, &connectErr) && errors.As(err, &pgErr)
}

// probeOwn looks at what one of the pool's connections shows.
func (ex *Executor) probeOwn(ctx context.Context, c *statement.Conn) (fallback.Topology, error) {
	if c == nil {
		s, err := ex.acquire(ctx)
		if err != nil {
			return fallback.Topology{}, err
		}
		defer s.release()
		c = s.c
	}
	return fallback.ProbeOne(ctx, c.PgConn())
}

// newSelector returns the selector of a new executor.
func (ex *Executor) newSelector() *selector.Selector {
	return selector.New(selector.Config{
		Policy: selector.Policy(ex.cfg.PreparedStatements), Logger: ex.cfg.Logger, ReprobeAfter: ex.cfg.ReprobeAfter,
		OnChange: func(c selector.Change) {
			switch {
			case c.To == fallback.Unprepared:
				ex.counters.downgrades.Add(1)
			case c.From == fallback.Unprepared:
				ex.counters.upgrades.Add(1)
			}
			ex.cfg.Trace.changed(c)
		},
	})
}

// dial opens a connection as the pool would, but not one of the pool's: a pool may have a single connection, or none free.
func (ex *Executor) dial(ctx context.Context) (*pgconn.PgConn, error) {
	return fallback.Dialer(func(ctx context.Context) (*pgconn.Config, error) {
		cfg := ex.pool.Config()
		if cfg.BeforeConnect != nil {
			if err := cfg.BeforeConnect(context.WithValue(ctx, probeKey{}, true), cfg.ConnConfig); err != nil {
				return nil, err
			}
		}
		return &cfg.ConnConfig.Config, nil
	})(ctx)
}
