package pgscript

import (
	"context"
	"net"
	"sync/atomic"

	"github.com/jackc/pgx/v5/pgproto3"
)

// Flood is a hostile server: it sends the same bytes until the client closes the socket.
type Flood struct {
	// Login says that it begins in front of what answers a start-up message; else it does with the first answer.
	Login bool
	// Head is sent once in front of it, and Chunk again and again.
	Head, Chunk []byte
	// Sent is how many bytes clients have taken.
	Sent atomic.Int64
}

// Octets is a message as bytes, whether it is one or not.
type Octets []byte

// Backend marks it as a server's message.
func (Octets) Backend() {}

// Decode is of no use.
func (Octets) Decode([]byte) error { return nil }

// Encode appends it.
func (r Octets) Encode(dst []byte) ([]byte, error) { return append(dst, r...), nil }

// Bytes returns messages as a server sends them.
func Bytes(messages ...pgproto3.BackendMessage) []byte {
	var b []byte
	for _, m := range messages {
		var err error
		if b, err = m.Encode(b); err != nil {
			panic("pgscript: " + err.Error())
		}
	}
	return b
}

// Dial opens a connection.
func (f *Flood) Dial(context.Context, string, string) (net.Conn, error) {
	ours, theirs := net.Pipe()
	go func() {
		defer func() { _ = ours.Close() }()
		be := pgproto3.NewBackend(ours, ours)
		if _, err := be.ReceiveStartupMessage(); err != nil {
			return
		}
		if !f.Login {
			be.Send(&pgproto3.AuthenticationOk{})
			be.Send(&pgproto3.BackendKeyData{ProcessID: 1, SecretKey: []byte{1, 2, 3, 4}})
			be.Send(&pgproto3.ReadyForQuery{TxStatus: 'I'})
			if be.Flush() != nil {
				return
			}
			for {
				m, err := be.Receive()
				if err != nil {
					return
				}
				if messageOf(m).EndsRequest() {
					break
				}
			}
		}
		go func() { // a client that gives up says goodbye
			for p := make([]byte, 512); ; {
				if _, err := ours.Read(p); err != nil {
					return
				}
			}
		}()
		for p := f.Head; ; p = f.Chunk {
			n, err := ours.Write(p)
			f.Sent.Add(int64(n))
			if err != nil {
				return
			}
		}
	}()
	return theirs, nil
}
