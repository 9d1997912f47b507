package executor_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/internal/await"
	"github.com/bounceproof/bounceproof/prepare"
	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
	"github.com/bounceproof/bounceproof/testenv/place"
)

// firstUses are the ways a program may use an executor first. The look at the pooler that they cause must not wait for a server that
// they hold themselves.
var firstUses = []struct {
	name   string
	begins bool
	run    func(ctx context.Context, ex *executor.Executor) error
}{
	{"Topology", false, func(ctx context.Context, ex *executor.Executor) error {
		_, err := ex.Topology(ctx)
		return err
	}},
	{"QueryRow", false, func(ctx context.Context, ex *executor.Executor) error {
		var n int
		return ex.QueryRow(ctx, "select $1::int", prepare.Stable, 1).Scan(&n)
	}},
	{"SendBatch", false, func(ctx context.Context, ex *executor.Executor) error {
		var b pgx.Batch
		b.Queue("select $1::int", prepare.Stable, 1)
		b.Queue("select $1::text", prepare.Stable, "x")
		return ex.SendBatch(ctx, &b).Close()
	}},
	{"QueueOnlyInTx", false, func(ctx context.Context, ex *executor.Executor) error {
		return ex.InTx(ctx, pgx.TxOptions{}, func(_ context.Context, tx executor.Tx) error {
			tx.Queue("select $1::int", prepare.Stable, 1)
			return nil
		})
	}},
	{"InTx", true, func(ctx context.Context, ex *executor.Executor) error {
		return ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
			_, err := tx.Exec(ctx, "select $1::int", prepare.Stable, 1)
			return err
		})
	}},
	{"InTx after SET", true, func(ctx context.Context, ex *executor.Executor) error {
		// Nothing of the first transaction is stable before BEGIN has been sent, so the second is the first that may look.
		for range 2 {
			err := ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
				if _, err := tx.Exec(ctx, "set local work_mem = '8MB'"); err != nil {
					return err
				}
				tx.Queue("select $1::text", prepare.Stable, "x")
				_, err := tx.Exec(ctx, "select $1::int", prepare.Stable, 1)
				return err
			})
			if err != nil {
				return err
			}
		}
		return nil
	}},
	{"Batch in InTx after SET", true, func(ctx context.Context, ex *executor.Executor) error {
		for range 2 {
			err := ex.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx executor.Tx) error {
				if _, err := tx.Exec(ctx, "set local work_mem = '8MB'"); err != nil {
					return err
				}
				var b pgx.Batch
				b.Queue("select $1::int", prepare.Stable, 1)
				return tx.SendBatch(ctx, &b).Close()
			})
			if err != nil {
				return err
			}
		}
		return nil
	}},
}

// TestProbeWithASingleConnection is the probe as the executor calls it, where there is one connection only: in the pool, in the pooler,
// or in both. The verdict has to be right, come from servers that answer, and leave no session behind.
func TestProbeWithASingleConnection(t *testing.T) {
	want := map[place.Mode]fallback.Topology{
		place.Direct:             {Pooler: fallback.PoolerNone, Mode: fallback.ModeDirect},
		place.Session:            {Pooler: fallback.PoolerOther, Mode: fallback.ModeSession},
		place.TransactionRaw:     {Pooler: fallback.PoolerOther, Mode: fallback.ModeTransaction},
		place.TransactionTracked: {Pooler: fallback.PoolerPgBouncer, Mode: fallback.ModeTransaction, Tracks: true},
		place.Statement:          {Pooler: fallback.PoolerOther, Mode: fallback.ModeStatement},
		place.StatementTracked:   {Pooler: fallback.PoolerPgBouncer, Mode: fallback.ModeStatement, Tracks: true},
	}
	for _, p := range []place.Place{
		place.New(place.Direct, "", "13"),
		place.New(place.Direct, "", "18"),
		place.New(place.Session, "1.15", "13"),
		place.New(place.TransactionRaw, "1.15", "13"),
		place.New(place.Statement, "1.15", "13"),
		place.New(place.Session, "1.18", "15"),
		place.New(place.TransactionRaw, "1.18", "15"),
		place.New(place.Statement, "1.18", "15"),
		place.New(place.Session, "1.24", "17"),
		place.New(place.TransactionRaw, "1.24", "17"),
		place.New(place.TransactionTracked, "1.24", "17"),
		place.New(place.Statement, "1.24", "17"),
		place.New(place.StatementTracked, "1.24", "17"),
		place.New(place.Session, "1.26", "18"),
		place.New(place.TransactionRaw, "1.26", "18"),
		place.New(place.TransactionTracked, "1.26", "18"),
		place.New(place.Statement, "1.26", "18"),
		place.New(place.StatementTracked, "1.26", "18"),
	} {
		t.Run(p.String(), func(t *testing.T) {
			t.Parallel()
			st := p.Start(t, func(o *pgbouncer.Options) { o.PoolSize = 1 })
			plain := connect(t, st.DB.URL)
			for _, use := range firstUses {
				if use.begins && p.RefusesBegin() {
					continue
				}
				if p.Mode == place.Session && strings.HasSuffix(use.name, "after SET") {
					continue // the pool's connection keeps the only server from the first SET on, also between transactions: nobody can look
				}
				t.Run(use.name, func(t *testing.T) {
					const application = "probe under test"
					var probed []string
					var took time.Duration
					pool := newPool(t, st.URL, maxConns(1), func(cfg *pgxpool.Config) {
						cfg.ConnConfig.RuntimeParams["application_name"] = application
					})
					ex := newExecutor(t, pool, executor.Config{Trace: &executor.Trace{
						Probed: func(top fallback.Topology, d time.Duration, err error) {
							probed = append(probed, fmt.Sprint(top, err))
							took += d
						},
					}})
					begin := time.Now()
					if err := use.run(t.Context(), ex); err != nil {
						t.Fatal(err)
					}
					all := time.Since(begin)
					if len(probed) != 1 {
						t.Errorf("want one look at the pooler, got %q", probed)
					}
					top, err := ex.Topology(t.Context())
					if err != nil {
						t.Fatal(err)
					}
					w := want[p.Mode]
					if top.Pooler != w.Pooler || top.Mode != w.Mode || top.Tracks != w.Tracks {
						t.Errorf("want %v, got %v: %q", w, top, top.Evidence)
					}
					// A probe that waits for a server which the executor holds itself gets no answer. With a session each, its own second
					// connection gets none either.
					if p.Mode != place.Session && strings.Contains(strings.Join(top.Evidence, "; "), "was not answered") {
						t.Errorf("the probe waited: %q", top.Evidence)
					}
					t.Logf("cell: %v, first use %s: %v; probe %v of %v", p, use.name, top, took.Round(100*time.Microsecond), all.Round(100*time.Microsecond))
					pool.Close()
					noSession(t, st, plain, application)
				})
			}
		})
	}
}

// noSession fails the test if a session of the executor's own is left: on a direct connection on the server, else with the pooler.
func noSession(t *testing.T, st *place.Running, plain *pgx.Conn, application string) {
	t.Helper()
	await.True(t, "no session is left", func() bool {
		if st.Bouncer == nil {
			return one(t, plain, "select count(*) from pg_stat_activity where application_name = $1", application) == "0"
		}
		clients, err := st.Bouncer.Admin("show clients")
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range clients {
			if c["database"] != "pgbouncer" {
				return false
			}
		}
		return one(t, plain, "select count(*) from pg_stat_activity where datname = current_database() and state <> 'idle' and pid <> pg_backend_pid()") == "0"
	})
}
