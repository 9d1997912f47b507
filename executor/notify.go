package executor

import (
	"github.com/bounceproof/bounceproof/notify"
	"github.com/bounceproof/bounceproof/prepare"
)

// Notify sends a notification soon: at once if none was sent within Config.NotifyWindow, else together with all others at the window's
// end, each once. It never blocks and never fails its caller: a channel or payload over PostgreSQL's limits is an error (see package
// notify), everything else is retried, counted, and logged once. Use it after a commit, or in [Tx.OnCommit].
func (ex *Executor) Notify(channel, payload string) error { return ex.sender.Notify(channel, payload) }

// Sender returns the executor's sender of notifications, to subscribe to it within the process, to flush it, or to notify from a
// foreign pgx.Tx.
func (ex *Executor) Sender() *notify.Sender { return ex.sender }

// newSender returns the sender of a new executor.
func (ex *Executor) newSender() (*notify.Sender, error) {
	return notify.NewSender(ex, notify.SenderConfig{
		Window: ex.cfg.NotifyWindow, Logger: ex.cfg.Logger, Options: []any{prepare.Stable},
	})
}

// notifies counts the sender's commits.
func (ex *Executor) notifies() uint64 {
	return uint64(ex.sender.Stats().Statements) //nolint:gosec // a counter from zero
}
