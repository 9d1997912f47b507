package outbox

// RewriteTick changes the tick statement of a store, for negative controls.
func (s *Store) RewriteTick(f func(sql string) string) { s.sql.tick = f(s.sql.tick) }

// Statement returns a statement of the store's schema.
func (s *Store) Statement(name string) string { return text(s.schema, name) }
