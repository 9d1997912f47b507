package executor_test

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/prepare"
	"github.com/bounceproof/bounceproof/testenv/place"
)

type (
	mood   string
	weight int32
	doc    struct {
		A int      `json:"a"`
		B []string `json:"b,omitempty"`
	}
	pair struct {
		A int32
		B *string
		C mood
	}
	blob []byte
)

func (w weight) String() string { return fmt.Sprintf("%d kg", int32(w)) }

const sameSchema = `create extension hstore; create type mood as enum ('sad', 'ok', 'happy'); create type pair as (a int, b text, c mood);
create domain posint as int check (value > 0);
`

// sameTypes registers the types of sameSchema on a connection.
func sameTypes(t *testing.T, st *place.Running) func(*pgxpool.Config) {
	conn := connect(t, st.DB.URL)
	types, err := conn.LoadTypes(t.Context(), []string{"mood", "_mood", "pair", "_pair", "posint"})
	if err != nil {
		t.Fatal(err)
	}
	var oid uint32
	if err := conn.QueryRow(t.Context(), "select 'hstore'::regtype::oid").Scan(&oid); err != nil {
		t.Fatal(err)
	}
	types = append(types, &pgtype.Type{Name: "hstore", OID: oid, Codec: pgtype.HstoreCodec{}})
	return func(cfg *pgxpool.Config) {
		cfg.AfterConnect = func(_ context.Context, c *pgx.Conn) error {
			c.TypeMap().RegisterTypes(types)
			return nil
		}
	}
}

// store is a way to put samples[k] into its table under the name how.
type store func(ctx context.Context, db database, how string, k int, s sample) error

// database is what a pool and an executor have in common.
type database interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
	SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults
	CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, src pgx.CopyFromSource) (int64, error)
	Begin(ctx context.Context) (pgx.Tx, error)
}

func sameInsert(s sample) string {
	return "insert into " + pgx.Identifier{"same " + s.typ}.Sanitize() + " values ($1, $2, $3)"
}

var stores = []struct {
	name   string
	begins bool
	do     store
}{
	{"exec", false, func(ctx context.Context, db database, how string, k int, s sample) error {
		_, err := db.Exec(ctx, sameInsert(s), prepare.Stable, how, k, s.arg)
		return err
	}},
	{"unmarked query", false, func(ctx context.Context, db database, how string, k int, s sample) error {
		rows, err := db.Query(ctx, sameInsert(s)+" returning 1", how, k, s.arg)
		if err != nil {
			return err
		}
		_, err = pgx.CollectExactlyOneRow(rows, pgx.RowTo[int])
		return err
	}},
	{"named args", false, func(ctx context.Context, db database, how string, k int, s sample) error {
		var one int
		sql := "insert into " + pgx.Identifier{"same " + s.typ}.Sanitize() + " values (@how, @k, @v) returning 1"
		return db.QueryRow(ctx, sql, prepare.Stable, pgx.NamedArgs{"how": how, "k": k, "v": s.arg}).Scan(&one)
	}},
	{"batch", false, func(ctx context.Context, db database, how string, k int, s sample) error {
		var b pgx.Batch
		b.Queue("select $1::int", prepare.Stable, 1)
		b.Queue(sameInsert(s), prepare.Stable, how, k, s.arg)
		return db.SendBatch(ctx, &b).Close()
	}},
	{"copy", false, func(ctx context.Context, db database, how string, k int, s sample) error {
		_, err := db.CopyFrom(ctx, pgx.Identifier{"same " + s.typ}, []string{"how", "k", "v"}, pgx.CopyFromRows([][]any{{how, k, s.arg}}))
		return err
	}},
	{"transaction", true, func(ctx context.Context, db database, how string, k int, s sample) error {
		return pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, sameInsert(s), prepare.Stable, how, k, s.arg)
			return err
		})
	}},
	{"queue", false, func(ctx context.Context, db database, how string, k int, s sample) error {
		ex, ok := db.(*executor.Executor)
		if !ok {
			_, err := db.Exec(ctx, sameInsert(s), how, k, s.arg)
			return err
		}
		return ex.InTx(ctx, pgx.TxOptions{}, func(_ context.Context, tx executor.Tx) error {
			tx.Queue(sameInsert(s), prepare.Stable, how, k, s.arg)
			return nil
		})
	}},
}

// stored is what became of one sample: the value as the server prints it, or why it was refused.
type stored struct {
	value   string
	refused bool
}

// storeAll puts every sample into its table by every way, and returns what the tables then hold.
func storeAll(t *testing.T, st *place.Running, plain *pgx.Conn, db database, who string) map[string]stored {
	found := map[string]stored{}
	for _, way := range stores {
		if way.begins && st.Place.RefusesBegin() {
			continue
		}
		how := who + "/" + way.name
		for k, s := range samples() {
			err := way.do(t.Context(), db, how, k, s)
			var lost *executor.PreparedStatementError
			if errors.As(err, &lost) {
				t.Fatalf("%s: %v", how, err)
			}
			at := fmt.Sprintf("%s %d", way.name, k)
			if err != nil {
				found[at] = stored{refused: true, value: err.Error()}
				continue
			}
			var value string
			err = plain.QueryRow(t.Context(), "select coalesce(v::text, 'NULL') from "+pgx.Identifier{"same " + s.typ}.Sanitize()+" where how = $1 and k = $2", pgx.QueryExecModeExec, how, k).Scan(&value)
			if err != nil {
				t.Fatalf("%s, %s: %v", how, s.typ, err)
			}
			found[at] = stored{value: value}
		}
	}
	return found
}

