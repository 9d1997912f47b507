package executor_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/prepare"
	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
	"github.com/bounceproof/bounceproof/testenv/place"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

// migratedQuery is what a client keeps running while its table is changed under it.
const migratedQuery = "select * from t where id = $1"

// changes are the migrations that make the rows of a prepared query wrong, and what is right after them, as name=value in the order of the columns.
var changes = []struct {
	name, ddl, want string
}{
	{"type", "alter table t alter column a type float8", "id=1 a=11 b=22"},
	{"swapped names", "alter table t rename a to x; alter table t rename b to a; alter table t rename x to b", "id=1 b=11 a=22"},
	{"replaced column", "alter table t drop a; alter table t add a text default 'hello'", "id=1 b=22 a=hello"},
	{"dropped column", "alter table t drop a", "id=1 b=22"},
	{"added column", "alter table t add c int8 default 7", "id=1 a=11 b=22 c=7"},
}

// querier is an executor or a bare pool.
type querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// read returns the row as name=value of the columns, the types told apart by their Go types where it matters.
func read(ctx context.Context, q querier, args ...any) (string, error) {
	rows, err := q.Query(ctx, migratedQuery, args...)
	if err != nil {
		return "", err
	}
	defer rows.Close()
	if !rows.Next() {
		return "", errors.Join(errors.New("no row"), rows.Err())
	}
	values, err := rows.Values()
	if err != nil {
		return "", err
	}
	cols := make([]string, len(values))
	for i, f := range rows.FieldDescriptions() {
		cols[i] = fmt.Sprintf("%s=%v", f.Name, values[i])
	}
	rows.Close()
	return strings.Join(cols, " "), rows.Err()
}

func freshTable(t *testing.T, url string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	_, err = conn.Exec(t.Context(), "drop table if exists t; create table t (id int, a int8, b int8); insert into t values (1, 11, 22)")
	if err != nil {
		t.Fatal(err)
	}
	return conn
}

// migrate runs ddl on a connection of its own and makes the next statement land on another server connection.
func migrate(t *testing.T, admin *pgx.Conn, ddl string, b *pgbouncer.Bouncer, url string) {
	t.Helper()
	if _, err := admin.Exec(t.Context(), ddl); err != nil {
		t.Fatal(err)
	}
	if b == nil {
		return
	}
	release, err := b.Pin(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(release)
}

func migrationPlaces() []place.Place {
	return []place.Place{
		place.New(place.Direct, "", "15"),
		place.New(place.Session, "1.18", "15"),
		place.New(place.TransactionRaw, "1.15", "13"),
		place.New(place.TransactionRaw, "1.18", "15"),
		place.New(place.TransactionTracked, "1.24", "17"),
		place.New(place.TransactionTracked, "1.26", "18"),
		place.New(place.StatementTracked, "1.24", "17"),
	}
}

// fewServers gives a pooler three server connections, of which the last used is the next.
func fewServers(o *pgbouncer.Options) { o.PoolSize, o.Settings = 3, nil }

// newDatabase returns the URLs of one more database of a place's server: straight to it, and by the place's way.
func newDatabase(t *testing.T, r *place.Running) (direct, url string) {
	t.Helper()
	db := r.Server.NewDatabase(t)
	if r.Bouncer == nil {
		return db.URL, db.URL
	}
	return db.URL, r.Bouncer.URL(db.Name)
}

func TestRowsAreRightAfterAMigration(t *testing.T) {
	t.Parallel()
	for _, p := range migrationPlaces() {
		r := p.Start(t, fewServers)
		for _, set := range []executor.PreparedStatements{executor.Auto, executor.On, executor.Off, executor.Shared} {
			if set == executor.On && p.Mode == place.TransactionRaw {
				continue // may return the typed error at any time
			}
			for _, change := range changes {
				t.Run(fmt.Sprintf("%v/%v/%s", p, set, change.name), func(t *testing.T) {
					direct, url := newDatabase(t, r)
					admin := freshTable(t, direct)
					// One connection: what it has learnt and parsed is what the migration makes wrong.
					ex := newExecutor(t, newPool(t, url, maxConns(1)), executor.Config{PreparedStatements: set})
					for range 3 {
						if got, err := read(t.Context(), ex, prepare.Stable, 1); err != nil || got != "id=1 a=11 b=22" {
							t.Fatalf("before: %q, %v", got, err)
						}
					}
					pin := r.Bouncer
					if p.Mode == place.Session || p.Mode == place.StatementTracked {
						pin = nil // no transaction to pin with, or nothing to switch
					}
					migrate(t, admin, change.ddl, pin, url)
					before := ex.Stats().Retries
					for range 3 {
						if got, err := read(t.Context(), ex, prepare.Stable, 1); err != nil || got != change.want {
							t.Fatalf("after: %q, %v; want %q", got, err, change.want)
						}
					}
					most := int64(1)
					if set == executor.Shared && p.Mode == place.TransactionRaw {
						most = 2 // the migration, and the miss on a server connection that is new to the name
					}
					if n := ex.Stats().Retries - before; n > most {
						t.Errorf("%d internal retries, want at most %d", n, most)
					}
				})
			}
		}
	}
}

// The sixth case: learnt on one connection and parsed by another after the migration.
func TestRowsAreRightWhenADescriptionIsSharedBetweenConnections(t *testing.T) {
	t.Parallel()
	s := postgres.Start(t, postgres.Options{})
	for _, change := range changes {
		t.Run(change.name, func(t *testing.T) {
			db := s.NewDatabase(t)
			admin := freshTable(t, db.URL)
			ex := newExecutor(t, newPool(t, db.URL, maxConns(2)), executor.Config{})
			if _, err := read(t.Context(), ex, prepare.Stable, 1); err != nil {
				t.Fatal(err)
			}
			// A transaction keeps the connection that has learnt, so that the reads below use another one.
			first, err := ex.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = first.Rollback(t.Context()) }()
			migrate(t, admin, change.ddl, nil, "")
			for range 2 {
				if got, err := read(t.Context(), ex, prepare.Stable, 1); err != nil || got != change.want {
					t.Fatalf("%q, %v; want %q", got, err, change.want)
				}
			}
			if err := first.Rollback(t.Context()); err != nil {
				t.Fatal(err)
			}
			for range 4 {
				if got, err := read(t.Context(), ex, prepare.Stable, 1); err != nil || got != change.want {
					t.Fatalf("%q, %v; want %q", got, err, change.want)
				}
			}
		})
	}
}

