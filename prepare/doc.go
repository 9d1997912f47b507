// Package prepare is what a program sees of prepared statements: the option [Stable], which marks a text that never changes, and [Name],
// which says what its prepared statement is called on every server and in every process.
package prepare
