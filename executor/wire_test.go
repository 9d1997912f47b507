package executor_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/internal/pgscript"
	"github.com/bounceproof/bounceproof/prepare"
)

// The messages of one execution, after BEGIN and the like.
func wireText(sql string) []string {
	return []string{`Parse "" ` + sql, `Bind ""`, "Describe portal", "Execute"}
}

func wireNamed(name string) []string { return []string{"Bind " + name, "Describe portal", "Execute"} }

func wireParse(name string) []string {
	return []string{"Close " + name, "Parse " + name, "Bind " + name, "Describe portal", "Execute"}
}

// In a group pgconn asks for the description of what it parses.
func wireGroupParse(name string) []string {
	return []string{"Close " + name, "Parse " + name, "Describe " + name, "Bind " + name, "Describe portal", "Execute"}
}

// closesFirst brings the Closes of each group to its front, where they are sent.
func closesFirst(messages []string) []string {
	var out, group []string
	for _, m := range messages {
		if strings.HasPrefix(m, "Close ") {
			out = append(out, m)
			continue
		}
		group = append(group, m)
		if m == "Sync" {
			out, group = append(out, group...), nil
		}
	}
	return append(out, group...)
}

func wireUnnamed(sql string) []string {
	return []string{`Parse "" ` + sql, `Bind ""`, "Describe portal", "Execute"}
}

// markName is the name of the statement by which shared knows a server connection again.
var markName = prepare.Name("bounceproof: mark of a server connection", nil, "")

