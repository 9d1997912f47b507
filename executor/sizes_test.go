package executor_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/prepare"
	"github.com/bounceproof/bounceproof/testenv/place"
)

// sized is a batch or a queue of a certain size.
type sized struct {
	kind          string // one of sizedKinds
	items, texts  int
	stable        bool
	arg, result   int  // bytes of each item's argument and row
	runs          bool // items of the same text stand together, else they take turns
	read          string
	newConnection bool
}

var (
	sizedKinds = []string{"batch", "batch in a transaction", "batch that begins one", "queue", "queue in a nested transaction", "queue behind a statement"}
	sizedReads = []string{"QueryRow", "Query", "Exec", "Close", "functions"}
)

func (z sized) String() string {
	return fmt.Sprintf("%s of %d items, %d texts, stable %t, argument %d, result %d, in runs %t, read by %s, on a new connection %t",
		z.kind, z.items, z.texts, z.stable, z.arg, z.result, z.runs, z.read, z.newConnection)
}

// text is which text item i has.
func (z sized) text(i int) int {
	if z.runs {
		return i * z.texts / z.items
	}
	return i % z.texts
}

var sizedRuns atomic.Int64

// run sends it and compares what comes back, item by item.
func (z sized) run(ctx context.Context, ex *executor.Executor) error {
	if z.newConnection {
		ex.Pool().Reset()
	}
	arg := strings.Repeat("a", z.arg)
	options := func(args ...any) []any {
		if z.stable {
			return append([]any{prepare.Stable}, args...)
		}
		return args
	}
	if strings.HasPrefix(z.kind, "queue") {
		return z.runQueue(ctx, ex, arg, options)
	}
	switch z.kind {
	case "batch":
		return z.runBatch(ctx, ex, arg, options)
	case "batch that begins one":
		var b pgx.Batch
		b.BeginTx(pgx.TxOptions{})
		br, tx := z.send(ctx, ex, &b, arg, options), pgx.Tx(nil)
		_, err := br.Exec()
		if err == nil {
			tx = br.Tx()
			err = z.readBatch(br)
		}
		if err = errors.Join(err, br.Close()); err != nil || tx == nil {
			return err
		}
		return tx.Commit(ctx)
	default:
		return ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error { return z.runBatch(ctx, tx, arg, options) })
	}
}

type batcher interface {
	SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults
}

func (z sized) runBatch(ctx context.Context, in batcher, arg string, options func(...any) []any) error {
	var b pgx.Batch
	br := z.send(ctx, in, &b, arg, options)
	err := z.readBatch(br)
	return errors.Join(err, br.Close())
}

func (z sized) send(ctx context.Context, in batcher, b *pgx.Batch, arg string, options func(...any) []any) pgx.BatchResults {
	for i := range z.items {
		q := b.Queue(fmt.Sprintf("select $1::int4 + %d, length($2::text), repeat('r', $3)", z.text(i)), options(i, arg, z.result)...)
		if z.read == "functions" {
			q.QueryRow(func(row pgx.Row) error { return z.check(i, row.Scan) })
		}
	}
	return in.SendBatch(ctx, b)
}

// check reads the row of item i.
func (z sized) check(i int, scan func(...any) error) error {
	var sum, length int
	var result string
	if err := scan(&sum, &length, &result); err != nil {
		return fmt.Errorf("item %d: %w", i, err)
	}
	if sum != i+z.text(i) || length != z.arg || len(result) != z.result {
		return fmt.Errorf("item %d has the row %d, %d, %d bytes", i, sum, length, len(result))
	}
	return nil
}

func (z sized) readBatch(br pgx.BatchResults) error {
	if z.read == "Close" || z.read == "functions" {
		return br.Close()
	}
	for i := range z.items {
		switch z.read {
		case "QueryRow":
			if err := z.check(i, br.QueryRow().Scan); err != nil {
				return err
			}
		case "Query":
			rows, err := br.Query()
			if err != nil {
				return fmt.Errorf("item %d: %w", i, err)
			}
			n := 0
			for ; rows.Next(); n++ {
				if err := z.check(i, rows.Scan); err != nil {
					return err
				}
			}
			if rows.Close(); n != 1 || rows.Err() != nil {
				return fmt.Errorf("item %d has %d rows, %w", i, n, rows.Err())
			}
		case "Exec":
			if tag, err := br.Exec(); err != nil || tag.String() != "SELECT 1" {
				return fmt.Errorf("item %d: %q, %w", i, tag, err)
			}
		}
	}
	return nil
}

func (z sized) runQueue(ctx context.Context, ex *executor.Executor, arg string, options func(...any) []any) error {
	run := sizedRuns.Add(1)
	queue := func(tx executor.Tx) error {
		for i := range z.items {
			text := fmt.Sprintf("insert into sized values ($1, $2, %d, length($3::text)) returning repeat('r', $4)", z.text(i))
			if err := tx.Queue(text, options(run, i, arg, z.result)...); err != nil {
				return err
			}
		}
		return nil
	}
	err := ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
		switch z.kind {
		case "queue in a nested transaction":
			return pgx.BeginFunc(ctx, tx, func(sp pgx.Tx) error { return queue(sp.(executor.Tx)) })
		case "queue behind a statement":
			if _, err := tx.Exec(ctx, "select 1", prepare.Stable); err != nil {
				return err
			}
		}
		return queue(tx)
	})
	if err != nil {
		return err
	}
	rows, err := ex.Query(ctx, "select item, text, length from sized where run = $1", run)
	if err != nil {
		return err
	}
	defer rows.Close()
	seen := make([]bool, z.items)
	n := 0
	for ; rows.Next(); n++ {
		var i, text, length int
		if err := rows.Scan(&i, &text, &length); err != nil {
			return err
		}
		if seen[i] || text != z.text(i) || length != z.arg {
			return fmt.Errorf("item %d has written %d, %d; before: %t", i, text, length, seen[i])
		}
		seen[i] = true
	}
	if n != z.items || rows.Err() != nil {
		return fmt.Errorf("%d of %d items have written, %w", n, z.items, rows.Err())
	}
	return nil
}

