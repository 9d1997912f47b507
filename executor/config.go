package executor

import (
	"cmp"
	"fmt"
	"log/slog"
	"time"

	"github.com/bounceproof/bounceproof/internal/statement"
	"github.com/bounceproof/bounceproof/notify"
	"github.com/bounceproof/bounceproof/prepare"
)

// Config configures an [Executor], and [Guard]. The zero value works. Of durations 0 is the default and negative is off.
type Config struct {
	// PreparedStatements defaults to Auto.
	PreparedStatements PreparedStatements

	// PrepareThreshold is the use of an unmarked text at which it becomes stable. Defaults to 5, as in pgjdbc and psycopg; 1 is the first
	// use; negative means that only statements marked with prepare.Stable are.
	PrepareThreshold int

	// StatementCapacity is how many names one connection keeps before the least recently used is closed. Under Shared it counts for the
	// whole executor, and what falls out is closed on the server connections that come along, some 32 names at a time: each keeps about as
	// many names of this executor's, and a few tens more. In statement mode, which has no transaction to do that in, they stay until the
	// pooler ends the server connection. Defaults to 200, PgBouncer's own default for max_prepared_statements; negative is an error.
	StatementCapacity int

	// StatementSalt goes into every statement's name. Executors with different salts never use each other's statements, by accident. It is no secret
	// and no protection: whoever reaches the same server connection reads the names in pg_prepared_statements, and can deallocate one and
	// prepare other SQL under it. What separates programs that do not trust each other is a server connection for each, see docs/security.md.
	StatementSalt string

	// ReprobeAfter is how long after a downgrade the pooler is looked at again; it doubles with every downgrade, up to 10 minutes.
	// Defaults to 30 seconds; negative means never.
	ReprobeAfter time.Duration

	// ProbeTimeout bounds one look at the pooler. Defaults to 2 seconds; negative means that only the caller's context bounds it.
	ProbeTimeout time.Duration

	// Sender configures the sender behind [Executor.Notify] and [Executor.Sender]. Its Logger defaults to the executor's, its Options to
	// prepare.Stable. Guard has no use for it.
	Sender notify.SenderConfig

	// Logger gets one warning per downgrade and one info per return, the first decision under Shared included, and lines for debugging. It never
	// gets SQL or arguments. Defaults to slog.Default().
	Logger *slog.Logger

	// Trace is called at the executor's own events; nil is none.
	Trace *Trace
}

// Defaults of Config.
const (
	defaultPrepareThreshold = 5
	defaultProbeTimeout     = 2 * time.Second
)

// resolve returns cfg with its defaults filled in, or an error that names the field.
func (cfg Config) resolve() (Config, error) {
	if int(cfg.PreparedStatements) >= len(policyTexts) {
		return cfg, fmt.Errorf("executor: Config.PreparedStatements: there is no value %d", uint8(cfg.PreparedStatements))
	}
	if cfg.StatementCapacity < 0 {
		return cfg, fmt.Errorf("executor: Config.StatementCapacity: %d is negative", cfg.StatementCapacity)
	}
	cfg.PrepareThreshold = cmp.Or(cfg.PrepareThreshold, defaultPrepareThreshold)
	cfg.StatementCapacity = cmp.Or(cfg.StatementCapacity, statement.DefaultCapacity)
	cfg.ProbeTimeout = cmp.Or(cfg.ProbeTimeout, defaultProbeTimeout)
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	if cfg.Trace == nil {
		cfg.Trace = &Trace{}
	}
	if cfg.Sender.Logger == nil {
		cfg.Sender.Logger = cfg.Logger
	}
	if cfg.Sender.Options == nil {
		cfg.Sender.Options = []any{prepare.Stable}
	}
	return cfg, nil
}
