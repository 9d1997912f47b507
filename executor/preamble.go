package executor

import (
	"slices"
	"strings"
)

// preamble is what opens a transaction: BEGIN, and the SAVEPOINTs of the nested transactions that are open. Its texts ride in front of
// whatever the transaction sends next. While the transaction is unused, the whole of it can be sent anew.
//
//	unsent, unused ──arrived──▶ begun, unused ──use──▶ begun
//	      ▲                        │
//	      └────────restart─────────┘
//
// The transaction's methods say what happened; only the methods here change a field.
type preamble struct {
	texts    []string // BEGIN, then every SAVEPOINT that is open
	unsent   []string // of texts, what rides with the next request; after a restart ROLLBACK may stand in front
	untraced []string // of texts, what the tracer has not been shown
	begun    bool     // BEGIN has arrived
	unused   bool     // no statement of the transaction has run
}

// newPreamble returns the preamble of a transaction that has sent nothing.
func newPreamble(begin string, traced bool) preamble {
	p := preamble{texts: []string{begin}, unsent: []string{begin}, unused: true}
	if traced {
		p.untraced = []string{begin}
	}
	return p
}

// open appends a text to the opening of a transaction that has sent nothing, and is not traced: it is not the caller's.
func (p *preamble) open(text string) {
	if p.begun || !p.unused {
		return
	}
	p.texts, p.unsent = append(p.texts, text), append(p.unsent, text)
}

// add appends the SAVEPOINT of a nested transaction.
func (p *preamble) add(text string, traced bool) {
	p.unsent = append(p.unsent, text)
	if p.unused {
		p.texts = append(p.texts, text)
	}
	if traced {
		p.untraced = append(p.untraced, text)
	}
}

// takeBack removes a SAVEPOINT that has not been sent, with those behind it, and reports whether that was so.
func (p *preamble) takeBack(text string) bool {
	i := slices.Index(p.unsent, text)
	if i < 0 {
		return false
	}
	p.unsent = p.unsent[:i]
	if i := slices.Index(p.texts, text); i >= 0 {
		p.texts = p.texts[:i]
	}
	if i := slices.Index(p.untraced, text); i >= 0 {
		p.untraced = p.untraced[:i]
	}
	return true
}

// arrived notes that the server has what was unsent.
func (p *preamble) arrived() { p.begun, p.unsent = true, nil }

// use notes that a statement of the transaction has run, or may have: from now on its opening cannot be sent anew.
func (p *preamble) use() { p.unused = false }

// replaced notes that something else begins the transaction: a BeginQuery of the caller's own, or the first item of a batch.
func (p *preamble) replaced() { *p = preamble{} }

// restart makes the whole opening ride again, with ROLLBACK in front if a transaction is open.
func (p *preamble) restart(open bool) {
	p.unsent = nil
	if open {
		p.unsent = append(p.unsent, "rollback")
	}
	p.unsent = append(p.unsent, p.texts...)
	p.begun = false
}

// trace returns what the tracer is to be shown, each text with the tag that the server will answer, and forgets it.
func (p *preamble) trace() (texts, tags []string) {
	texts, p.untraced = p.untraced, nil
	for _, text := range texts {
		tag := "BEGIN"
		if strings.HasPrefix(text, "savepoint ") {
			tag = "SAVEPOINT"
		}
		tags = append(tags, tag)
	}
	return texts, tags
}
