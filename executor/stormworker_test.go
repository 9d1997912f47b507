package executor_test

import (
	"context"
	"fmt"
	"math/rand/v2"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/prepare"
)

// stormTexts is how many statements that only differ in a number a storm uses, beside its five others.
const stormTexts = 50

// stormText returns one of them. Its second column proves which one has run, and with which argument.
func stormText(k int) string {
	return fmt.Sprintf("select $1::int, $1::int * 7 + %d, 'mark %d', (select id from counter where id = $2)", k, k)
}

const (
	stormAdd    = "update counter set n = n + 1 where id = $1"
	stormAddOne = "update counter set n = n + 1 where id = $1 returning n"
	stormSeries = "select g, g * $2::int from generate_series(1, $1) g"
)

// worker uses an executor as a program would, and knows what its counter has to stand at.
type worker struct {
	c      *crew
	id     int
	rng    *rand.Rand
	n      int64 // the counter
	logged int   // rows copied
}

func newWorker(c *crew, id int) *worker {
	return &worker{c: c, id: id, rng: rand.New(rand.NewPCG(uint64(id), 42))} //nolint:gosec // a small number
}

// work does random operations until stop. Only an explicit transaction may fail, and only with the typed error.
func (w *worker) work(ctx context.Context, stop <-chan struct{}) {
	operations := []struct {
		name     string
		explicit bool
		do       func(context.Context) error
	}{
		{"read", false, w.read},
		{"read", false, w.read},
		{"read", false, w.read},
		{"add", false, w.add},
		{"addOne", false, w.addOne},
		{"series", false, w.series},
		{"batch", false, w.batch},
		{"silent batch", false, w.silentBatch},
		{"inTx", false, w.inTx},
		{"queue", false, w.queue},
		{"copy", false, w.copy},
		{"explicit", true, w.explicit},
	}
	for {
		select {
		case <-stop:
			return
		default:
		}
		op := operations[w.rng.IntN(len(operations))]
		err := op.do(ctx)
		w.c.ops.Add(1)
		switch {
		case err == nil:
		case op.explicit && lostOnly(err):
			w.c.lost.Add(1)
		default:
			w.failed(op.name, err)
		}
	}
}

func (w *worker) failed(op string, err error) {
	w.c.mu.Lock()
	defer w.c.mu.Unlock()
	w.c.failed++
	if len(w.c.failures) < 10 {
		w.c.failures = append(w.c.failures, fmt.Sprintf("%s: %v", op, err))
	}
}

// args returns the arguments of a statement, half the time marked as stable.
func (w *worker) args(args ...any) []any {
	if w.rng.IntN(2) == 0 {
		return args
	}
	return append([]any{prepare.Stable}, args...)
}

// counted compares what a statement returned as the counter with what it has to be, and goes on from there.
func (w *worker) counted(got int64) error {
	want := w.n
	w.n = got
	if got != want {
		return fmt.Errorf("the counter is %d, want %d", got, want)
	}
	return nil
}

// question asks one of the many statements through f and checks the answer.
func (w *worker) question(f func(sql string, args ...any) pgx.Row) error {
	k, a := w.rng.IntN(stormTexts), w.rng.IntN(1000)
	return answer(f(stormText(k), w.args(a, w.id)...), k, a, w.id)
}

func answer(row pgx.Row, k, a, id int) error {
	var gotA, check, gotID int
	var mark string
	if err := row.Scan(&gotA, &check, &mark, &gotID); err != nil {
		return err
	}
	if gotA != a || check != a*7+k || mark != fmt.Sprint("mark ", k) || gotID != id {
		return fmt.Errorf("asked %d with %d, was answered %d, %d, %q, %d", k, a, gotA, check, mark, gotID)
	}
	return nil
}

func (w *worker) read(ctx context.Context) error {
	return w.question(func(sql string, args ...any) pgx.Row { return w.c.ex.QueryRow(ctx, sql, args...) })
}

func (w *worker) add(ctx context.Context) error {
	tag, err := w.c.ex.Exec(ctx, stormAdd, w.args(w.id)...)
	if err != nil {
		return err
	}
	w.n++
	if tag.String() != "UPDATE 1" {
		return fmt.Errorf("tag %q", tag)
	}
	return nil
}

func (w *worker) addOne(ctx context.Context) error {
	var n int64
	if err := w.c.ex.QueryRow(ctx, stormAddOne, w.args(w.id)...).Scan(&n); err != nil {
		return err
	}
	w.n++
	return w.counted(n)
}

func (w *worker) series(ctx context.Context) error {
	size, factor := 1+w.rng.IntN(200), w.rng.IntN(100)
	rows, err := w.c.ex.Query(ctx, stormSeries, w.args(size, factor)...)
	if err != nil {
		return err
	}
	got, sum := 0, 0
	var g, product int
	_, err = pgx.ForEachRow(rows, []any{&g, &product}, func() error {
		got, sum = got+1, sum+product
		return nil
	})
	if err != nil {
		return err
	}
	if got != size || sum != factor*size*(size+1)/2 {
		return fmt.Errorf("%d rows with sum %d, want %d by %d", got, sum, size, factor)
	}
	return nil
}

