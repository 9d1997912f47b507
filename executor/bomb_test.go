package executor_test

import (
	"context"
	"database/sql/driver"
	"errors"
	"sync"

	"github.com/jackc/pgx/v5"
)

// bomb panics when it is called the at-th time. Everything of a caller's that the executor calls calls it.
type bomb struct {
	mu    sync.Mutex
	n, at int
	where string // what panicked
}

var errBomb = errors.New("the bomb")

func (b *bomb) tick(where string) {
	b.mu.Lock()
	b.n++
	goes := b.n == b.at
	if goes {
		b.where = where
	}
	b.mu.Unlock()
	if goes {
		panic(errBomb)
	}
}

// arm sets the bomb; 0 is never.
func (b *bomb) arm(at int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.n, b.at, b.where = 0, at, ""
}

// calls is how often it was called since.
func (b *bomb) calls() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.n
}

func (b *bomb) RewriteQuery(_ context.Context, _ *pgx.Conn, sql string, args []any) (string, []any, error) {
	b.tick("rewriter")
	return sql, args, nil
}

// bombTracer is every tracer of pgx.
type bombTracer struct{ b *bomb }

func (t bombTracer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	t.b.tick("TraceQueryStart")
	return ctx
}

func (t bombTracer) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {
	t.b.tick("TraceQueryEnd")
}

func (t bombTracer) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	t.b.tick("TraceBatchStart")
	return ctx
}

func (t bombTracer) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {
	t.b.tick("TraceBatchQuery")
}

func (t bombTracer) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {
	t.b.tick("TraceBatchEnd")
}

func (t bombTracer) TracePrepareStart(ctx context.Context, _ *pgx.Conn, _ pgx.TracePrepareStartData) context.Context {
	t.b.tick("TracePrepareStart")
	return ctx
}

func (t bombTracer) TracePrepareEnd(context.Context, *pgx.Conn, pgx.TracePrepareEndData) {
	t.b.tick("TracePrepareEnd")
}

func (t bombTracer) TraceCopyFromStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceCopyFromStartData) context.Context {
	t.b.tick("TraceCopyFromStart")
	return ctx
}

func (t bombTracer) TraceCopyFromEnd(context.Context, *pgx.Conn, pgx.TraceCopyFromEndData) {
	t.b.tick("TraceCopyFromEnd")
}

// bombValue is an argument and what a column is read into.
type bombValue struct{ b *bomb }

func (v bombValue) Value() (driver.Value, error) {
	v.b.tick("Valuer")
	return int64(1), nil
}

func (v bombValue) Scan(any) error {
	v.b.tick("Scanner")
	return nil
}

// ScanRow implements pgx.RowScanner.
type bombRow struct{ v bombValue }

func (r bombRow) ScanRow(rows pgx.Rows) error {
	r.v.b.tick("RowScanner")
	return rows.Scan(&r.v)
}