// What bare pgx says in the same situation: if no row is wrong here, the tests above show nothing.
func TestBarePgxReturnsWrongRowsAfterAMigration(t *testing.T) {
	t.Parallel()
	r := place.New(place.TransactionTracked, "1.24", "17").Start(t, fewServers)
	wrong := 0
	for _, change := range changes {
		direct, url := newDatabase(t, r)
		admin := freshTable(t, direct)
		pool := newPool(t, url, maxConns(1))
		if _, err := read(t.Context(), pool, 1); err != nil {
			t.Fatal(err)
		}
		migrate(t, admin, change.ddl, r.Bouncer, url)
		got, err := read(t.Context(), pool, 1)
		t.Logf("%s: %q, %v; right is %q", change.name, got, err, change.want)
		if err == nil && got != change.want {
			wrong++
		}
	}
	if wrong == 0 {
		t.Error("bare pgx returned no wrong row")
	}
}

func TestArgumentsAreRightAfterAMigration(t *testing.T) {
	t.Parallel()
	for _, p := range migrationPlaces() {
		r := p.Start(t, fewServers)
		for _, set := range []executor.PreparedStatements{executor.Auto, executor.Off, executor.Shared} {
			t.Run(fmt.Sprintf("%v/%v", p, set), func(t *testing.T) {
				direct, url := newDatabase(t, r)
				admin := freshTable(t, direct)
				ex := newExecutor(t, newPool(t, url, maxConns(1)), executor.Config{PreparedStatements: set})
				update := func(v any) {
					t.Helper()
					tag, err := ex.Exec(t.Context(), "update t set a = $2 where id = $1", prepare.Stable, 1, v)
					if err != nil || tag.RowsAffected() != 1 {
						t.Fatalf("update to %v: %v, %v", v, tag, err)
					}
				}
				find := func(v any) {
					t.Helper()
					var id int
					if err := ex.QueryRow(t.Context(), "select id from t where a = $1", prepare.Stable, v).Scan(&id); err != nil || id != 1 {
						t.Fatalf("find %v: %d, %v", v, id, err)
					}
				}
				update(int64(5))
				find(int64(5))
				pin := r.Bouncer
				if p.Mode == place.Session || p.Mode == place.StatementTracked {
					pin = nil
				}
				migrate(t, admin, "alter table t alter column a type float8", pin, url)
				update(int64(6))
				find(int64(6))
				checkColumn(t, admin, "6")
				if _, err := admin.Exec(t.Context(), "alter table t alter column a type text"); err != nil {
					t.Fatal(err)
				}
				if p.Server == "13" {
					// Its error does not say that it is about an argument, so it is the caller's, once.
					_, _ = ex.Exec(t.Context(), "update t set a = $2 where id = $1", prepare.Stable, 1, "seven")
					_, _ = ex.Exec(t.Context(), "select id from t where a = $1", prepare.Stable, "seven")
				}
				update("seven")
				find("seven")
				checkColumn(t, admin, "seven")
			})
		}
	}
}

func checkColumn(t *testing.T, conn *pgx.Conn, want string) {
	t.Helper()
	var got string
	if err := conn.QueryRow(t.Context(), "select a::text from t").Scan(&got); err != nil || got != want {
		t.Fatalf("stored %q, %v; want %q", got, err, want)
	}
}

