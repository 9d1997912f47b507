package fallback

import "github.com/bounceproof/bounceproof/internal/answer"

// AnswerError reports an answer that cannot be: a message that the protocol does not allow for what was sent, such as rows of a statement that
// has none, an answer too many, or nothing more for a minute after an error. It is in the chain of the error of the call that read it, and the
// connection has been closed, because nobody knows to which request the rest of its answers belong. PgBouncer before 1.21 can leave a client's answers to the next client of its server
// connection, and proxies that answer for the server can mix up the order.
//
// Its field Executes says whether anything in the request could be executed: if so, look before you send it again. Expected and Got name the
// protocol's messages.
type AnswerError = answer.Error
