package selector

import (
	"context"
	"log/slog"
	"time"

	"github.com/bounceproof/bounceproof/fallback"
)

// announce logs a change and calls OnChange. That names cannot be used is said once more when it is proven, if it was only not seen before: the
// first time there is nothing that a person could be advised to do.
func (s *Selector) announce(ctx context.Context, before, after *Decision, v fallback.Verdict, next time.Duration) {
	changed := before.Strategy != after.Strategy
	proven := s.config.Policy != Off && after.Strategy == fallback.Unprepared && before.Topology.Known() &&
		before.Topology.Tracking() == fallback.TrackingUnknown && after.Topology.Tracking() != fallback.TrackingUnknown
	if !changed && !proven {
		return
	}
	level, message := slog.LevelWarn, "bounceproof: prepared statements are not used any more, running without them"
	switch {
	case after.Strategy == fallback.Named && before.Strategy == fallback.Undecided:
		level, message = slog.LevelDebug, "bounceproof: prepared statements are in use"
	case after.Strategy == fallback.Named:
		level, message = slog.LevelInfo, "bounceproof: prepared statements are back in use"
	case after.Strategy == fallback.Shared && v.Reason == fallback.ReasonNone:
		level, message = slog.LevelInfo, "bounceproof: prepared statements are shared between server connections"
	case after.Strategy == fallback.Shared:
		message = "bounceproof: prepared statements are shared between server connections from now on"
	case after.Topology.Tracking() == fallback.TrackingUnknown && v.Reason == fallback.ReasonNone && !v.PoolerMade:
		message = "bounceproof: cannot tell whether prepared statements work here, running without them"
	case before.Strategy == fallback.Undecided, !changed:
		message = "bounceproof: prepared statements cannot be used here, running without them"
	}
	attrs := []slog.Attr{
		slog.String("from", before.Strategy.String()),
		slog.String("to", after.Strategy.String()),
		slog.Any("topology", after.Topology),
	}
	if level == slog.LevelWarn {
		if v.Reason != fallback.ReasonNone {
			attrs = append(attrs, slog.Any("cause", v))
		}
		if advice := s.remedy(after, v); advice != "" {
			attrs = append(attrs, slog.String("remedy", advice))
		}
		if next >= 0 {
			attrs = append(attrs, slog.Duration("next_probe", next.Round(time.Second)))
		}
	}
	s.config.Logger.LogAttrs(ctx, level, message, attrs...)
	if changed && s.config.OnChange != nil {
		s.config.OnChange(Change{
			From: before.Strategy, To: after.Strategy, Topology: after.Topology, Verdict: v, Number: after.Number,
		})
	}
}

// The remedies. Each is followed to the letter in a test of the executor's.
const (
	silence      = "set prepared statements to off to silence this"
	findDisorder = "find the pooler or proxy that answers out of order, and connect past it, or " + silence
	findReset    = "find what runs DISCARD ALL or DEALLOCATE on the pool's connections, or " + silence
	findUnseen   = "find the client that runs DEALLOCATE or DISCARD ALL where the pooler does not notice: inside a function or a DO block, or at all before PgBouncer 1.22; or " + silence
	letItTrack   = "set max_prepared_statements above 0 in PgBouncer (1.21 or newer; upgrade an older one), or set prepared statements to shared, or to off to silence this"
	itOnlyTracks = "set max_prepared_statements above 0 in PgBouncer (1.21 or newer; upgrade an older one), or " + silence
	ifItShares   = "if the pooler pools transactions: "
	ifItDoesNot  = "; if it pools sessions: find what runs DISCARD ALL or DEALLOCATE"
)

// remedy says what a person can do about a change away from named statements. It is "" where nothing was proven that could be changed.
func (s *Selector) remedy(d *Decision, v fallback.Verdict) string {
	if v.Reason == fallback.ReasonDisorder {
		return findDisorder
	}
	switch d.Topology.Tracking() {
	case fallback.TrackingYes:
		return findUnseen
	case fallback.TrackingNo:
	case fallback.TrackingUnknown:
		return ""
	}
	if d.Topology.Mode == fallback.ModeDirect {
		return findReset
	}
	advice := letItTrack
	if s.config.Policy == Shared {
		advice = itOnlyTracks // the other half of the advice is followed already
	}
	if !d.Topology.Sharing() {
		advice = ifItShares + advice + ifItDoesNot
	}
	return advice
}