// startSized starts a place and an executor on it.
func startSized(t *testing.T, p place.Place, cfg executor.Config) *executor.Executor {
	t.Helper()
	r := p.Start(t)
	mustExec(t, connect(t, r.DB.URL), "create table sized (run int8, item int4, text int4, length int4)")
	return newExecutor(t, newPool(t, r.URL, maxConns(2)), cfg)
}

// possible reports whether the place has what the kind needs.
func (z sized) possible(p place.Place) bool {
	return !p.RefusesBegin() || z.kind == "batch" || z.kind == "queue"
}

// logUniform returns a number from 1 to most, as often of one order of magnitude as of another, and boundaries of all kinds more often than others.
func logUniform(r *rand.Rand, most int) int {
	boundaries := []int{1, 2, 17, 18, 19, 20, 199, 200, 201, 256, 512, 1000, 1024}
	n := boundaries[r.IntN(len(boundaries))]
	if r.IntN(3) > 0 {
		for n = 1; n < most && r.IntN(8) > 0; n *= 2 {
		}
		n = n/2 + r.IntN(n)
	}
	return min(max(n, 1), most)
}

func randomSized(r *rand.Rand, most int) sized {
	z := sized{
		kind: sizedKinds[r.IntN(len(sizedKinds))], items: logUniform(r, most), stable: r.IntN(3) > 0, runs: r.IntN(2) == 0,
		read: sizedReads[r.IntN(len(sizedReads))], newConnection: r.IntN(3) == 0,
	}
	z.texts = logUniform(r, z.items)
	// No more than some megabytes in each direction.
	z.arg, z.result = r.IntN(min(1<<20, 4<<20/z.items)), r.IntN(min(1<<20, 4<<20/z.items))
	if r.IntN(2) == 0 {
		z.arg = min(z.arg, 10)
	}
	if r.IntN(2) == 0 {
		z.result = min(z.result, 10)
	}
	return z
}

// sizedDeadline is for one batch or queue on a busy machine.
const sizedDeadline = time.Minute

func (z sized) test(t *testing.T, p place.Place, ex *executor.Executor) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), sizedDeadline)
	defer cancel()
	start := time.Now()
	if err := z.run(ctx, ex); err != nil {
		t.Errorf("%v: %v: after %v: %v", p, z, time.Since(start).Round(time.Millisecond), err)
	}
	if os.Getenv("SIZED_VERBOSE") != "" {
		t.Logf("%v: %v: %v", p, z, time.Since(start).Round(time.Millisecond))
	}
}

// Batches and queues of whatever size give each item its own answer, on every place. SIZED_SEED repeats a run, SIZED_EACH makes it longer.
func TestBatchesAndQueuesOfAnySize(t *testing.T) {
	t.Parallel()
	seed, each := uint64(time.Now().UnixNano()), 3
	if s := os.Getenv("SIZED_SEED"); s != "" {
		seed, _ = strconv.ParseUint(s, 10, 64)
	}
	if s := os.Getenv("SIZED_EACH"); s != "" {
		each, _ = strconv.Atoi(s)
	}
	for i, p := range place.Matrix() {
		t.Run(p.String(), func(t *testing.T) {
			t.Parallel()
			r := rand.New(rand.NewPCG(seed, uint64(i)))
			ex := startSized(t, p, executor.Config{StatementCapacity: []int{0, 0, 1, 7, 300}[r.IntN(5)]})
			for n := 0; n < each && !t.Failed(); {
				if z := randomSized(r, 1500); z.possible(p) {
					z.test(t, p, ex)
					n++
				}
			}
			if t.Failed() {
				t.Logf("SIZED_SEED=%d", seed)
			}
		})
	}
}

// The largest sizes, on a place of each kind. Client and server write at the same time here: whoever does not read while it writes hangs.
func TestTheLongestBatchesAndQueues(t *testing.T) {
	t.Parallel()
	for _, p := range place.OneOfEachKind() {
		t.Run(p.String(), func(t *testing.T) {
			t.Parallel()
			ex := startSized(t, p, executor.Config{})
			for _, z := range []sized{
				{kind: "batch", items: 20000, texts: 5000, stable: true, read: "QueryRow"},
				{kind: "batch", items: 20000, texts: 1, stable: true, read: "Query"},
				{kind: "queue", items: 5000, texts: 3000, stable: true, runs: true},
				{kind: "batch in a transaction", items: 3000, texts: 3000, read: "functions", newConnection: true},
				{kind: "batch", items: 100, texts: 50, stable: true, arg: 200_000, result: 200_000, read: "QueryRow", newConnection: true},
				{kind: "queue behind a statement", items: 100, texts: 50, stable: true, arg: 200_000, result: 200_000, newConnection: true},
				{kind: "batch that begins one", items: 4, texts: 4, stable: true, arg: 4 << 20, result: 4 << 20, read: "Close"},
			} {
				z.test(t, p, ex)
			}
		})
	}
}
