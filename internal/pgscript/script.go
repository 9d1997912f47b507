package pgscript

import "github.com/jackc/pgx/v5/pgproto3"

// Script is what a backend does otherwise than its kind. Any field may be left out. The functions are called on the goroutine of the
// connection that they are about; conn is its number, from 1, in the order in which connections were opened.
type Script struct {
	// Login refuses a connection: what it returns, if it is not nil, is the answer to the start-up message, and the end.
	Login func(conn int) *pgproto3.ErrorResponse
	// KeyPID is the process id that BackendKeyData names. By default a direct server tells the truth, and a pooler makes one up.
	KeyPID func(conn int) uint32
	// BackendPID is the answer, as text, when a connection asks for pg_backend_pid() for the kth time. By default it is that of the server
	// connection.
	BackendPID func(conn, k int) string
	// Rename returns the name by which the server knows a client's prepared statement, "" if it does not know it. By default a Tracked
	// pooler has names of its own, and the others forward names.
	Rename func(name string) string
	// Execute is asked before each text is executed. An error that it returns is the text's, [NoAnswer] included.
	Execute func(conn int, sql string) *pgproto3.ErrorResponse
	// CloseFirst answers each Close at once, in front of what it has not sent yet, as Pgpool-II does in streaming replication mode.
	CloseFirst bool
	// ErrorsEnd makes every error the end of its connection, whatever its severity says, as PgBouncer 1.15 has it with its own.
	ErrorsEnd bool
}

// rename is the server's name of a client's statement.
func (b *Backend) rename(name string) string {
	switch {
	case b.o.Script.Rename != nil:
		return b.o.Script.Rename(name)
	case b.o.Kind == Tracked:
		return "PGBOUNCER_1"
	default:
		return name
	}
}
