package selector

import "github.com/bounceproof/bounceproof/fallback"

// Policy is what the user of a pool wants to be done with stable statements.
type Policy uint8

const (
	// Auto is the default: named where that works, unprepared where it does not.
	Auto Policy = iota
	// On is always named; what fails fails.
	On
	// Off is never named, without a probe and without a word.
	Off
	// Shared is as Auto, but shared instead of unprepared behind a pooler that was seen to forward names as they are. It trusts every
	// client of the same database role.
	Shared
)

// Strategy is what a policy makes of a probe's result. The zero Topology stands for none.
func (p Policy) Strategy(t fallback.Topology) fallback.Strategy {
	switch p {
	case On:
		return fallback.Named
	case Off:
		return fallback.Unprepared
	case Shared:
		// Behind a pooler that tracks after all, each name that a connection has not parsed is FATAL.
		if s := t.Strategy(); s != fallback.Unprepared || t.Mode == fallback.ModeUnknown || !t.Forwards {
			return s
		}
		return fallback.Shared
	case Auto:
	}
	return t.Strategy()
}
