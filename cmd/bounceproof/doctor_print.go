package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/bounceproof/bounceproof/fallback"
)

// print prints a diagnosis for people.
func (d *diagnosis) print(v *view) {
	whose := fmt.Sprintf("database %s, user %s", d.Database, d.User)
	if d.Address != nil {
		whose = *d.Address + ", " + whose
	}
	v.fact("address", whose)
	if len(d.Hosts) > 1 {
		var lines []string
		for _, h := range d.Hosts {
			switch {
			case h.Answers == nil:
				lines = append(lines, h.Address+": not tried")
			case *h.Answers:
				lines = append(lines, h.Address+": answers")
			default:
				lines = append(lines, h.Address+": "+*h.Error)
			}
		}
		v.fact("hosts", lines...)
	}
	if s := d.Server; s != nil {
		said := "PostgreSQL " + s.PostgreSQL
		if s.Standby {
			said += ", a standby"
		}
		v.fact("server", said)
		if s.Pooler != nil {
			v.fact("pooler", *s.Pooler+", by its own account")
		}
	}
	if t := d.Topology; t != nil {
		v.fact("found", t.Summary)
		v.fact("evidence", t.Evidence...)
	}
	d.printStatements(v)
	if len(d.Settings) > 0 {
		v.fact("settings", settingsLine(d.Settings))
	}
	if l := d.Listen; l != nil {
		said := l.State
		switch {
		case l.Millis != nil:
			said += fmt.Sprintf(": a notification from another session took %.1f ms", *l.Millis)
		case l.Reason != nil:
			said += ": " + *l.Reason
		}
		v.fact("LISTEN", said)
	}
	for _, f := range d.Findings {
		v.finding(f)
	}
	if len(d.Findings) == 0 {
		v.check(check{true, "nothing to be improved"})
	}
}

// printStatements says what becomes of prepared statements.
func (d *diagnosis) printStatements(v *view) {
	s := d.Strategies
	if s == nil {
		return
	}
	if d.Topology.Mode == nil || *d.Topology.Mode != fallback.ModeDirect.String() {
		kept := "not seen whether the pooler keeps track of them"
		if t := d.Topology.Tracks; t != nil && *t {
			kept = "the pooler keeps track of them"
		} else if t != nil {
			kept = "the pooler does not keep track of them"
		}
		v.fact("prepared", kept)
	}
	said := s.Auto
	if s.Shared != s.Auto {
		said = fmt.Sprintf("%s with PreparedStatements auto, %s with shared", s.Auto, s.Shared)
	} else if m := d.Topology.Mode; m != nil && *m == fallback.ModeSession.String() {
		said += "; should one get lost nonetheless, an executor runs it again and goes on without"
	}
	v.fact("statements", said)
}

// settingsLine says which settings hold.
func settingsLine(all []setting) string {
	var hold, other []string
	for _, s := range all {
		if s.Holds {
			hold = append(hold, s.Name)
		} else {
			other = append(other, s.Name)
		}
	}
	switch {
	case len(other) == 0:
		return strings.Join(hold, ", ") + ": as the connection string asks"
	case len(hold) == 0:
		return strings.Join(other, ", ") + ": not as the connection string asks"
	}
	slices.Sort(hold)
	return fmt.Sprintf("%s as the connection string asks; not %s", strings.Join(hold, ", "), strings.Join(other, ", "))
}
