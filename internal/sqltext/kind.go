package sqltext

import "strings"

type Kind uint32

const (
	Copy Kind = 1 << iota
	Control
	Cuts
	MayCommit
	NeedsBlock
	ForgetsStatements
	Utility
)

func Of(sql string) Kind {
	var k Kind
	switch Keyword(sql) {
	case "copy":
		k |= Copy
	case "discard", "deallocate":
		k |= ForgetsStatements
	}
	switch Keyword(sql) {
	case "begin", "start", "commit", "end", "rollback", "abort", "savepoint", "release", "prepare", "set":
		k |= Control
	}
	switch Keyword(sql) {
	case "call", "do", "vacuum", "analyze", "cluster", "reindex", "create", "drop", "alter":
		k |= MayCommit
	case "lock", "savepoint", "release", "rollback", "declare", "set":
		k |= NeedsBlock
	}
	switch Keyword(sql) {
	case "end", "abort", "commit", "release", "rollback", "savepoint", "prepare":
		k |= Cuts
	}
	if isUtility(sql) {
		k |= Utility
	}
	return k
}

func OfScript(sql string) Kind {
	var k Kind
	for s := range strings.SplitSeq(sql, ";") {
		k |= Of(s)
	}
	return k
}
