// Command bounceproof shows what the library does on real servers (demo), says what a connection string leads to
// (doctor), and looks after outboxes (outbox).
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	// The first signal ends the work in order. From then on the default holds again: a second one ends the process.
	context.AfterFunc(ctx, stop)
	code := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// Exit statuses.
const (
	exitOK          = 0
	exitFailed      = 1
	exitInterrupted = 130 // as shells have it: 128 + SIGINT
)

// errSilent ends a command with status 1 that has said on its standard output why.
var errSilent = errors.New("the command has reported its result")

// run is the command line without the process around it.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	root := newRoot()
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	err := root.ExecuteContext(ctx)
	switch {
	case err == nil:
		return exitOK
	case ctx.Err() != nil:
		_, _ = fmt.Fprintln(stderr, "bounceproof: interrupted")
		return exitInterrupted
	case !errors.Is(err, errSilent):
		_, _ = fmt.Fprintf(stderr, "bounceproof: %v\n", err)
	}
	return exitFailed
}

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:   "bounceproof",
		Short: "Prepared statements, wake-ups and a transactional outbox behind PgBouncer",
		Long: "Prepared statements, wake-ups and a transactional outbox behind PgBouncer.\n\n" +
			"The commands show what the library does on real servers, say what a connection string leads to,\n" +
			"and look after outboxes.",
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.CompletionOptions.HiddenDefaultCmd = true
	root.AddCommand(newDemo(), newDoctor(), newOutbox())
	return root
}
