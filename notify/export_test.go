package notify

// Names of internals that tests look at.
const (
	ProofPrefix  = "bounceproof_"
	ProofChannel = proofChannel
	NoteSQL      = noteSQL
	LookSQL      = lookSQL
)
