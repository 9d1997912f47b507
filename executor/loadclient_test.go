package executor_test

import (
	"context"
	"fmt"
	"math/rand/v2"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/prepare"
)

// loadTexts is how many statements that only differ in a number a load uses, beside its five others.
const loadTexts = 50

// loadText returns one of them. Its second column proves which one has run, and with which argument.
func loadText(k int) string {
	return fmt.Sprintf("select $1::int, $1::int * 7 + %d, 'mark %d', (select id from counter where id = $2)", k, k)
}

const (
	loadAdd    = "update counter set n = n + 1 where id = $1"
	loadAddOne = "update counter set n = n + 1 where id = $1 returning n"
	loadSeries = "select g, g * $2::int from generate_series(1, $1) g"
)

// loadClient uses an executor as a program would, and knows what its counter has to stand at.
type loadClient struct {
	e      *loadedExecutor
	id     int
	rng    *rand.Rand
	n      int64 // the counter
	logged int   // rows copied
}

func newLoadClient(e *loadedExecutor, id int) *loadClient {
	return &loadClient{e: e, id: id, rng: rand.New(rand.NewPCG(uint64(id), 42))} //nolint:gosec // a small number
}

// run does random operations until stop. Only an explicit transaction may fail, and only with the typed error.
func (c *loadClient) run(ctx context.Context, stop <-chan struct{}) {
	operations := []struct {
		name     string
		explicit bool
		do       func(context.Context) error
	}{
		{"read", false, c.read},
		{"read", false, c.read},
		{"read", false, c.read},
		{"add", false, c.add},
		{"addOne", false, c.addOne},
		{"series", false, c.series},
		{"batch", false, c.batch},
		{"silent batch", false, c.silentBatch},
		{"inTx", false, c.inTx},
		{"queue", false, c.queue},
		{"copy", false, c.copy},
		{"explicit", true, c.explicit},
	}
	for {
		select {
		case <-stop:
			return
		default:
		}
		op := operations[c.rng.IntN(len(operations))]
		err := op.do(ctx)
		c.e.ops.Add(1)
		switch {
		case err == nil:
		case op.explicit && lostOnly(err):
			c.e.lost.Add(1)
		default:
			c.failed(op.name, err)
		}
	}
}

func (c *loadClient) failed(op string, err error) {
	c.e.mu.Lock()
	defer c.e.mu.Unlock()
	c.e.failed++
	if len(c.e.failures) < 10 {
		c.e.failures = append(c.e.failures, fmt.Sprintf("%s: %v", op, err))
	}
}

// args returns the arguments of a statement, half the time marked as stable.
func (c *loadClient) args(args ...any) []any {
	if c.rng.IntN(2) == 0 {
		return args
	}
	return append([]any{prepare.Stable}, args...)
}

// counted compares what a statement returned as the counter with what it has to be, and goes on from there.
func (c *loadClient) counted(got int64) error {
	want := c.n
	c.n = got
	if got != want {
		return fmt.Errorf("the counter is %d, want %d", got, want)
	}
	return nil
}

