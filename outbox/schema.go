package outbox

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/prepare"
)

// schemaVersion is the version that this package reads and writes.
const schemaVersion = 2

const defaultLanes = 16

//go:embed sql/*.sql
var files embed.FS

// text returns an embedded statement for a schema, without its comments: what is sent is what is needed.
func text(schema, name string) string {
	b, err := fs.ReadFile(files, "sql/"+name+".sql")
	if err != nil {
		panic("bug: outbox: no such statement: " + name)
	}
	var out strings.Builder
	for line := range strings.Lines(string(b)) {
		if strings.HasPrefix(strings.TrimSpace(line), "--") {
			continue
		}
		out.WriteString(line)
	}
	return strings.TrimSpace(strings.ReplaceAll(out.String(), "{schema}", pgx.Identifier{schema}.Sanitize()))
}

// statements are the texts of a schema. They never change while a store lives, which is what makes them stable.
type statements struct {
	publishOne, publishMany                          string
	plans, tickLock, tick, page, complete            string
	memberSeen, memberLeave                          string
	leaseRenew, leaseShares, leaseClaim, leaseReturn string
	resetCrashes, adopt                              string
	completeFailed, failedLoad, failedDue            string
	publishAny, publishJSON, scheduledMove           string
	meta                                             string
}

func statementsFor(schema string) *statements {
	t := func(name string) string { return text(schema, name) }
	return &statements{
		publishOne: t("publish_one"), publishMany: t("publish_many"),
		plans: t("plans"), tickLock: t("tick_lock"), tick: t("tick"), page: t("page"), complete: t("complete"),
		memberSeen: t("member_seen"), memberLeave: t("member_leave"),
		leaseRenew: t("lease_renew"), leaseShares: t("lease_shares"), leaseClaim: t("lease_claim"), leaseReturn: t("lease_release"),
		resetCrashes: t("lease_calm"), adopt: t("cursor_adopt"),
		completeFailed: t("complete_failed"), failedLoad: t("failed_load"), failedDue: t("failed_due"),
		publishAny: t("publish_any"), publishJSON: t("publish_json"), scheduledMove: t("scheduled_move"),
		meta: t("meta"),
	}
}

// ErrNotMigrated is wrapped when the outbox's tables are missing or too old. [Store.Migrate] makes them.
var ErrNotMigrated = errors.New("schema is not migrated")

// ConfigMismatchError reports a Config that contradicts what the first Migrate fixed. A process that published under another
// number of lanes would put events of one key into two lanes, so it is refused.
type ConfigMismatchError struct {
	Setting  string // "lanes", "hash" or "version"
	Database string // what the database says
	Config   string // what this process says
}

func (e *ConfigMismatchError) Error() string {
	return fmt.Sprintf("outbox: %s is %s in the database and %s in this process", e.Setting, e.Database, e.Config)
}

// rowQuerier is what reading the fixed facts needs; a transaction as well as an executor.
type rowQuerier interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// verify reads, once, what the first Migrate fixed. How it asks is an option of pgx's or the executor's.
func (s *Store) verify(ctx context.Context, q rowQuerier, how any) (lanes int, err error) {
	if n := s.lanes.Load(); n > 0 {
		return int(n), nil
	}
	var version, found int
	var hash string
	err = q.QueryRow(ctx, s.sql.meta, how).Scan(&version, &found, &hash)
	switch {
	case err == nil:
	case isUndefined(err), errors.Is(err, pgx.ErrNoRows):
		return 0, fmt.Errorf("outbox: schema %s: %w: %w", s.schema, ErrNotMigrated, err)
	default:
		return 0, fmt.Errorf("outbox: schema %s: %w", s.schema, err)
	}
	switch {
	case version < schemaVersion:
		return 0, fmt.Errorf("outbox: schema %s has version %d, need %d: %w", s.schema, version, schemaVersion, ErrNotMigrated)
	case version > schemaVersion:
		return 0, &ConfigMismatchError{"version", strconv.Itoa(version), strconv.Itoa(schemaVersion)}
	case hash != laneHash:
		return 0, &ConfigMismatchError{"hash", hash, laneHash}
	case s.configured > 0 && found != s.configured:
		return 0, &ConfigMismatchError{"lanes", strconv.Itoa(found), strconv.Itoa(s.configured)}
	}
	s.lanes.Store(int64(found))
	return found, nil
}

// verifyForeign is verify in a transaction that is not the executor's, and looks first whether there is anything to read: an error would abort it. By
// no name: those that pgx gives collide behind a pooler that forwards them, which would abort it too.
func (s *Store) verifyForeign(ctx context.Context, tx rowQuerier) (lanes int, err error) {
	if n := s.lanes.Load(); n > 0 {
		return int(n), nil
	}
	var exists bool
	err = tx.QueryRow(ctx, "select to_regclass('"+pgx.Identifier{s.schema, "meta"}.Sanitize()+"') is not null", pgx.QueryExecModeExec).Scan(&exists)
	switch {
	case err != nil:
		return 0, fmt.Errorf("outbox: schema %s: %w", s.schema, err)
	case !exists:
		return 0, fmt.Errorf("outbox: schema %s: %w", s.schema, ErrNotMigrated)
	}
	return s.verify(ctx, tx, pgx.QueryExecModeExec)
}

