package bounceproof_test

import (
	"context"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/outbox"
	"github.com/bounceproof/bounceproof/prepare"
	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

// usage is the example of README.md: TestReadme compares them word by word, and TestUsage runs it.
func usage(ctx context.Context, url string, sendMail func(context.Context, outbox.Delivery) error) {
	cfg := must(pgxpool.ParseConfig(url))                     // to PostgreSQL, or through any PgBouncer
	ex := must(executor.NewPool(ctx, cfg, executor.Config{})) // makes the pool and guards it: LoadType in cfg.AfterConnect works too
	defer ex.Close(context.WithoutCancel(ctx))                // sends the notifications that wait, and closes the pool
	store := must(outbox.New(ex, outbox.Config{}))
	check(store.Migrate(ctx))

	check(ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
		_, err := tx.Exec(ctx, "update orders set paid = true where id = $1", prepare.Stable, 7)
		if err != nil {
			return err
		}
		return store.Publish(ctx, tx, outbox.Event{Type: "order.paid", Key: "order-7", Payload: []byte(`{"id": 7}`)})
	}))

	sub := must(store.Subscribe(ctx, "mailer", outbox.SubscriptionConfig{}))
	d := must(outbox.NewDispatcher(sub, outbox.HandlerFunc(sendMail), outbox.DispatcherConfig{}))
	check(d.Run(ctx)) // sendMail(ctx, outbox.Delivery) gets every committed event, those of one key in order
}

func must[T any](v T, err error) T {
	check(err)
	return v
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}

func TestReadme(t *testing.T) {
	t.Parallel()
	readme, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(readme), "\n```go\n")
	inReadme, _, ok := strings.Cut(rest, "\n```\n")
	if !ok {
		t.Fatal("README.md has no block of Go")
	}
	if diff := cmp.Diff(body(t, "usage"), inReadme); diff != "" {
		t.Errorf("README.md differs from what is compiled and run here:\n%s", diff)
	}
	lines := 0
	for line := range strings.Lines(inReadme) {
		if strings.TrimSpace(line) != "" {
			lines++
		}
	}
	if lines > 20 {
		t.Errorf("the example has %d lines", lines)
	}
	if n := strings.Count(string(readme), "\n"); n > 150 {
		t.Errorf("README.md has %d lines", n)
	}
}

// body returns the body of a function of this file as it is written, unindented.
func body(t *testing.T, name string) string {
	t.Helper()
	source, err := os.ReadFile("example_test.go")
	if err != nil {
		t.Fatal(err)
	}
	fset := token.NewFileSet()
	file, err := parser.ParseFile(fset, "example_test.go", source, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range file.Decls {
		if f, ok := d.(*ast.FuncDecl); ok && f.Name.Name == name {
			inside := string(source[fset.Position(f.Body.Lbrace).Offset+1 : fset.Position(f.Body.Rbrace).Offset])
			return strings.TrimSpace(strings.ReplaceAll(inside, "\n\t", "\n"))
		}
	}
	t.Fatalf("there is no function %s", name)
	return ""
}

func TestUsage(t *testing.T) {
	t.Parallel()
	s := postgres.Start(t, postgres.Options{})
	for name, through := range map[string]func(t *testing.T, db *postgres.Database) string{
		"direct": func(_ *testing.T, db *postgres.Database) string { return db.URL },
		"PgBouncer": func(t *testing.T, db *postgres.Database) string {
			t.Helper()
			return pgbouncer.Start(t, s, pgbouncer.Options{}).URL(db.Name)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := s.NewDatabase(t)
			conn := must(pgx.Connect(t.Context(), db.URL))
			defer func() { _ = conn.Close(context.WithoutCancel(t.Context())) }()
			must(conn.Exec(t.Context(), "create table orders (id bigint primary key, paid bool); insert into orders values (7, false)"))
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			defer cancel()
			var mails []outbox.Delivery
			usage(ctx, through(t, db), func(_ context.Context, d outbox.Delivery) error {
				mails = append(mails, d)
				cancel()
				return nil
			})
			if len(mails) != 1 || mails[0].Type != "order.paid" || mails[0].Key != "order-7" || string(mails[0].Payload) != `{"id": 7}` {
				t.Errorf("delivered: %+v", mails)
			}
			var paid bool
			if err := conn.QueryRow(t.Context(), "select paid from orders where id = 7").Scan(&paid); err != nil || !paid {
				t.Errorf("paid %t, %v", paid, err)
			}
		})
	}
}
