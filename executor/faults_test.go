package executor_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/internal/pgscript"
	"github.com/bounceproof/bounceproof/prepare"
)

// countedCall is a call of an executor that can be cut. Its statements have an effect that is counted.
type countedCall struct {
	name string
	sqls []string
	tx   bool // an error of it tells whether it is committed
	run  func(ctx context.Context, ex *executor.Executor, sqls []string) error
}

// inserts are n texts that differ, of which the scripted backend and a real one count the executions.
func inserts(n int) []string {
	sqls := make([]string, n)
	for i := range sqls {
		sqls[i] = fmt.Sprintf("insert into runs (id, stmt, attempt) values ($1, %d, nextval('attempt_%d'))", i, i)
	}
	return sqls
}

// runID is the argument of every counted statement; a test against a real server gives each run its own.
type runKey struct{}

func runID(ctx context.Context) int {
	id, _ := ctx.Value(runKey{}).(int)
	return id
}

// execAll runs the statements in a transaction.
func execAll(ctx context.Context, tx pgx.Tx, sqls []string) error {
	for _, sql := range sqls {
		if _, err := tx.Exec(ctx, sql, prepare.Stable, runID(ctx)); err != nil {
			return err
		}
	}
	return nil
}

// countedCalls are the ways to run a statement. What a caller does after an error is what callers do: roll back and return it.
var countedCalls = []countedCall{
	{"Exec", inserts(1), false, func(ctx context.Context, ex *executor.Executor, sqls []string) error {
		_, err := ex.Exec(ctx, sqls[0], prepare.Stable, runID(ctx))
		return err
	}},
	{"QueryRow", []string{inserts(1)[0] + " returning 7"}, false, func(ctx context.Context, ex *executor.Executor, sqls []string) error {
		var n int
		return ex.QueryRow(ctx, sqls[0], prepare.Stable, runID(ctx)).Scan(&n)
	}},
	{"Exec without arguments", []string{"insert into runs (id, stmt, attempt) values (0, 0, nextval('attempt_0'))"}, false, func(ctx context.Context, ex *executor.Executor, sqls []string) error {
		_, err := ex.Exec(ctx, sqls[0])
		return err
	}},
	{"SendBatch", inserts(3), false, func(ctx context.Context, ex *executor.Executor, sqls []string) error {
		var b pgx.Batch
		for _, sql := range sqls {
			b.Queue(sql, prepare.Stable, runID(ctx))
		}
		return ex.SendBatch(ctx, &b).Close()
	}},
	{"SendBatch, read one by one", inserts(2), false, func(ctx context.Context, ex *executor.Executor, sqls []string) error {
		var b pgx.Batch
		for _, sql := range sqls {
			b.Queue(sql, prepare.Stable, runID(ctx))
		}
		br := ex.SendBatch(ctx, &b)
		var errs error
		for range sqls {
			_, err := br.Exec()
			errs = errors.Join(errs, err)
		}
		return errors.Join(errs, br.Close())
	}},
	{"transaction", inserts(2), true, func(ctx context.Context, ex *executor.Executor, sqls []string) error {
		tx, err := ex.Begin(ctx)
		if err != nil {
			return err
		}
		defer func() { _ = tx.Rollback(ctx) }()
		if err := execAll(ctx, tx, sqls); err != nil {
			return err
		}
		return tx.Commit(ctx)
	}},
	{"transaction with a batch", inserts(3), true, func(ctx context.Context, ex *executor.Executor, sqls []string) error {
		tx, err := ex.Begin(ctx)
		if err != nil {
			return err
		}
		defer func() { _ = tx.Rollback(ctx) }()
		if err := execAll(ctx, tx, sqls[:1]); err != nil {
			return err
		}
		var b pgx.Batch
		for _, sql := range sqls[1:] {
			b.Queue(sql, prepare.Stable, runID(ctx))
		}
		if err := tx.SendBatch(ctx, &b).Close(); err != nil {
			return err
		}
		return tx.Commit(ctx)
	}},
	{"batch that begins a transaction", inserts(2), true, func(ctx context.Context, ex *executor.Executor, sqls []string) error {
		var b pgx.Batch
		b.BeginTx(pgx.TxOptions{})
		for _, sql := range sqls {
			b.Queue(sql, prepare.Stable, runID(ctx))
		}
		br := ex.SendBatch(ctx, &b)
		err := br.Close()
		tx := br.Tx()
		if tx == nil {
			return err
		}
		defer func() { _ = tx.Rollback(ctx) }()
		if err != nil {
			return err
		}
		return tx.Commit(ctx)
	}},
	{"InTx with Queue", inserts(3), true, func(ctx context.Context, ex *executor.Executor, sqls []string) error {
		return inTxOnce(ctx, ex, pgx.TxOptions{}, func(tx executor.Tx) error {
			for _, sql := range sqls[1:] {
				tx.Queue(sql, prepare.Stable, runID(ctx))
			}
			return execAll(ctx, tx, sqls[:1])
		})
	}},
	{"queue only", inserts(2), true, func(ctx context.Context, ex *executor.Executor, sqls []string) error {
		return inTxOnce(ctx, ex, pgx.TxOptions{}, func(tx executor.Tx) error {
			for _, sql := range sqls {
				tx.Queue(sql, prepare.Stable, runID(ctx))
			}
			return nil
		})
	}},
	{"queue only, with options", inserts(2), true, func(ctx context.Context, ex *executor.Executor, sqls []string) error {
		return inTxOnce(ctx, ex, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx executor.Tx) error {
			for _, sql := range sqls {
				tx.Queue(sql, prepare.Stable, runID(ctx))
			}
			return nil
		})
	}},
	{"nested transaction", inserts(2), true, func(ctx context.Context, ex *executor.Executor, sqls []string) error {
		return inTxOnce(ctx, ex, pgx.TxOptions{}, func(tx executor.Tx) error {
			if err := execAll(ctx, tx, sqls[:1]); err != nil {
				return err
			}
			sp, err := tx.Begin(ctx)
			if err != nil {
				return err
			}
			if err := execAll(ctx, sp, sqls[1:]); err != nil {
				return errors.Join(err, sp.Rollback(ctx))
			}
			return sp.Commit(ctx)
		})
	}},
}

