package executor

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"sync"

	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/internal/startup"
)

// settings is what is known of the settings that the pool's connection string asks for. A pooler that ignores a startup parameter drops it
// silently. The zero value is ready to use.
type settings struct {
	mu      sync.Mutex // guards dropped; a check is made by whoever probes, and nobody waits for it
	dropped []string   // as last warned about
}

// checkSettings looks behind a pooler whether the settings of the connection string hold, on a connection of its own, and warns once for
// each change. It costs nothing where none is asked for. application_name is left out: it is for people, and poolers make their own of it.
func (ex *Executor) checkSettings(ctx context.Context, top fallback.Topology) {
	if top.Mode == fallback.ModeDirect {
		ex.settings.found(ctx, ex.cfg.Logger, nil)
		return
	}
	cfg := ex.pool.Config() // a copy
	params := cfg.ConnConfig.RuntimeParams
	delete(params, "application_name")
	if len(startup.Asked(params)) == 0 {
		return
	}
	conn, err := ex.dial(ctx)
	if err != nil {
		return // the next look finds out
	}
	list, err := startup.Compare(ctx, conn, params)
	if err != nil {
		return
	}
	var dropped []string
	for _, s := range list {
		if !s.Arrived {
			dropped = append(dropped, s.Name)
		}
	}
	ex.settings.found(ctx, ex.cfg.Logger, dropped)
}

// found takes down which settings do not hold.
func (s *settings) found(ctx context.Context, log *slog.Logger, dropped []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if slices.Equal(s.dropped, dropped) {
		return
	}
	s.dropped = dropped
	names := slog.String("settings", strings.Join(dropped, ", "))
	if len(dropped) == 0 {
		log.InfoContext(ctx, "bounceproof: the settings of the connection string hold")
		return
	}
	log.WarnContext(ctx, "bounceproof: the pooler drops settings of the connection string; statements run without them", names,
		slog.String("remedy", "set them with ALTER ROLE … IN DATABASE … SET, or let PgBouncer 1.20 or newer pass them on with track_extra_parameters "+
			"(only those that the server reports); bounceproof doctor shows what holds"))
}
