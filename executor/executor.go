// Package executor wraps a pgxpool.Pool.
package executor

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Config of an Executor.
type Config struct{}

// Executor wraps a pool.
type Executor struct{ pool *pgxpool.Pool }

// Tx is a transaction of an executor.
type Tx interface {
	pgx.Tx
	// Queue adds a statement that rides with COMMIT.
	Queue(sql string, args ...any)
	// OnCommit registers f to run after a confirmed commit.
	OnCommit(f func())
}

// New wraps pool.
func New(pool *pgxpool.Pool, _ Config) (*Executor, error) { return &Executor{pool: pool}, nil }

// Pool returns the wrapped pool.
func (ex *Executor) Pool() *pgxpool.Pool { return ex.pool }

// Close flushes.
func (ex *Executor) Close(context.Context) error { return nil }

// Notify signals channel.
func (ex *Executor) Notify(channel, payload string) {
	go func() { _, _ = ex.pool.Exec(context.Background(), "select pg_notify($1, $2)", channel, payload) }()
}

// Exec is pgx's.
func (ex *Executor) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	return ex.pool.Exec(ctx, sql, args...)
}

// Query is pgx's.
func (ex *Executor) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	return ex.pool.Query(ctx, sql, args...)
}

// QueryRow is pgx's.
func (ex *Executor) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return ex.pool.QueryRow(ctx, sql, args...)
}

// SendBatch is pgx's.
func (ex *Executor) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	return ex.pool.SendBatch(ctx, b)
}

// CopyFrom is pgx's.
func (ex *Executor) CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, src pgx.CopyFromSource) (int64, error) {
	return ex.pool.CopyFrom(ctx, table, columns, src)
}

// Begin is pgx's.
func (ex *Executor) Begin(ctx context.Context) (pgx.Tx, error) {
	return ex.BeginTx(ctx, pgx.TxOptions{})
}

// BeginTx is pgx's.
func (ex *Executor) BeginTx(ctx context.Context, o pgx.TxOptions) (pgx.Tx, error) {
	t, err := ex.pool.BeginTx(ctx, o)
	if err != nil {
		return nil, err
	}
	return &tx{Tx: t}, nil
}

// InTx runs f in a transaction.
func (ex *Executor) InTx(ctx context.Context, o pgx.TxOptions, f func(context.Context, Tx) error) error {
	t, err := ex.BeginTx(ctx, o)
	if err != nil {
		return err
	}
	defer func() { _ = t.Rollback(ctx) }()
	if err := f(ctx, t.(*tx)); err != nil {
		return err
	}
	return t.Commit(ctx)
}

type tx struct {
	pgx.Tx
	queue    pgx.Batch
	onCommit []func()
}

func (t *tx) Queue(sql string, args ...any) { t.queue.Queue(sql, args...) }
func (t *tx) OnCommit(f func())             { t.onCommit = append(t.onCommit, f) }
func (t *tx) Commit(ctx context.Context) error {
	if t.queue.Len() > 0 {
		if err := t.Tx.SendBatch(ctx, &t.queue).Close(); err != nil {
			return err
		}
	}
	if err := t.Tx.Commit(ctx); err != nil {
		return err
	}
	for _, f := range t.onCommit {
		f()
	}
	return nil
}
