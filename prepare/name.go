package prepare

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
)

// NamePrefix begins the name of every prepared statement this module creates.
const NamePrefix = "bp_"

// nameDigits is how many hex digits of the hash a name keeps: 128 bits. Somebody who may choose two texts finds a pair with one name after 2^64
// attempts (with 96 bits it would be 2^48, some days of one machine), and two texts of a program never meet. The name has 35 bytes;
// PostgreSQL keeps 63 (NAMEDATALEN, src/include/pg_config_manual.h).
const nameDigits = 32

// Name returns the name, [NamePrefix] and 32 hex digits, under which sql with parameters of the given type OIDs is prepared: the same text and types have the same
// name in every process, so a server connection that a pooler lends to many clients either has exactly our statement or none. salt
// separates executors that are not to share statements; empty for none. A name is no secret, with or without it: pg_prepared_statements shows it to everybody
// whom a pooler lends the same server connection. Safe for concurrent use.
func Name(sql string, paramOIDs []uint32, salt string) string {
	h := sha256.New()
	// Lengths in front of the parts: no two different inputs may feed the same bytes.
	var n [8]byte
	binary.BigEndian.PutUint32(n[:4], uint32(len(salt)))
	binary.BigEndian.PutUint32(n[4:], uint32(len(paramOIDs)))
	h.Write(n[:])
	h.Write([]byte(salt))
	for _, oid := range paramOIDs {
		binary.BigEndian.PutUint32(n[:4], oid)
		h.Write(n[:4])
	}
	h.Write([]byte(sql))
	sum := h.Sum(nil)
	name := make([]byte, len(NamePrefix)+nameDigits)
	copy(name, NamePrefix)
	hex.Encode(name[len(NamePrefix):], sum[:nameDigits/2])
	return string(name)
}
