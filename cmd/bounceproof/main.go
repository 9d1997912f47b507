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
	"regexp"
	"strings"
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
		printError(stderr, err)
	}
	return exitFailed
}

// printError prints why a command ended; a server may have worded it.
func printError(stderr io.Writer, err error) {
	_, _ = fmt.Fprintf(stderr, "bounceproof: %s\n", visible(err.Error()))
}

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:   "bounceproof",
		Short: "Prepared statements, wake-ups and a transactional outbox behind PgBouncer",
		Long: "Prepared statements, wake-ups and a transactional outbox behind PgBouncer.\n\n" +
			"The commands show what the library does on real servers, say what a connection string leads to,\n" +
			"and look after outboxes.\n\n" +
			"Exit status: 0 if all is well, 1 if something is not or could not be done, 130 if it was interrupted.",
		Args:          subcommand,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return flagError(err) })
	root.CompletionOptions.HiddenDefaultCmd = true
	root.AddCommand(newDemo(), newDoctor(), newOutbox())
	return root
}

// plainWord is what can be repeated in an error: no connection string, nor a piece of one.
var plainWord = regexp.MustCompile(`^[A-Za-z0-9_. -]{1,60}$`)

// subcommand refuses what is no command of this one, and names those that it may have meant. It does not repeat it: what stands in the wrong
// place may be a connection string.
func subcommand(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	if strings.ContainsAny(args[0], ":=/@") {
		if cmd.HasParent() {
			return noArgs(cmd, args)
		}
		return errors.New("a connection string goes behind a command: bounceproof doctor CONNECTION-STRING")
	}
	said := fmt.Sprintf("%s has no such command", cmd.CommandPath())
	cmd.SuggestionsMinimumDistance = 2
	if meant := cmd.SuggestionsFor(args[0]); len(meant) > 0 {
		return fmt.Errorf("%s; did you mean %s?", said, strings.Join(meant, " or "))
	}
	return fmt.Errorf("%s; %s --help lists them", said, cmd.CommandPath())
}

var (
	unreadable = regexp.MustCompile(`^invalid argument .* for "([^"]+)" flag: `)
	unknown    = regexp.MustCompile(`^(unknown flag: --[A-Za-z-]+|unknown shorthand flag: '.')`)
)

// flagError says what is wrong with a flag, and nothing of its value.
func flagError(err error) error {
	if m := unreadable.FindStringSubmatch(err.Error()); m != nil {
		return fmt.Errorf("the value of %s cannot be read; --help says what it is", m[1])
	}
	if m := unknown.FindStringSubmatch(err.Error()); m != nil {
		return fmt.Errorf("%s; --help lists those that there are", m[1])
	}
	if strings.HasPrefix(err.Error(), "flag needs an argument") {
		return err
	}
	return errors.New("a flag cannot be read; --help lists those that there are")
}
