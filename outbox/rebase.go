package outbox

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/executor"
)

// Rebase makes a log work in the cluster it stands in now, after it was restored there: dispatchers had stopped with [ErrRebaseNeeded].
// Every subscription goes back to its first event that was not delivered for certain, so some may come again and none is lost. It
// locks out publishers and rewrites the log, so it takes its time on a large one. Calling it without need, for instance after
// pg_upgrade, does no harm but deliveries that come again.
func (s *Store) Rebase(ctx context.Context) error {
	lock := pgx.Identifier{s.schema}.Sanitize()
	steps := []string{
		"select set_config('jit', 'off', true)",
		"lock table " + lock + ".event, " + lock + ".tick, " + lock + ".lease, " + lock + ".cursor in exclusive mode",
		text(s.schema, "rebase_sequence"),
		"update " + lock + ".lease set token = token + 1",
		text(s.schema, "rebase_cursors"),
		text(s.schema, "rebase_log"),
	}
	err := s.ex.InTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(ctx context.Context, tx executor.Tx) error {
		for _, sql := range steps {
			if _, err := tx.Exec(ctx, sql); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("outbox: rebase: %w", err)
	}
	return nil
}