func (w *worker) batch(ctx context.Context) error {
	k, a := w.rng.IntN(stormTexts), w.rng.IntN(1000)
	var b pgx.Batch
	b.Queue(stormAddOne, w.args(w.id)...)
	b.Queue(stormText(k), w.args(a, w.id)...)
	b.Queue(stormAddOne, w.args(w.id)...)
	results := w.c.ex.SendBatch(ctx, &b)
	defer func() { _ = results.Close() }()
	var first, second int64
	if err := results.QueryRow().Scan(&first); err != nil {
		return err
	}
	if err := answer(results.QueryRow(), k, a, w.id); err != nil {
		return err
	}
	if err := results.QueryRow().Scan(&second); err != nil {
		return err
	}
	if err := results.Close(); err != nil {
		return err
	}
	if first != w.n+1 || second != w.n+2 {
		return fmt.Errorf("the counter went to %d and %d from %d", first, second, w.n)
	}
	w.n = second
	return nil
}

func (w *worker) silentBatch(ctx context.Context) error {
	var b pgx.Batch
	b.Queue(stormAdd, w.args(w.id)...)
	b.Queue(stormText(w.rng.IntN(stormTexts)), w.args(1, w.id)...)
	b.Queue(stormAdd, w.args(w.id)...)
	if err := w.c.ex.SendBatch(ctx, &b).Close(); err != nil {
		return err
	}
	w.n += 2
	return nil
}

func (w *worker) inTx(ctx context.Context) error {
	committed := 0
	var first, second int64
	err := w.c.ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
		tx.Queue(stormAdd, w.args(w.id)...)
		tx.OnCommit(func() { committed++ })
		ask := func(sql string, args ...any) pgx.Row { return tx.QueryRow(ctx, sql, args...) }
		if w.rng.IntN(2) == 0 {
			if err := w.question(ask); err != nil {
				return err
			}
		}
		if err := tx.QueryRow(ctx, stormAddOne, w.args(w.id)...).Scan(&first); err != nil {
			return err
		}
		nested, err := tx.Begin(ctx)
		if err != nil {
			return err
		}
		if _, err := nested.Exec(ctx, stormAdd, w.args(w.id)...); err != nil {
			return err
		}
		if err := nested.Rollback(ctx); err != nil {
			return err
		}
		if err := w.question(ask); err != nil {
			return err
		}
		return tx.QueryRow(ctx, stormAddOne, w.args(w.id)...).Scan(&second)
	})
	if err != nil {
		return err
	}
	if first != w.n+1 || second != w.n+2 || committed != 1 {
		err = fmt.Errorf("the counter went to %d and %d from %d, OnCommit ran %d times", first, second, w.n, committed)
	}
	w.n = second + 1
	return err
}

func (w *worker) queue(ctx context.Context) error {
	committed := 0
	err := w.c.ex.InTx(ctx, pgx.TxOptions{}, func(_ context.Context, tx executor.Tx) error {
		tx.Queue(stormAdd, w.args(w.id)...)
		tx.Queue(stormText(w.rng.IntN(stormTexts)), w.args(1, w.id)...)
		tx.Queue(stormAdd, w.args(w.id)...)
		tx.OnCommit(func() { committed++ })
		return nil
	})
	if err != nil {
		return err
	}
	w.n += 2
	if committed != 1 {
		return fmt.Errorf("OnCommit ran %d times", committed)
	}
	return nil
}

func (w *worker) copy(ctx context.Context) error {
	n, err := w.c.ex.CopyFrom(ctx, pgx.Identifier{"log"}, []string{"worker", "n"}, pgx.CopyFromRows([][]any{{w.id, 1}, {w.id, 1}}))
	if err != nil {
		return err
	}
	w.logged += 2
	if n != 2 {
		return fmt.Errorf("%d rows copied", n)
	}
	return nil
}

func (w *worker) explicit(ctx context.Context) error {
	tx, err := w.c.ex.Begin(ctx)
	if err != nil {
		return fmt.Errorf("begin: %w", err)
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }()
	var first, second int64
	if err := tx.QueryRow(ctx, stormAddOne, w.args(w.id)...).Scan(&first); err != nil {
		return fmt.Errorf("first statement: %w", err)
	}
	if err := w.question(func(sql string, args ...any) pgx.Row { return tx.QueryRow(ctx, sql, args...) }); err != nil {
		return fmt.Errorf("question: %w", err)
	}
	if err := tx.QueryRow(ctx, stormAddOne, w.args(w.id)...).Scan(&second); err != nil {
		return fmt.Errorf("last statement: %w", err)
	}
	if err := tx.Commit(ctx); err != nil {
		return fmt.Errorf("commit: %w", err)
	}
	if first != w.n+1 || second != w.n+2 {
		err = fmt.Errorf("the counter went to %d and %d from %d", first, second, w.n)
	}
	w.n = second
	return err
}
