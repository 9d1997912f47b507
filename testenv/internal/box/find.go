package box

import (
	"context"
	"fmt"
	"os"

	"github.com/bounceproof/bounceproof/testenv/internal/suite"
)

// opener opens a box in the runtime that was found.
type opener interface {
	open(ctx context.Context, o Options) (*Box, error)
}

// find chooses the runtime. Containers come first, so that every version runs in the same surroundings.
// TESTENV_RUNTIME=container or process allows only that one.
func find(ctx context.Context, o Options) (opener, error) {
	only := os.Getenv("TESTENV_RUNTIME")
	unavailable := func(reason, try string) error {
		return &UnavailableError{Program: o.Program, Version: o.Version, Reason: reason, Try: try}
	}
	l, localErr := findLocal(ctx, o.Program, o.Version)
	switch only {
	case "process":
		if localErr != nil {
			return nil, unavailable(localErr.Error()+" (TESTENV_RUNTIME=process)", installCommand(o.Program, o.Version))
		}
		return l, nil
	case "container", "":
	default:
		return nil, unavailable(fmt.Sprintf("TESTENV_RUNTIME=%q is neither container nor process", only), "unset TESTENV_RUNTIME")
	}
	if localErr == nil {
		return l, nil
	}
	return nil, unavailable(localErr.Error(), installCommand(o.Program, o.Version))
}

func installCommand(p suite.Program, version string) string {
	if p == suite.PgBouncer {
		return "apt-get install pgbouncer"
	}
	return "apt-get install postgresql-" + version
}