// TestWire is what every way to run a statement costs, message by message. Each line break in want is a Sync.
func TestWire(t *testing.T) {
	t.Parallel()
	const sel = "select $1"
	selName, insName := prepare.Name(sel, []uint32{23}, ""), prepare.Name(insertA, []uint32{23}, "")
	query := func(ctx context.Context, ex *executor.Executor) error {
		var n int
		return ex.QueryRow(ctx, sel, prepare.Stable, 1).Scan(&n)
	}
	exec := func(ctx context.Context, ex *executor.Executor) error {
		_, err := ex.Exec(ctx, insertA, prepare.Stable, 1)
		return err
	}
	inTxDo := func(opts pgx.TxOptions, f func(ctx context.Context, tx executor.Tx) error) func(context.Context, *executor.Executor) error {
		return func(ctx context.Context, ex *executor.Executor) error { return ex.InTx(ctx, opts, f) }
	}
	execIn := func(ctx context.Context, tx executor.Tx) error {
		_, err := tx.Exec(ctx, insertA, prepare.Stable, 1)
		return err
	}
	begin, commit := wireText("begin"), wireText("commit")
	pid := wireText("select pg_backend_pid()")
	sync := []string{"Sync"}
	learn := []string{`Parse "" ` + sel, `Describe ""`, "Sync"}
	learnIns := []string{`Parse "" ` + insertA, `Describe ""`, "Sync"}

	for _, sc := range scenes {
		direct, named, shared := sc.o.Kind == pgscript.Direct, sc.o.Kind != pgscript.Raw, sc.policy == executor.Shared
		o := sc.o
		o.Servers = 1 // no misses here
		// What a statement costs on its own and in a group, at its first use on a connection and later.
		var firstAlone, laterAlone, firstGroup, laterGroup, laterRows []string
		switch {
		case named:
			firstAlone, laterAlone, firstGroup, laterGroup = wireParse(insName), wireNamed(insName), wireGroupParse(insName), wireNamed(insName)
			laterRows = wireNamed(selName)
			if direct {
				laterRows = []string{"Bind " + selName, "Execute"}
			}
		case shared:
			firstAlone, laterAlone, firstGroup, laterGroup = wireNamed(insName), wireNamed(insName), wireNamed(insName), wireNamed(insName)
			laterRows = wireNamed(selName)
		default:
			firstAlone, laterAlone = wireUnnamed(insertA), wireUnnamed(insertA)
			firstGroup, laterGroup = wireUnnamed(insertA), wireUnnamed(insertA)
			laterRows = wireUnnamed(sel)
		}
		// Shared asks once a transaction where it is, by the mark that is kept there.
		asked := begin
		if shared {
			asked = slices.Concat(begin, wireNamed(markName))
		}
		// On a direct connection the first named statement asks whether it is one.
		askedFirst := asked
		if direct {
			askedFirst = slices.Concat(begin, pid)
			firstAlone = slices.Concat(pid, firstGroup)
		}

		for _, test := range []struct {
			name string
			do   func(context.Context, *executor.Executor) error
			new  bool // on a new connection; the executor knows the statements all the same
			want [][]string
		}{
			{"a query", query, false, [][]string{laterRows, sync}},
			{"a command", exec, false, [][]string{laterAlone, sync}},
			{"first use on a connection, of a statement the executor knows", exec, true, [][]string{firstAlone, sync}},
			{"a transaction of one statement", inTxDo(pgx.TxOptions{}, execIn), false, [][]string{asked, laterGroup, sync, {"Query commit"}}},
			{"a transaction of one statement, first use", inTxDo(pgx.TxOptions{}, execIn), true, [][]string{askedFirst, firstGroup, sync, {"Query commit"}}},
			{"a transaction of two statements", inTxDo(pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
				if err := execIn(ctx, tx); err != nil {
					return err
				}
				return execIn(ctx, tx)
			}), false, [][]string{asked, laterGroup, sync, laterAlone, sync, {"Query commit"}}},
			{"queue only", inTxDo(pgx.TxOptions{}, func(_ context.Context, tx executor.Tx) error {
				tx.Queue(insertA, prepare.Stable, 1)
				return nil
			}), false, [][]string{laterGroup, sync}},
			{"queue only, first use", inTxDo(pgx.TxOptions{}, func(_ context.Context, tx executor.Tx) error {
				tx.Queue(insertA, prepare.Stable, 1)
				return nil
			}), true, [][]string{firstGroup, sync}},
			{"queue only, with options", inTxDo(pgx.TxOptions{IsoLevel: pgx.Serializable}, func(_ context.Context, tx executor.Tx) error {
				tx.Queue(insertA, prepare.Stable, 1)
				return nil
			}), false, [][]string{wireText("begin isolation level serializable"), laterGroup, commit, sync}},
			{"one statement and the queue", inTxDo(pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
				tx.Queue(insertA, prepare.Stable, 1)
				return execIn(ctx, tx)
			}), false, [][]string{asked, laterGroup, sync, laterGroup, commit, sync}},
			{"a nested transaction", inTxDo(pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
				sp, err := tx.Begin(ctx)
				if err != nil {
					return err
				}
				if _, err := sp.Exec(ctx, insertA, prepare.Stable, 1); err != nil {
					return err
				}
				return sp.Commit(ctx)
			}), false, [][]string{begin, wireText("savepoint sp_1"), asked[len(begin):], laterGroup, sync, {"Query release savepoint sp_1"}, {"Query commit"}}},
			{"a rolled back transaction", func(ctx context.Context, ex *executor.Executor) error {
				tx, err := ex.Begin(ctx)
				if err != nil {
					return err
				}
				if _, err := tx.Exec(ctx, insertA, prepare.Stable, 1); err != nil {
					return err
				}
				return tx.Rollback(ctx)
			}, false, [][]string{asked, laterGroup, sync, {"Query rollback"}}},
		} {
			s, _ := newScripted(t, o, executor.Config{PreparedStatements: sc.policy}, maxConns(1))
			for range 2 {
				if err := errorsOf(query(t.Context(), s.ex), exec(t.Context(), s.ex)); err != nil {
					t.Fatal(err)
				}
			}
			if shared { // the first transaction makes the mark
				if err := s.ex.InTx(t.Context(), pgx.TxOptions{}, execIn); err != nil {
					t.Fatal(err)
				}
			}
			if test.new {
				s.pool.Reset()
				if err := s.pool.Ping(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			s.b.Reset()
			if err := test.do(t.Context(), s.ex); err != nil {
				t.Errorf("%s, %s: %v", sc.name, test.name, err)
			}
			want := closesFirst(slices.Concat(test.want...))
			if diff := cmp.Diff(want, pgscript.Strings(s.b.Sent())); diff != "" {
				t.Errorf("%s, %s (-want +got):\n%s", sc.name, test.name, diff)
			}
			if s.b.Writes() != s.b.RoundTrips() {
				t.Errorf("%s, %s: %d writes for %d round trips", sc.name, test.name, s.b.Writes(), s.b.RoundTrips())
			}
		}

		// The very first use costs one round trip more, as in pgx, and counts nothing twice.
		s, _ := newScripted(t, o, executor.Config{PreparedStatements: sc.policy}, maxConns(1))
		if err := errorsOf(query(t.Context(), s.ex), exec(t.Context(), s.ex)); err != nil {
			t.Fatal(err)
		}
		first := wireUnnamed(sel)
		firstIns := wireUnnamed(insertA)
		if named || shared {
			first, firstIns = wireParse(selName), wireParse(insName)
		}
		if direct {
			first = slices.Concat(pid, wireGroupParse(selName))
		}
		if diff := cmp.Diff(closesFirst(slices.Concat(learn, first, sync, learnIns, firstIns, sync)), pgscript.Strings(s.b.Sent())); diff != "" {
			t.Errorf("%s, the very first use (-want +got):\n%s", sc.name, diff)
		}
	}
}

