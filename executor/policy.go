package executor

import (
	"fmt"

	"github.com/bounceproof/bounceproof/internal/selector"
)

// PreparedStatements says whether an executor sends stable statements by name. It implements encoding.TextMarshaler and
// encoding.TextUnmarshaler, so that its text form (auto, on, off, shared) fits flags, environment variables and YAML.
type PreparedStatements uint8

const (
	// Auto, the default, finds out what the connections lead to and sends stable statements by name where that holds; when a pooler loses
	// them it goes to unprepared with one warning, and back when the pooler keeps them again. Behind a pooler that tracks statements, every client that
	// it lends the same server connections must be trusted, as under Shared: one can replace the pooler's own names there.
	Auto PreparedStatements = iota
	// On always sends stable statements by name. It never downgrades: a lost statement is returned as [*PreparedStatementError].
	On
	// Off never uses a name. Results are the same, only slower. It is the policy for clients that share server connections and do not trust each other's
	// prepared statements; what else a session keeps (settings, temporary tables) they share all the same.
	Off
	// Shared is Auto, but behind a transaction pooler that forwards names as they are (PgBouncer before 1.21, or newer with
	// max_prepared_statements=0) it keeps prepared speed: names are content hashes, so whichever server connection answers either has the
	// statement or does not, and then it is parsed and run again. It waits for proof that names are forwarded, and runs unprepared until then.
	// A neighbour's DEALLOCATE ALL or DISCARD ALL costs a round trip and fails nobody; one that deallocates a single name of ours
	// can fail a transaction that was begun with Begin. Every client that the pooler lends the same server connections must be trusted: those of
	// the same database and role, and with user= in PgBouncer's [databases] all of that entry. One of them could put other SQL under a name of
	// ours, which Config.StatementSalt does not prevent. See docs/security.md.
	Shared
)

// The selector has the same policies under the same numbers.
var _ = [1]struct{}{}[Auto-PreparedStatements(selector.Auto)+On-PreparedStatements(selector.On)+
	Off-PreparedStatements(selector.Off)+Shared-PreparedStatements(selector.Shared)]

var policyTexts = [...]string{Auto: "auto", On: "on", Off: "off", Shared: "shared"}

// String returns the text form, and "invalid" for a value that is none of the constants.
func (p PreparedStatements) String() string {
	if int(p) >= len(policyTexts) {
		return "invalid"
	}
	return policyTexts[p]
}

// MarshalText returns the text form. It fails for a value that is none of the constants.
func (p PreparedStatements) MarshalText() ([]byte, error) {
	if int(p) >= len(policyTexts) {
		return nil, fmt.Errorf("executor: PreparedStatements: there is no value %d", uint8(p))
	}
	return []byte(policyTexts[p]), nil
}

// UnmarshalText reads the text form: auto, on, off or shared, in lower case. Anything else is an error, and leaves p as it is.
func (p *PreparedStatements) UnmarshalText(text []byte) error {
	for i, t := range policyTexts {
		if string(text) == t {
			*p = PreparedStatements(i) // an index of four
			return nil
		}
	}
	return fmt.Errorf("executor: PreparedStatements: %q is none of auto, on, off, shared", text)
}