// TestSameData stores the same Go values by every way, under every policy, in every place: the rows have to be those that pgx's prepared
// statements store on a direct connection, byte by byte, and what is read has to be what pgx reads there.
func TestSameData(t *testing.T) {
	for _, p := range []place.Place{
		place.New(place.Direct, "", "17"), place.New(place.Session, "1.18", "15"), place.New(place.TransactionRaw, "1.15", "13"), place.New(place.TransactionRaw, "1.18", "15"), place.New(place.TransactionTracked, "1.24", "17"), place.New(place.Statement, "1.26", "18"), place.New(place.TransactionTracked, "1.26", "18"),
	} {
		t.Run(p.String(), func(t *testing.T) {
			t.Parallel()
			st := p.Start(t)
			openServers(t, st, 4)
			plain := connect(t, st.DB.URL)
			mustExec(t, plain, sameSchema)
			made := map[string]bool{}
			for _, s := range samples() {
				if !made[s.typ] {
					made[s.typ] = true
					mustExec(t, plain, "create table "+pgx.Identifier{"same " + s.typ}.Sanitize()+" (how text, k int, v "+s.typ+")")
				}
			}
			types := sameTypes(t, st)
			bare := newPool(t, st.DB.URL, maxConns(1), types)
			want := storeAll(t, st, plain, bare, "bare")
			wantRead := readAll(t, bare)
			var refused []string
			for at, w := range want {
				if w.refused {
					refused = append(refused, at+": "+w.value)
				}
			}
			slices.Sort(refused)
			t.Logf("pgx itself refuses %d: %s", len(refused), strings.Join(refused, "; "))
			for _, policy := range []executor.PreparedStatements{executor.Auto, executor.On, executor.Off, executor.Shared} {
				if policy == executor.On && st.Place.ForwardsNames() {
					continue // it loses statements, as it says
				}
				ex := newExecutor(t, newPool(t, st.URL, maxConns(2), types), executor.Config{PreparedStatements: policy})
				if _, err := ex.Topology(t.Context()); err != nil {
					t.Fatal(err)
				}
				compare(t, policy.String(), want, storeAll(t, st, plain, ex, policy.String()))
				for range 2 {
					if got := readAll(t, ex); !reflect.DeepEqual(got, wantRead) {
						t.Errorf("%v: reads differ:\n got %v\nwant %v", policy, got, wantRead)
					}
				}
				n := ex.Stats()
				t.Logf("cell: %v, %v: %d rows the same; named %d, unprepared %d, shared %d", p, policy, len(want), n.Named, n.Unprepared, n.Shared)
			}
			bareDiffers(t, st, plain, types, want)
		})
	}
}

func compare(t *testing.T, who string, want, got map[string]stored) {
	t.Helper()
	all := samples()
	if len(got) < (len(stores)-1)*len(all) {
		t.Errorf("%s: only %d results", who, len(got))
	}
	for at, g := range got {
		w := want[at]
		if g.refused != w.refused || !g.refused && g.value != w.value {
			var k int
			for _, f := range []byte(at) {
				if f >= '0' && f <= '9' {
					k = 10*k + int(f-'0')
				}
			}
			t.Errorf("%s, %s: %T %v into %s: got %+v, want %+v", who, at, all[k].arg, all[k].arg, all[k].typ, g, w)
		}
	}
}

// readAll reads what bare pgx stored, decoded by pgx's own choice of Go types.
func readAll(t *testing.T, db database) map[string][]any {
	t.Helper()
	found := map[string][]any{}
	for _, s := range samples() {
		if found[s.typ] != nil {
			continue
		}
		rows, err := db.Query(t.Context(), "select k, v from "+pgx.Identifier{"same " + s.typ}.Sanitize()+" where how = $1 order by k", prepare.Stable, "bare/exec")
		if err != nil {
			t.Fatal(err)
		}
		for rows.Next() {
			values, err := rows.Values()
			if err != nil {
				t.Fatal(err)
			}
			found[s.typ] = append(found[s.typ], slices.Clone(values)...)
		}
		if rows.Err() != nil {
			t.Fatal(rows.Err())
		}
	}
	return found
}

// bareDiffers is the negative control: with pgx's Exec mode, the usual remedy behind a pooler, some of the samples fail and some are
// silently stored as something else.
func bareDiffers(t *testing.T, st *place.Running, plain *pgx.Conn, types func(*pgxpool.Config), want map[string]stored) {
	t.Helper()
	pool := newPool(t, st.URL, maxConns(1), types, func(cfg *pgxpool.Config) { cfg.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec })
	got := storeAll(t, st, plain, pool, "exec mode")
	failed, differed := 0, 0
	for k, s := range samples() {
		at := fmt.Sprintf("exec %d", k)
		g, w := got[at], want[at]
		switch s.bare {
		case "fails":
			failed++
			if !g.refused {
				t.Errorf("the control should refuse %T into %s, stored %s", s.arg, s.typ, g.value)
			}
		case "differs":
			differed++
			if g.refused || g.value == w.value {
				t.Errorf("the control should store %v into %s differently than %s, got %+v", s.arg, s.typ, w.value, g)
			}
		}
	}
	t.Logf("negative control: pgx's Exec mode refuses %d and silently changes %d of %d samples", failed, differed, len(samples()))
}
