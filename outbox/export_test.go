package outbox

// RewriteTick changes the tick statement of a store, for negative controls.
func (s *Store) RewriteTick(f func(sql string) string) { s.sql.tick = f(s.sql.tick) }

// Statement returns a statement of the store's schema.
func (s *Store) Statement(name string) string { return text(s.schema, name) }

// RewritePage changes the page statement of a store.
func (s *Store) RewritePage(f func(sql string) string) { s.sql.page = f(s.sql.page) }

// LaneOf returns the lane of a key.
func LaneOf(key string, lanes int) int { return int(laneOf(key, lanes)) }
