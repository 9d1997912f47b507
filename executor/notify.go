package executor

import (
	"errors"

	"github.com/bounceproof/bounceproof/notify"
)

// Notify sends a notification soon: at once if none was sent within Config.Sender's Window, else together with all others at the window's
// end, each once. It never blocks. A channel or payload over PostgreSQL's limits is a *notify.LimitError, a closed executor is [ErrClosed];
// everything else is retried, counted, and logged once. Use it after a commit, or in [Tx.OnCommit]. Safe for concurrent use.
func (ex *Executor) Notify(channel, payload string) error {
	err := ex.sender.Notify(channel, payload)
	if errors.Is(err, notify.ErrClosed) {
		return ErrClosed
	}
	return err
}

// Sender returns the executor's sender of notifications, to subscribe to it within the process, to flush it, or to notify from a
// foreign pgx.Tx. A process's listener takes it as notify.ListenerConfig.Sender, and needs to be one alone: see notify.Listener.Share. It is closed
// with the executor.
func (ex *Executor) Sender() *notify.Sender { return ex.sender }