// copies are countedCalls whose statements a real server cannot count by run.
var copies = []countedCall{
	{"CopyFrom", []string{`copy "t" ( "n" ) from stdin binary`}, false, func(ctx context.Context, ex *executor.Executor, _ []string) error {
		_, err := ex.CopyFrom(ctx, pgx.Identifier{"t"}, []string{"n"}, pgx.CopyFromRows([][]any{{1}, {2}}))
		return err
	}},
	{"CopyFrom in a transaction", []string{`copy "t" ( "n" ) from stdin binary`, inserts(1)[0]}, true, func(ctx context.Context, ex *executor.Executor, sqls []string) error {
		return inTxOnce(ctx, ex, pgx.TxOptions{}, func(tx executor.Tx) error {
			if _, err := tx.CopyFrom(ctx, pgx.Identifier{"t"}, []string{"n"}, pgx.CopyFromRows([][]any{{1}})); err != nil {
				return err
			}
			return execAll(ctx, tx, sqls[1:])
		})
	}},
}

// inTxOnce is InTx with a closure that must not be run twice, and an OnCommit function that must run exactly if there is no error.
func inTxOnce(ctx context.Context, ex *executor.Executor, opts pgx.TxOptions, f func(tx executor.Tx) error) error {
	runs, told := 0, 0
	err := ex.InTx(ctx, opts, func(_ context.Context, tx executor.Tx) error {
		runs++
		tx.OnCommit(func() { told++ })
		return f(tx)
	})
	switch {
	case runs != 1:
		return fmt.Errorf("%w: the closure ran %d times, after %w", errWrong, runs, err)
	case (err == nil) != (told == 1):
		return fmt.Errorf("%w: OnCommit ran %d times, with error %w", errWrong, told, err)
	}
	return err
}

// errWrong is in the chain of an error that is the test's and not the executor's.
var errWrong = errors.New("wrong")

// boundary is a place to cut a call at.
type boundary struct {
	side    pgscript.Side
	n       int
	request int // which request it belongs to, from 1
	// The request executes something, and carries COMMIT, or is a transaction of its own.
	executes, commits bool
	// An error was sent in answer to it before the cut: it provably did nothing.
	refused bool
}

func (at boundary) String() string {
	side := "client's"
	if at.side == pgscript.FromServer {
		side = "server's"
	}
	return fmt.Sprintf("cut before the %s message %d, in request %d", side, at.n, at.request)
}

// boundaries are all the places of a call, from a run that nothing happened to.
func boundaries(b *pgscript.Backend) []boundary {
	var out []boundary
	executes, commits, refused := map[int]bool{}, map[int]bool{}, map[int]bool{}
	request := 1
	for i, m := range b.Sent() {
		out = append(out, boundary{side: pgscript.FromClient, n: i + 1, request: request})
		executes[request] = executes[request] || m.Kind == "Execute" || m.Kind == "Query"
		commits[request] = commits[request] || m.SQL == "commit"
		if m.EndsRequest() {
			request++
		}
	}
	for i, answer := range b.Answers() {
		out = append(out, boundary{side: pgscript.FromServer, n: i + 1, request: answer.Request, refused: refused[answer.Request]})
		refused[answer.Request] = refused[answer.Request] || answer.Error
	}
	if len(commits) > 0 && !slices.Contains(slices.Collect(maps.Values(commits)), true) {
		commits = executes
	}
	for i := range out {
		out[i].executes, out[i].commits = executes[out[i].request], commits[out[i].request]
	}
	return out
}