// question asks one of the many statements through f and checks the answer.
func (c *loadClient) question(f func(sql string, args ...any) pgx.Row) error {
	k, a := c.rng.IntN(loadTexts), c.rng.IntN(1000)
	return answer(f(loadText(k), c.args(a, c.id)...), k, a, c.id)
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

func (c *loadClient) read(ctx context.Context) error {
	return c.question(func(sql string, args ...any) pgx.Row { return c.e.ex.QueryRow(ctx, sql, args...) })
}

func (c *loadClient) add(ctx context.Context) error {
	tag, err := c.e.ex.Exec(ctx, loadAdd, c.args(c.id)...)
	if err != nil {
		return err
	}
	c.n++
	if tag.String() != "UPDATE 1" {
		return fmt.Errorf("tag %q", tag)
	}
	return nil
}

func (c *loadClient) addOne(ctx context.Context) error {
	var n int64
	if err := c.e.ex.QueryRow(ctx, loadAddOne, c.args(c.id)...).Scan(&n); err != nil {
		return err
	}
	c.n++
	return c.counted(n)
}

func (c *loadClient) series(ctx context.Context) error {
	size, factor := 1+c.rng.IntN(200), c.rng.IntN(100)
	rows, err := c.e.ex.Query(ctx, loadSeries, c.args(size, factor)...)
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

func (c *loadClient) batch(ctx context.Context) error {
	k, a := c.rng.IntN(loadTexts), c.rng.IntN(1000)
	var b pgx.Batch
	b.Queue(loadAddOne, c.args(c.id)...)
	b.Queue(loadText(k), c.args(a, c.id)...)
	b.Queue(loadAddOne, c.args(c.id)...)
	results := c.e.ex.SendBatch(ctx, &b)
	defer func() { _ = results.Close() }()
	var first, second int64
	if err := results.QueryRow().Scan(&first); err != nil {
		return err
	}
	if err := answer(results.QueryRow(), k, a, c.id); err != nil {
		return err
	}
	if err := results.QueryRow().Scan(&second); err != nil {
		return err
	}
	if err := results.Close(); err != nil {
		return err
	}
	if first != c.n+1 || second != c.n+2 {
		return fmt.Errorf("the counter went to %d and %d from %d", first, second, c.n)
	}
	c.n = second
	return nil
}

func (c *loadClient) silentBatch(ctx context.Context) error {
	var b pgx.Batch
	b.Queue(loadAdd, c.args(c.id)...)
	b.Queue(loadText(c.rng.IntN(loadTexts)), c.args(1, c.id)...)
	b.Queue(loadAdd, c.args(c.id)...)
	if err := c.e.ex.SendBatch(ctx, &b).Close(); err != nil {
		return err
	}
	c.n += 2
	return nil
}

func (c *loadClient) inTx(ctx context.Context) error {
	committed := 0
	var first, second int64
	err := c.e.ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
		tx.Queue(loadAdd, c.args(c.id)...)
		tx.OnCommit(func() { committed++ })
		ask := func(sql string, args ...any) pgx.Row { return tx.QueryRow(ctx, sql, args...) }
		if c.rng.IntN(2) == 0 {
			if err := c.question(ask); err != nil {
				return err
			}
		}
		if err := tx.QueryRow(ctx, loadAddOne, c.args(c.id)...).Scan(&first); err != nil {
			return err
		}
		nested, err := tx.Begin(ctx)
		if err != nil {
			return err
		}
		if _, err := nested.Exec(ctx, loadAdd, c.args(c.id)...); err != nil {
			return err
		}
		if err := nested.Rollback(ctx); err != nil {
			return err
		}
		if err := c.question(ask); err != nil {
			return err
		}
		return tx.QueryRow(ctx, loadAddOne, c.args(c.id)...).Scan(&second)
	})
	if err != nil {
		return err
	}
	if first != c.n+1 || second != c.n+2 || committed != 1 {
		err = fmt.Errorf("the counter went to %d and %d from %d, OnCommit ran %d times", first, second, c.n, committed)
	}
	c.n = second + 1
	return err
}

func (c *loadClient) queue(ctx context.Context) error {
	committed := 0
	err := c.e.ex.InTx(ctx, pgx.TxOptions{}, func(_ context.Context, tx executor.Tx) error {
		tx.Queue(loadAdd, c.args(c.id)...)
		tx.Queue(loadText(c.rng.IntN(loadTexts)), c.args(1, c.id)...)
		tx.Queue(loadAdd, c.args(c.id)...)
		tx.OnCommit(func() { committed++ })
		return nil
	})
	if err != nil {
		return err
	}
	c.n += 2
	if committed != 1 {
		return fmt.Errorf("OnCommit ran %d times", committed)
	}
	return nil
}

func (c *loadClient) copy(ctx context.Context) error {
	n, err := c.e.ex.CopyFrom(ctx, pgx.Identifier{"log"}, []string{"client", "n"}, pgx.CopyFromRows([][]any{{c.id, 1}, {c.id, 1}}))
	if err != nil {
		return err
	}
	c.logged += 2
	if n != 2 {
		return fmt.Errorf("%d rows copied", n)
	}
	return nil
}

func (c *loadClient) explicit(ctx context.Context) error {
	tx, err := c.e.ex.Begin(ctx)
	if err != nil {
		return fmt.Errorf("begin: %w", err)
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }()
	var first, second int64
	if err := tx.QueryRow(ctx, loadAddOne, c.args(c.id)...).Scan(&first); err != nil {
		return fmt.Errorf("first statement: %w", err)
	}
	if err := c.question(func(sql string, args ...any) pgx.Row { return tx.QueryRow(ctx, sql, args...) }); err != nil {
		return fmt.Errorf("question: %w", err)
	}
	if err := tx.QueryRow(ctx, loadAddOne, c.args(c.id)...).Scan(&second); err != nil {
		return fmt.Errorf("last statement: %w", err)
	}
	if err := tx.Commit(ctx); err != nil {
		return fmt.Errorf("commit: %w", err)
	}
	if first != c.n+1 || second != c.n+2 {
		err = fmt.Errorf("the counter went to %d and %d from %d", first, second, c.n)
	}
	c.n = second
	return err
}
