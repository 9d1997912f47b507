package executor

import (
	"cmp"
	"fmt"
	"log/slog"
	"time"

	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/prepare"
)

// PreparedStatements says whether an executor sends stable statements by name. Its text form (auto, on, off, shared) fits flags,
// environment variables and YAML.
type PreparedStatements = fallback.Policy

const (
	// Auto, the default, finds out what the connections lead to and sends stable statements by name where that holds; when a pooler loses
	// them it goes to unprepared with one warning, and back when the pooler keeps them again.
	Auto = fallback.PolicyAuto
	// On always sends stable statements by name. It never downgrades: a lost statement is returned as [*PreparedStatementError].
	On = fallback.PolicyOn
	// Off never uses a name. Results are the same, only slower.
	Off = fallback.PolicyOff
	// Shared is Auto, but behind a transaction pooler that forwards names as they are (PgBouncer before 1.21, or newer with
	// max_prepared_statements=0) it keeps prepared speed: names are content hashes, so whichever server connection answers either has the
	// statement or does not, and then it is parsed and run again. Every client of the same database role must be trusted: one of them
	// could create a name of ours with other SQL. Config.StatementSalt narrows that to clients that know the salt.
	Shared = fallback.PolicyShared
)

// Config configures an [Executor]. The zero value works. Durations: 0 is the default, negative is off.
type Config struct {
	// PreparedStatements defaults to Auto.
	PreparedStatements PreparedStatements

	// PrepareThreshold is the use of an unmarked text at which it becomes stable. Defaults to 5, as in pgjdbc and psycopg; 1 is the first
	// use; negative means that only statements marked with prepare.Stable are.
	PrepareThreshold int

	// StatementCapacity is how many names one connection keeps before the least recently used is closed. Under Shared it bounds the names
	// of the whole executor. Defaults to 200, PgBouncer's own default for max_prepared_statements.
	StatementCapacity int

	// StatementSalt goes into every statement's name. Executors with different salts never use each other's statements.
	StatementSalt string

	// ReprobeAfter is how long after a downgrade the pooler is looked at again; it doubles with every downgrade, up to 10 minutes.
	// Defaults to 30 seconds; negative means never.
	ReprobeAfter time.Duration

	// ProbeTimeout bounds one look at the pooler. Defaults to 2 seconds; negative means that only the caller's context bounds it.
	ProbeTimeout time.Duration

	// NotifyWindow is the shortest time between two notifying commits of this executor. Defaults to 10 ms.
	NotifyWindow time.Duration

	// Logger gets one warning per downgrade and one info per return. It never gets SQL or arguments. Defaults to slog.Default().
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
	if _, err := cfg.PreparedStatements.MarshalText(); err != nil {
		return cfg, fmt.Errorf("executor: Config.PreparedStatements: %w", err)
	}
	if cfg.StatementCapacity < 0 {
		return cfg, fmt.Errorf("executor: Config.StatementCapacity: %d is negative", cfg.StatementCapacity)
	}
	cfg.PrepareThreshold = cmp.Or(cfg.PrepareThreshold, defaultPrepareThreshold)
	cfg.StatementCapacity = cmp.Or(cfg.StatementCapacity, prepare.DefaultCapacity)
	cfg.ProbeTimeout = cmp.Or(cfg.ProbeTimeout, defaultProbeTimeout)
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	if cfg.Trace == nil {
		cfg.Trace = &Trace{}
	}
	return cfg, nil
}
