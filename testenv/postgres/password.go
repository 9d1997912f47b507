package postgres

import (
	"crypto/hmac"
	"crypto/pbkdf2"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"sync"
)

// Password returns the superuser's password on every server of this process. URLs have it as a parameter, so that another user can be put
// into them; a role that a test makes to connect as needs it too: create role r login password '…'. It is random: servers listen on the loopback
// address, where other users of the machine could otherwise run programs by way of COPY as whoever runs the tests.
var Password = sync.OnceValue(rand.Text)

// verifier returns what a server stores in place of a password (src/common/scram-common.c, scram_build_secret), with 1000 rounds of
// hashing, which cost a connection a fraction of a millisecond: no number of rounds makes a random password of 130 bits harder to guess, and lib/pq takes none of
// fewer than four digits.
func verifier(password string) string {
	salt := make([]byte, 16)
	_, _ = rand.Read(salt) // never fails
	const rounds = 1000
	salted, err := pbkdf2.Key(sha256.New, password, salt, rounds, sha256.Size)
	if err != nil {
		panic("bug: " + err.Error())
	}
	mac := func(text string) []byte {
		h := hmac.New(sha256.New, salted)
		h.Write([]byte(text))
		return h.Sum(nil)
	}
	stored := sha256.Sum256(mac("Client Key"))
	b64 := base64.StdEncoding.EncodeToString
	return fmt.Sprintf("SCRAM-SHA-256$%d:%s$%s:%s", rounds, b64(salt), b64(stored[:]), b64(mac("Server Key")))
}
