package outbox

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// maxJSON keeps the argument of PublishSQL well below what PostgreSQL takes as one value (1 GiB, src/include/utils/memutils.h).
const maxJSON = 512 << 20

// SQLTx is a transaction of database/sql: *sql.Tx, and what embeds it or has its methods, such as sqlx's and, as Statement.ConnPool, GORM's.
type SQLTx interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

var _ SQLTx = (*sql.Tx)(nil)

// PublishSQL is [Store.Publish] in a transaction of database/sql, of any driver for PostgreSQL that takes $1 as a placeholder (pgx's stdlib and lib/pq are
// tested). The transaction must be in the database of the store's executor.
//
// It runs at once, as one statement for all events of the call, with one argument of text. Such a transaction has no commit hook: dispatchers learn of the events
// at their next poll unless the caller calls [Store.Wake] after the commit. Several calls in one transaction with several keys can deadlock with others
// (40P01), as any locks can. Errors found before anything is sent are [*TooManyKeysError], [ErrInvalidEvent] and, at a store's first call, [ErrNotMigrated]; the
// transaction is unharmed by them.
func (s *Store) PublishSQL(ctx context.Context, tx SQLTx, events ...Event) error {
	if tx == nil {
		return errors.New("outbox: publish: nil transaction")
	}
	if len(events) == 0 {
		return nil
	}
	c, err := s.columns(events)
	if err != nil {
		return err
	}
	lanes, err := s.verifyForeign(ctx, sqlQuerier{tx})
	if err != nil {
		return err
	}
	s.assignLanes(c, lanes)
	arg, err := c.json()
	if err != nil {
		return fmt.Errorf("outbox: publish: %w", err)
	}
	if len(arg) > maxJSON {
		return fmt.Errorf("outbox: publish: %w: %d bytes in one call, at most %d", ErrInvalidEvent, len(arg), maxJSON)
	}
	if _, err := tx.ExecContext(ctx, s.sql.publishJSON, arg); err != nil {
		return fmt.Errorf("outbox: publish: %w", err)
	}
	return nil
}

// sqlQuerier asks as pgx does, without pgx's options.
type sqlQuerier struct{ tx SQLTx }

func (q sqlQuerier) QueryRow(ctx context.Context, sql string, _ ...any) pgx.Row {
	return q.tx.QueryRowContext(ctx, sql)
}

// json is the argument of publish_json.sql.
func (c *columns) json() (string, error) {
	type event struct {
		Lane    int16           `json:"lane"`
		Lock    *int64          `json:"lock,omitempty"`
		Type    string          `json:"type"`
		Key     *string         `json:"key,omitempty"`
		Payload []byte          `json:"payload"`
		Headers json.RawMessage `json:"headers,omitempty"`
		Due     *time.Time      `json:"due,omitempty"`
		Dedup   *string         `json:"dedup,omitempty"`
	}
	events := make([]event, len(c.lanes))
	for i := range events {
		events[i] = event{c.lanes[i], c.locks[i], c.types[i], c.keys[i], c.payloads[i], c.headers[i], c.dues[i], c.dedups[i]}
	}
	b, err := json.Marshal(events)
	return string(b), err
}
