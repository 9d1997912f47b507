package fallback

import "fmt"

// Policy is what the user of a pool wants to be done with stable statements. It implements encoding.TextMarshaler and
// encoding.TextUnmarshaler, so it works with flags, environment variables and configuration files.
type Policy uint8

const (
	// PolicyAuto is the default: named where that works, unprepared where it does not. Text form "auto".
	PolicyAuto Policy = iota
	// PolicyOn is always named; what fails fails. Text form "on".
	PolicyOn
	// PolicyOff is never named, without a probe and without a word. Text form "off".
	PolicyOff
	// PolicyShared is as PolicyAuto, but shared instead of unprepared behind a pooler that forwards names as they are. It trusts every
	// client of the same database role. Text form "shared".
	PolicyShared
)

var policyTexts = [...]string{PolicyAuto: "auto", PolicyOn: "on", PolicyOff: "off", PolicyShared: "shared"}

// String returns the text form.
func (p Policy) String() string { return textOf(policyTexts[:], p) }

// MarshalText returns the text form. It fails for a value that is none of the constants.
func (p Policy) MarshalText() ([]byte, error) {
	if int(p) >= len(policyTexts) {
		return nil, fmt.Errorf("fallback: policy %d does not exist", uint8(p))
	}
	return []byte(policyTexts[p]), nil
}

// UnmarshalText reads the text form, exactly as written above.
func (p *Policy) UnmarshalText(text []byte) error {
	for i, t := range policyTexts {
		if string(text) == t {
			*p = Policy(i) // an index of four
			return nil
		}
	}
	return fmt.Errorf("fallback: policy %q is none of auto, on, off, shared", text)
}

// strategy is what a policy makes of a probe's result.
func (p Policy) strategy(t Topology) Strategy {
	switch p {
	case PolicyOn:
		return Named
	case PolicyOff:
		return Unprepared
	case PolicyShared:
		if s := t.Strategy(); s != Unprepared || t.Mode == ModeUnknown {
			return s
		}
		return Shared
	case PolicyAuto:
	}
	return t.Strategy()
}
