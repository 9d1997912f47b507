package executor_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/testenv/place"
)

func TestSignalsGoOutAfterTheCommitAndAreDroppedOnRollback(t *testing.T) {
	t.Parallel()
	for _, p := range place.OneOfEachKind() {
		r := p.Start(t, fewServers)
		t.Run(p.String(), func(t *testing.T) {
			direct, url := newDatabase(t, r)
			ex := newExecutor(t, newPool(t, url), executor.Config{})
			var mu sync.Mutex
			var local []string
			cancel := ex.Sender().Subscribe("orders", func(payload string) {
				mu.Lock()
				defer mu.Unlock()
				local = append(local, payload)
			})
			defer cancel()
			listener, err := pgx.Connect(t.Context(), direct)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = listener.Close(context.Background()) }()
			if _, err := listener.Exec(t.Context(), "listen orders"); err != nil {
				t.Fatal(err)
			}

			signal := func(payload string, end error) {
				err := ex.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
					tx.OnCommit(func() {
						if err := ex.Notify("orders", payload); err != nil {
							t.Error(err)
						}
					})
					if _, err := tx.Exec(ctx, "select 1"); err != nil {
						return err
					}
					return end
				})
				if !errors.Is(err, end) {
					t.Fatal(err)
				}
			}
			lost := errors.New("rolled back")
			signal("dropped", lost)
			signal("first", nil)
			signal("dropped too", lost)
			if err := ex.Sender().Flush(t.Context()); err != nil {
				t.Fatal(err)
			}
			n, err := listener.WaitForNotification(t.Context())
			if err != nil || n.Payload != "first" {
				t.Errorf("heard %+v, %v; want first", n, err)
			}
			mu.Lock()
			defer mu.Unlock()
			if !slices.Equal(local, []string{"first"}) {
				t.Errorf("in process: %v", local)
			}
			if n := ex.Stats().Notifies; n != 1 {
				t.Errorf("%d notifying commits, want 1", n)
			}
		})
	}
}
