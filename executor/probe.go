package executor

import (
	"context"
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
	return ex.probe(ctx)
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
		ex.probeIfDue(ctx)
	} else if !ex.probeAtBegin.Load() {
		ex.probeAtBegin.Store(true)
	}
	return ex.selector.Decision()
}

// probeIfDue probes if it is time to. What it found out, or that it did not, is with the selector.
func (ex *Executor) probeIfDue(ctx context.Context) {
	if ex.selector.ShouldProbe() {
		_, _ = ex.probe(ctx)
	}
}

// statementMode reports whether the pooler is known to refuse transactions.
func (ex *Executor) statementMode() bool {
	return ex.selector.Decision().Topology.Mode == fallback.ModeStatement
}

// probe looks at the pooler on connections of its own.
func (ex *Executor) probe(ctx context.Context) (fallback.Topology, error) {
	probeCtx := ctx
	if ex.cfg.ProbeTimeout > 0 {
		var cancel context.CancelFunc
		probeCtx, cancel = context.WithTimeout(ctx, ex.cfg.ProbeTimeout)
		defer cancel()
	}
	ex.counters.probes.Add(1)
	start := time.Now()
	top, err := fallback.Probe(probeCtx, ex.dial)
	ex.cfg.Trace.probed(top, time.Since(start), err)
	if err != nil {
		ex.selector.ProbeFailed(ctx, err)
		return fallback.Topology{}, fmt.Errorf("executor: probe: %w", err)
	}
	ex.selector.Probed(ctx, top)
	ex.checkSettings(probeCtx, top)
	return top, nil
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
