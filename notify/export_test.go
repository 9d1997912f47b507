package notify

// Names of internals that tests look at.
const ProofPrefix = proofPrefix