func isUndefined(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return ok && (pgErr.Code == "42P01" || pgErr.Code == "3F000") // undefined_table, invalid_schema_name
}

// Migrate creates the schema and its tables, or brings them up to date, in one transaction. It is safe to call from every
// process at every start: callers wait for each other, and where nothing is to be done nothing is written. The first Migrate
// fixes the number of lanes; a Config that says otherwise later is a [*ConfigMismatchError]. It needs the right to create a
// schema in the database (or, where the schema exists, to create tables in it).
//
// Migrate also checks what nothing would repair: the sequence must hand out each number once, in order, and never again.
func (s *Store) Migrate(ctx context.Context) error {
	err := s.ex.InTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(ctx context.Context, tx executor.Tx) error {
		_, err := tx.Exec(ctx, "select pg_advisory_xact_lock($1), set_config('jit', 'off', true)", lockNamed(s.schema, "migrate"))
		if err != nil {
			return err
		}
		version, err := s.version(ctx, tx)
		if err != nil {
			return err
		}
		if version == 0 {
			if err := s.create(ctx, tx); err != nil {
				return err
			}
			version = 1
		}
		for version < schemaVersion { // each file brings the version before up to its own
			version++
			if _, err := tx.Exec(ctx, text(s.schema, fmt.Sprintf("schema_%03d", version))); err != nil {
				return fmt.Errorf("version %d: %w", version, err)
			}
		}
		return s.checkSequence(ctx, tx)
	})
	if err != nil {
		return fmt.Errorf("outbox: migrate: %w", err)
	}
	_, err = s.verify(ctx, s.ex, prepare.Stable)
	return err
}

// version returns the version of the schema, 0 where there is none.
func (s *Store) version(ctx context.Context, tx pgx.Tx) (version int, err error) {
	var exists bool
	err = tx.QueryRow(ctx, "select to_regclass($1) is not null", pgx.Identifier{s.schema, "meta"}.Sanitize()).Scan(&exists)
	if err != nil || !exists {
		return 0, err
	}
	err = tx.QueryRow(ctx, "select version from "+pgx.Identifier{s.schema, "meta"}.Sanitize()).Scan(&version)
	return version, err
}

func (s *Store) create(ctx context.Context, tx pgx.Tx) error {
	var exists bool // "create schema if not exists" asks for a right on the database even where the schema exists
	err := tx.QueryRow(ctx, "select exists (select 1 from pg_namespace where nspname = $1)", s.schema).Scan(&exists)
	if err != nil {
		return err
	}
	if !exists {
		if _, err := tx.Exec(ctx, "create schema "+pgx.Identifier{s.schema}.Sanitize()); err != nil {
			return err
		}
	}
	lanes := s.configured
	if lanes == 0 {
		lanes = defaultLanes
	}
	script := strings.NewReplacer("{lanes}", strconv.Itoa(lanes), "{hash}", "'"+laneHash+"'").Replace(text(s.schema, "schema_001"))
	_, err = tx.Exec(ctx, script)
	return err
}

// SequenceError reports that the sequence of events is not what it must be. Events would be lost, or already were. Migrate, Status and
// dispatchers return it; ALTER SEQUENCE … CACHE 1 INCREMENT 1 NO CYCLE puts right what it names.
type SequenceError struct {
	Reason string
}

func (e *SequenceError) Error() string { return "outbox: event_seq: " + e.Reason }

// checkOptions refuses options of the sequence under which numbers are not handed out one by one. Every tick checks them.
func checkOptions(cache, increment int64, cycle bool) error {
	switch {
	case cache != 1:
		return &SequenceError{fmt.Sprintf("CACHE is %d and must be 1: events would be lost", cache)}
	case increment != 1:
		return &SequenceError{fmt.Sprintf("INCREMENT is %d and must be 1", increment)}
	case cycle:
		return &SequenceError{"CYCLE must be off"}
	}
	return nil
}

// checkSequence refuses a sequence that caches (numbers of one backend would lie above the tip that a tick read before
// them, and be handed out later), cycles, counts other than by one, would vanish with a column, or was set back.
func (s *Store) checkSequence(ctx context.Context, q rowQuerier) error {
	var cycle, owned, back bool
	var cache, increment int64
	err := q.QueryRow(ctx, text(s.schema, "sequence_check")).Scan(&cache, &increment, &cycle, &owned, &back)
	if err != nil {
		return err
	}
	if err := checkOptions(cache, increment, cycle); err != nil {
		return err
	}
	switch {
	case owned:
		return &SequenceError{"it must not be owned by a column"}
	case back:
		return &SequenceError{"it was set back below numbers that it has handed out: events would be lost"}
	}
	return nil
}
