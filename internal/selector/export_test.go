package selector

import "github.com/bounceproof/bounceproof/fallback"

// Strategy is Decision().Strategy.
func (s *Selector) Strategy() fallback.Strategy { return s.current.Load().Strategy }
