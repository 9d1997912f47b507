package bounceproof_test

import (
	"context"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/internal/await"
	"github.com/bounceproof/bounceproof/notify"
	"github.com/bounceproof/bounceproof/outbox"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

// wakeups is the second example of README.md: one listening connection for a whole process.
func wakeups(ctx context.Context, ex *executor.Executor, store *outbox.Store, mailer, ledger *outbox.Subscription,
	sendMail, book outbox.HandlerFunc, forget notify.HandlerFunc,
) {
	l := must(notify.NewListener(ex.Pool(), notify.ListenerConfig{Sender: ex.Sender()})) // one a process: a connection that listens
	proven := outbox.DispatcherConfig{Proven: l.Healthy}                                 // so they poll more seldom
	mails, books := must(outbox.NewDispatcher(mailer, sendMail, proven)), must(outbox.NewDispatcher(ledger, book, proven))
	l.Handle(store.Channel(), mails)
	l.Handle(store.Channel(), books)
	cache := l.Share() // another part of the program: handlers, state and Run of its own, the same connection
	cache.Handle("cache", forget)

	var running sync.WaitGroup
	for _, run := range []func(context.Context) error{l.Run, cache.Run, mails.Run, books.Run} {
		running.Go(func() { check(run(ctx)) })
	}
	running.Wait()
}

func TestReadmeShowsOneListenerForAProcess(t *testing.T) {
	t.Parallel()
	readme, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	blocks := strings.Split(string(readme), "\n```go\n")
	if len(blocks) != 3 {
		t.Fatalf("README.md has %d blocks of Go, want 2", len(blocks)-1)
	}
	inReadme, _, _ := strings.Cut(blocks[2], "\n```\n")
	const name = "wakeups_example_test.go"
	source, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	fset := token.NewFileSet()
	file, err := parser.ParseFile(fset, name, source, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range file.Decls {
		if f, ok := d.(*ast.FuncDecl); ok && f.Name.Name == "wakeups" {
			inside := string(source[fset.Position(f.Body.Lbrace).Offset+1 : fset.Position(f.Body.Rbrace).Offset])
			if diff := cmp.Diff(strings.TrimSpace(strings.ReplaceAll(inside, "\n\t", "\n")), inReadme); diff != "" {
				t.Errorf("README.md differs from what is compiled and run here:\n%s", diff)
			}
			return
		}
	}
	t.Fatal("there is no function wakeups")
}

// Two dispatchers of one store and another part of the program share a connection, and all are woken by another process.
func TestOneListenerServesAWholeProcess(t *testing.T) {
	t.Parallel()
	db := postgres.Start(t, postgres.Options{}).NewDatabase(t)
	process := func() (*pgxpool.Pool, *executor.Executor, *outbox.Store) {
		pool := must(pgxpool.New(t.Context(), db.URL))
		t.Cleanup(pool.Close)
		ex := must(executor.New(pool, executor.Config{}))
		t.Cleanup(func() { check(ex.Close(context.WithoutCancel(t.Context()))) })
		return pool, ex, must(outbox.New(ex, outbox.Config{}))
	}
	pool, ex, store := process()
	check(store.Migrate(t.Context()))
	mailer := must(store.Subscribe(t.Context(), "mailer", outbox.SubscriptionConfig{}))
	ledger := must(store.Subscribe(t.Context(), "ledger", outbox.SubscriptionConfig{}))
	ctx, cancel := context.WithCancel(t.Context())
	var mails, books, forgotten, resynced atomic.Int64
	count := func(n *atomic.Int64) outbox.HandlerFunc {
		return func(context.Context, outbox.Delivery) error { n.Add(1); return nil }
	}
	var done sync.WaitGroup
	done.Go(func() {
		wakeups(ctx, ex, store, mailer, ledger, count(&mails), count(&books), func(_ context.Context, e notify.Event) {
			switch {
			case e.Kind == notify.Resynced:
				resynced.Add(1)
			case e.Kind == notify.Notified && e.Payload == "users:7":
				forgotten.Add(1)
			}
		})
	})
	await.True(t, "LISTEN", func() bool { return resynced.Load() == 1 })

	_, otherEx, otherStore := process()
	check(otherEx.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
		return otherStore.Publish(ctx, tx, outbox.Event{Type: "order.paid"})
	}))
	check(otherEx.Notify("cache", "users:7"))
	await.True(t, "everybody", func() bool { return mails.Load() == 1 && books.Load() == 1 && forgotten.Load() == 1 })
	listeners := 0
	check(pool.QueryRow(t.Context(), `select count(*) from pg_stat_activity where datname = current_database() and query ilike 'listen%'`).Scan(&listeners))
	if listeners != 1 {
		t.Errorf("%d connections listen", listeners)
	}
	cancel()
	stopped := make(chan struct{})
	go func() { done.Wait(); close(stopped) }()
	select {
	case <-stopped:
	case <-time.After(await.Deadline):
		t.Error("it does not stop")
	}
}
