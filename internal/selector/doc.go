// Package selector holds how a whole pool runs its stable statements: the one decision of all its connections, which goes down from
// prepared statements on evidence, warns once, and comes back by itself when a later probe finds that they work again.
//
// It decides, and its caller acts: it sends nothing, starts no goroutine and writes no line with SQL text or arguments.
package selector
