package executor_test

import (
	"context"
	"database/sql"
	"reflect"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/testenv/place"
)

// dbtx is what sqlc generates for pgx/v5 (internal/codegen/golang/templates/pgx/dbCode.tmpl), with :copyfrom and :batch queries.
type dbtx interface {
	Exec(context.Context, string, ...interface{}) (pgconn.CommandTag, error)
	Query(context.Context, string, ...interface{}) (pgx.Rows, error)
	QueryRow(context.Context, string, ...interface{}) pgx.Row
	CopyFrom(ctx context.Context, tableName pgx.Identifier, columnNames []string, rowSrc pgx.CopyFromSource) (int64, error)
	SendBatch(context.Context, *pgx.Batch) pgx.BatchResults
}

// scanyQuerier is scany's pgxscan.Querier (pgxscan/pgxscan.go).
type scanyQuerier interface {
	Query(ctx context.Context, query string, args ...interface{}) (pgx.Rows, error)
}

// poolShape is what programs declare in front of a pool to put a mock in its place (pgxmock v4, pgxmock.go, PgxPoolIface, without what only the
// mock has). What gives or takes a *pgxpool.Conn is not in it.
type poolShape interface {
	dbtx
	Begin(ctx context.Context) (pgx.Tx, error)
	BeginTx(ctx context.Context, opts pgx.TxOptions) (pgx.Tx, error)
	Ping(ctx context.Context) error
	Stat() *pgxpool.Stat
	Reset()
	Config() *pgxpool.Config
}

// connShape is what River's driver asks of what it runs on, besides the pool (riverpgxv5, templateReplaceWrapper), and pgx.BeginFunc.
type connShape interface {
	dbtx
	Begin(ctx context.Context) (pgx.Tx, error)
	Conn() *pgx.Conn
}

var (
	_ dbtx         = (*executor.Executor)(nil)
	_ dbtx         = (*executor.Conn)(nil)
	_ dbtx         = executor.Tx(nil)
	_ scanyQuerier = (*executor.Executor)(nil)
	_ scanyQuerier = (*executor.Conn)(nil)
	_ scanyQuerier = executor.Tx(nil)
	_ poolShape    = (*executor.Executor)(nil)
	_ poolShape    = (*pgxpool.Pool)(nil)
	_ connShape    = (*executor.Conn)(nil)
	_ connShape    = executor.Tx(nil)
	_ connShape    = (*pgxpool.Conn)(nil)
)

// signature is a method's type without its receiver.
func signature(m reflect.Method) string {
	in, out := []reflect.Type{}, []reflect.Type{}
	for i := 1; i < m.Type.NumIn(); i++ {
		in = append(in, m.Type.In(i))
	}
	for i := range m.Type.NumOut() {
		out = append(out, m.Type.Out(i))
	}
	return reflect.FuncOf(in, out, m.Type.IsVariadic()).String()
}

// differing returns the methods of a type of pgxpool's that one of ours lacks or has with other types.
func differing(pgxs, ours reflect.Type) []string {
	var names []string
	for i := range pgxs.NumMethod() {
		want := pgxs.Method(i)
		if got, ok := ours.MethodByName(want.Name); !ok || signature(got) != signature(want) {
			names = append(names, want.Name)
		}
	}
	return names
}

// TestStandsWhereAPoolStands: the methods are the pool's, but for those that the documentation of Executor names; a Conn's are the Conn's.
func TestStandsWhereAPoolStands(t *testing.T) {
	t.Parallel()
	got := differing(reflect.TypeFor[*pgxpool.Pool](), reflect.TypeFor[*executor.Executor]())
	if diff := cmp.Diff([]string{"Acquire", "AcquireAllIdle", "AcquireFunc", "Close"}, got); diff != "" {
		t.Errorf("methods of a pool that an executor has not, or not so (-want +got):\n%s", diff)
	}
	if got := differing(reflect.TypeFor[*pgxpool.Conn](), reflect.TypeFor[*executor.Conn]()); len(got) != 0 {
		t.Errorf("methods of a pool's Conn that an executor's has not, or not so: %q", got)
	}
	// The control: differing sees what is not there.
	if got := differing(reflect.TypeFor[*pgxpool.Conn](), reflect.TypeFor[*executor.Executor]()); !slices.Contains(got, "Hijack") {
		t.Errorf("an executor has no Hijack, and it is not missed among %q", got)
	}
}

// TestSessionLocksOfMigrationTools takes advisory locks as goose's session locker does (lock/postgres.go): on a *sql.Conn of the pool, and
// on a Conn of the executor. They are the session's, so this holds on a direct connection.
func TestSessionLocksOfMigrationTools(t *testing.T) {
	t.Parallel()
	st := place.New(place.Direct, "", "15").Start(t)
	ex := newPoolExecutor(t, parsePool(t, st.URL, maxConns(4)), executor.Config{})
	db := stdlib.OpenDBFromPool(ex.Pool())
	defer db.Close()
	ctx := t.Context()
	lockBySQL := func(c *sql.Conn, text string) (ok bool) {
		t.Helper()
		if err := c.QueryRowContext(ctx, text, int64(4097083626)).Scan(&ok); err != nil {
			t.Fatal(err)
		}
		return ok
	}
	lockByConn := func(c *executor.Conn, text string) (ok bool) {
		t.Helper()
		if err := c.QueryRow(ctx, text, int64(4097083626)).Scan(&ok); err != nil {
			t.Fatal(err)
		}
		return ok
	}
	const lock, unlock = "SELECT pg_try_advisory_lock($1)", "SELECT pg_advisory_unlock($1)"
	pinned, err := db.Conn(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer pinned.Close()
	own := acquire(t, ex)
	if !lockBySQL(pinned, lock) || lockByConn(own, lock) || !lockBySQL(pinned, unlock) {
		t.Error("the lock of a *sql.Conn does not hold")
	}
	if !lockByConn(own, lock) || lockBySQL(pinned, lock) || !lockByConn(own, unlock) || lockByConn(own, unlock) {
		t.Error("the lock of a Conn does not hold")
	}
}
