package bench

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

// riverArgs is a job's argument with what breaks in pgx's text modes: bytes and a map, which River stores as jsonb.
type riverArgs struct {
	N    int               `json:"n"`
	Tags map[string]string `json:"tags"`
	Raw  []byte            `json:"raw"`
}

// Kind implements river.JobArgs.
func (riverArgs) Kind() string { return "bounceproof" }

type riverWorker struct {
	river.WorkerDefaults[riverArgs]
	mu   sync.Mutex
	seen map[int]int
	bad  []string
	done chan struct{}
	want int
}

// Work counts the job and looks at its arguments.
func (w *riverWorker) Work(_ context.Context, job *river.Job[riverArgs]) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.seen[job.Args.N]++
	if job.Args.Tags["n"] != fmt.Sprint(job.Args.N) || string(job.Args.Raw) != fmt.Sprint("raw ", job.Args.N) {
		w.bad = append(w.bad, fmt.Sprintf("%+v", job.Args))
	}
	if len(w.seen) == w.want && w.seen[job.Args.N] == 1 {
		close(w.done)
	}
	return nil
}

// River knows nothing of poolers: on a guarded pool it works behind PgBouncer 1.18, where pgx's own default fails.
func TestRiverWorksOnAGuardedPoolBehindARawPooler(t *testing.T) {
	const jobs = 1000
	s := postgres.Start(t, postgres.Options{Version: "15"})
	db := s.NewDatabase(t)
	bouncer := pgbouncer.Start(t, s, pgbouncer.Options{Version: "1.18", PoolSize: 4})
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()

	migrator, err := rivermigrate.New(riverpgxv5.New(pool(t, db.URL, 2)), nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := migrator.Migrate(ctx, rivermigrate.DirectionUp, nil); err != nil {
		t.Fatal(err)
	}

	guarded := pool(t, bouncer.URL(db.Name), 10, func(cfg *pgxpool.Config) {
		if err := executor.Guard(cfg, executor.Config{Logger: quiet}); err != nil {
			t.Fatal(err)
		}
	})
	worker := &riverWorker{seen: map[int]int{}, done: make(chan struct{}), want: jobs}
	workers := river.NewWorkers()
	river.AddWorker(workers, worker)
	client, err := river.NewClient(riverpgxv5.New(guarded), &river.Config{
		Queues: map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 50}}, Workers: workers,
		PollOnly: true, FetchPollInterval: 50 * time.Millisecond, FetchCooldown: 10 * time.Millisecond, Logger: quiet,
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := client.Start(ctx); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := client.Stop(ctx); err != nil {
			t.Error(err)
		}
	}()
	for from := 0; from < jobs; {
		var params []river.InsertManyParams
		for ; from < jobs && len(params) < 100; from++ {
			params = append(params, river.InsertManyParams{Args: riverArgs{
				N: from, Tags: map[string]string{"n": fmt.Sprint(from)}, Raw: []byte(fmt.Sprint("raw ", from)),
			}})
		}
		if _, err := client.InsertMany(ctx, params); err != nil {
			t.Fatal(err)
		}
		if _, err := client.Insert(ctx, params[0].Args, &river.InsertOpts{Queue: "idle"}); err != nil {
			t.Fatal(err)
		}
	}
	select {
	case <-worker.done:
	case <-ctx.Done():
		t.Errorf("only %d of %d jobs were worked", len(worker.seen), jobs)
	}
	worker.mu.Lock()
	defer worker.mu.Unlock()
	for n, times := range worker.seen {
		if times != 1 {
			t.Errorf("job %d was worked %d times", n, times)
		}
	}
	if len(worker.bad) > 0 {
		t.Errorf("%d jobs with wrong arguments, the first: %s", len(worker.bad), worker.bad[0])
	}
}
