package answer

// Error reports an answer that cannot be: it is not what the protocol allows for what was sent. The connection it came on is of no use any
// more, because nobody knows to which request the rest of its answers belong.
type Error struct {
	// Expected and Got name protocol messages (PostgreSQL, "Message Formats"). Got may add what was wrong with it.
	Expected, Got string
	// Executes is whether anything in the request could be executed. Without it the request only asked, and running it again is safe.
	Executes bool
}

// Error says what came, what was expected, and what may have happened.
func (e *Error) Error() string {
	fate := "nothing was executed"
	if e.Executes {
		fate = "what was sent may have been executed, so look before you send it again"
	}
	return "answer out of order: " + e.Got + " came where " + e.Expected + " was due, so the connection is closed; " + fate +
		" (a pooler mixes up answers of its clients, as PgBouncer before 1.21 can, or a proxy does not follow the protocol)"
}