// In an explicit transaction the first statement after a migration may fail, as it does in pgx. InTx hides that, and of a plain Begin the error is
// typed, and the next transaction is right.
func TestATransactionAfterAMigrationIsRunAgain(t *testing.T) {
	t.Parallel()
	for _, p := range migrationPlaces() {
		if p.Mode == place.StatementTracked {
			continue
		}
		r := p.Start(t, fewServers)
		for _, change := range changes {
			t.Run(fmt.Sprintf("%v/%s", p, change.name), func(t *testing.T) {
				direct, url := newDatabase(t, r)
				admin := freshTable(t, direct)
				ex := newExecutor(t, newPool(t, url, maxConns(1)), executor.Config{})
				begin := func() (got string, err error) {
					tx, err := ex.Begin(t.Context())
					if err != nil {
						return "", err
					}
					defer func() { _ = tx.Rollback(t.Context()) }()
					if _, err := tx.Exec(t.Context(), "select 1"); err != nil {
						return "", err
					}
					return read(t.Context(), tx, prepare.Stable, 1)
				}
				inTx := func() (got string, err error) {
					err = ex.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
						if _, err := tx.Exec(ctx, "select 1"); err != nil {
							return err
						}
						var err error
						got, err = read(ctx, tx, prepare.Stable, 1)
						return err
					})
					return got, err
				}
				for range 2 {
					if got, err := inTx(); err != nil {
						t.Fatal(got, err)
					}
				}
				migrate(t, admin, change.ddl, nil, url)
				before := ex.Stats().Retries
				for range 2 {
					if got, err := inTx(); err != nil || got != change.want {
						t.Fatalf("InTx: %q, %v; want %q", got, err, change.want)
					}
				}
				if n := ex.Stats().Retries - before; n > 1 {
					t.Errorf("%d retries", n)
				}
				migrate(t, admin, "alter table t add one_more int", nil, url)
				_, err := begin()
				var lost *executor.PreparedStatementError
				var pgErr *pgconn.PgError
				if err != nil && (!errors.As(err, &lost) || !lost.InTx || !errors.As(err, &pgErr)) {
					t.Fatal("Begin:", err)
				}
				if got, err := begin(); err != nil || got != change.want+" one_more=<nil>" {
					t.Fatalf("the next Begin: %q, %v", got, err)
				}
			})
		}
	}
}

// FETCH is a text whose rows depend on the cursor it finds, and PostgreSQL never calls its plan stale.
func TestFetchIsRightForEveryCursor(t *testing.T) {
	t.Parallel()
	for _, p := range place.OneOfEachKind() {
		r := p.Start(t, fewServers)
		t.Run(p.String(), func(t *testing.T) {
			_, url := newDatabase(t, r)
			ex := newExecutor(t, newPool(t, url, maxConns(1)), executor.Config{})
			for range 2 {
				for query, want := range map[string]string{
					"select 5":                           "[5]",
					"select 11.0::float8":                "[11]",
					"select 'x', 7, '{\"a\": 1}'::jsonb": "[x 7 map[a:1]]",
				} {
					err := ex.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
						if _, err := tx.Exec(ctx, "declare c cursor for "+query); err != nil {
							return err
						}
						rows, err := tx.Query(ctx, "fetch 10 from c", prepare.Stable)
						if err != nil {
							return err
						}
						got, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (string, error) {
							values, err := row.Values()
							return fmt.Sprint(values), err
						})
						if err == nil && !slices.Equal(got, []string{want}) {
							err = fmt.Errorf("%s: got %v, want %s", query, got, want)
						}
						return err
					})
					if err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
}

// Under shared each of several server connections may miss a name, or have it with a plan that the migration made stale. A caller sees neither:
// what one failure taught holds for the next run, so the third is sure.
func TestRowsAreRightUnderSharedOnManyServers(t *testing.T) {
	t.Parallel()
	r := place.New(place.TransactionRaw, "1.18", "15").Start(t, func(o *pgbouncer.Options) { o.PoolSize = 4 })
	admin := connect(t, r.DB.URL)
	mustExec(t, admin, "create table many (id int primary key)")
	mustExec(t, admin, "insert into many values (1)")
	ex := newExecutor(t, newPool(t, r.URL, maxConns(4)), executor.Config{PreparedStatements: executor.Shared})
	r.OnServers(t, 4, "1")
	ways := map[string]func(sql string) error{
		"Exec": func(sql string) error { _, err := ex.Exec(t.Context(), sql, prepare.Stable, 1); return err },
		"Query": func(sql string) error {
			rows, err := ex.Query(t.Context(), sql, prepare.Stable, 1)
			if err == nil {
				rows.Close()
				err = rows.Err()
			}
			return err
		},
	}
	for name, way := range ways {
		for i := range 40 {
			sql := fmt.Sprintf("select * from many where id = $1 /* %s %d */", name, i)
			for range i % 6 { // some servers have the name, and others not
				if err := way(sql); err != nil {
					t.Fatalf("%s %d: before: %v", name, i, err)
				}
			}
			if i%2 == 0 {
				mustExec(t, admin, "alter table many add column c int")
			} else {
				mustExec(t, admin, "alter table many drop column c")
			}
			for range 5 {
				if err := way(sql); err != nil {
					t.Errorf("%s %d: after: %v", name, i, err)
				}
			}
		}
	}
	if n := ex.Stats(); n.Misses == 0 || n.Shared == 0 || n.Downgrades != 0 {
		t.Errorf("%+v", n)
	}
}