// TestNothingRunsTwiceScripted cuts the connection at every message of every call, before the backend sees a client's and before the
// client sees the backend's. Whatever the client was told is true, and nothing was executed twice.
func TestNothingRunsTwiceScripted(t *testing.T) {
	t.Parallel()
	for _, sc := range scenes {
		t.Run(sc.name, func(t *testing.T) {
			t.Parallel()
			cuts := 0
			for _, op := range slices.Concat(countedCalls, copies) {
				for _, warm := range []bool{false, true} {
					start := func() (*scripted, func()) {
						s, end := newScripted(t, sc.o, executor.Config{PreparedStatements: sc.policy}, maxConns(2))
						if warm {
							// Twice: with two servers both have the names then.
							for range 2 {
								if err := op.run(t.Context(), s.ex, op.sqls); err != nil {
									t.Fatalf("%s: %v", op.name, err)
								}
							}
							s.b.Reset()
						}
						return s, end
					}
					s, end := start()
					if err := op.run(t.Context(), s.ex, op.sqls); err != nil {
						t.Fatalf("%s: %v", op.name, err)
					}
					for _, sql := range op.sqls {
						if s.b.Committed(sql) != 1 {
							t.Fatalf("%s: without a cut %q was committed %d times", op.name, sql, s.b.Committed(sql))
						}
					}
					places := boundaries(s.b)
					end()
					for _, at := range places {
						s, end := start()
						if err := cutAt(t.Context(), s, op, at); err != nil {
							t.Errorf("%s, warm %t, %v: %v", op.name, warm, at, err)
						}
						end()
						cuts++
					}
				}
			}
			t.Log(cuts, "cuts")
			if cuts < 200 {
				t.Error("too few cuts:", cuts)
			}
		})
	}
}

func cutAt(ctx context.Context, s *scripted, op countedCall, at boundary) error {
	before := s.ex.Stats()
	trigger := s.b.Cut(at.side, at.n)
	err := op.run(ctx, s.ex, op.sqls)
	if !trigger.Fired() {
		return fmt.Errorf("the cut did not happen; %w", err)
	}
	if errors.Is(err, errWrong) {
		return err
	}
	var ran, committed []int
	for _, sql := range op.sqls {
		ran, committed = append(ran, s.b.Ran(sql)), append(committed, s.b.Committed(sql))
	}
	all, none := true, true
	for _, n := range committed {
		all, none = all && n == 1, none && n == 0
	}
	unknown := errors.Is(err, executor.ErrCommitUnknown)
	switch {
	case slices.Max(ran) > 1:
		return fmt.Errorf("executed %v times; %w", ran, err)
	case !all && !none:
		return fmt.Errorf("committed in part, %v; %w", committed, err)
	case err == nil && !all:
		return fmt.Errorf("no error, and committed %v", committed)
	case err == nil && at.executes && !at.refused:
		return fmt.Errorf("a request of unknown fate was sent again unseen")
	case op.tx && unknown != (at.commits && !at.refused):
		return fmt.Errorf("unknown is %t; %w", unknown, err)
	case !op.tx && unknown:
		return fmt.Errorf("a COMMIT that was not asked for is unknown: %w", err)
	}
	// One for a name that Shared misses on a server, which has nothing to do with the cut.
	if after := s.ex.Stats(); after.Downgrades != before.Downgrades || after.Retries > before.Retries+1 {
		return fmt.Errorf("%d downgrades, %d retries; %w", after.Downgrades-before.Downgrades, after.Retries-before.Retries, err)
	}
	return s.sane(ctx)
}

// The check sees a statement that is simply tried again, and an unknown COMMIT that is called a failure.
func TestCutsSeeWhatIsWrong(t *testing.T) {
	t.Parallel()
	tryAgain := countedCalls[0]
	tryAgain.run = func(ctx context.Context, ex *executor.Executor, sqls []string) error {
		if countedCalls[0].run(ctx, ex, sqls) == nil {
			return nil
		}
		return countedCalls[0].run(ctx, ex, sqls)
	}
	callItFailed := countedCalls[slices.IndexFunc(countedCalls, func(d countedCall) bool { return d.name == "queue only" })]
	honest := callItFailed.run
	callItFailed.run = func(ctx context.Context, ex *executor.Executor, sqls []string) error {
		if honest(ctx, ex, sqls) != nil {
			return errors.New("failed")
		}
		return nil
	}
	for _, op := range []countedCall{tryAgain, callItFailed} {
		found := 0
		s, end := newScripted(t, pgscript.Options{}, executor.Config{})
		if err := op.run(t.Context(), s.ex, op.sqls); err != nil {
			t.Fatal(err)
		}
		places := boundaries(s.b)
		end()
		for _, at := range places {
			s, end := newScripted(t, pgscript.Options{}, executor.Config{})
			if cutAt(t.Context(), s, op, at) != nil {
				found++
			}
			end()
		}
		if found == 0 {
			t.Errorf("%s: nothing was found wrong", op.name)
		}
	}
}