func errorsOf(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// Learning within a transaction begins it: BEGIN rides with the first group of any kind.
func TestWireLearnsInTransactions(t *testing.T) {
	t.Parallel()
	for _, sc := range scenes {
		o := sc.o
		o.Servers = 1
		s, _ := newScripted(t, o, executor.Config{PreparedStatements: sc.policy}, maxConns(1))
		if o := inTx(t.Context(), s.ex, pgx.TxOptions{}, []string{insertA}, nil); o.err != nil {
			t.Fatal(o.err)
		}
		want := slices.Concat(wireText("begin"), []string{`Parse "" ` + insertA, `Describe ""`, "Sync"})
		got := pgscript.Strings(s.b.Sent())
		if diff := cmp.Diff(want, got[:min(len(want), len(got))]); diff != "" {
			t.Errorf("%s: %s", sc.name, diff)
		}
		if n := s.b.RoundTrips(); n != 3 {
			t.Errorf("%s: %d round trips", sc.name, n)
		}
	}
}

// A batch is learnt in one round trip and runs in one, whatever its length.
func TestWireBatch(t *testing.T) {
	t.Parallel()
	for _, sc := range scenes {
		o := sc.o
		o.Servers = 1
		s, _ := newScripted(t, o, executor.Config{PreparedStatements: sc.policy}, maxConns(1))
		send := func() error {
			var b pgx.Batch
			for i := range 5 {
				b.Queue(fmt.Sprintf("insert into t%d values ($1)", i), prepare.Stable, i)
				b.Queue(insertA, prepare.Stable, i)
			}
			return s.ex.SendBatch(t.Context(), &b).Close()
		}
		if err := s.pool.Ping(t.Context()); err != nil {
			t.Fatal(err)
		}
		for i, want := range []int{2, 1, 1} {
			s.b.Reset()
			if err := send(); err != nil {
				t.Fatal(sc.name, err)
			}
			if got := s.b.RoundTrips(); got != want || s.b.Writes() != want {
				t.Errorf("%s, batch %d: %d round trips, %d writes", sc.name, i+1, got, s.b.Writes())
			}
			if s.b.Committed(insertA) != 5 {
				t.Errorf("%s, batch %d: committed %d times", sc.name, i+1, s.b.Committed(insertA))
			}
			// Each distinct statement is parsed at most once a group, but for unnamed ones, which the next one replaces.
			parses := map[string]int{}
			for _, m := range s.b.Sent() {
				if m.Kind == "Parse" && m.Name != "" {
					parses[m.Name]++
				}
			}
			for name, n := range parses {
				if n > 1 {
					t.Errorf("%s: %s was parsed %d times in one group", sc.name, name, n)
				}
			}
		}
	}
}
