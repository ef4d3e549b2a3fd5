package sets

import "fmt"

// Check reports the first violated invariant of the sets. refs returns how many references
// there are to a set.
func (s *Sets) Check(refs func(id uint32) uint32) error {
	if err := s.index.Check(); err != nil {
		return fmt.Errorf("index of sets: %w", err)
	}
	unused := make(map[uint32]bool)
	for _, id := range s.free {
		if unused[id] || id == 0 {
			return fmt.Errorf("set %d is free twice or the empty one", id)
		}
		unused[id] = true
	}
	seen, all := make(map[string]int), 0
	for id, one := range s.sets {
		if id == 0 || unused[uint32(id)] {
			if one.refs != 0 || len(one.words) != 0 {
				return fmt.Errorf("free set %d has members or references", id)
			}
			continue
		}
		if all += int(one.refs); one.refs == 0 || one.refs != refs(uint32(id)) {
			return fmt.Errorf("set %d counts %d references and has %d", id, one.refs, refs(uint32(id)))
		}
		if n := len(one.words); n == 0 || one.words[n-1] == 0 {
			return fmt.Errorf("set %d is empty or ends in a zero word", id)
		}
		key := fmt.Sprint(one.words)
		if other, twice := seen[key]; twice {
			return fmt.Errorf("sets %d and %d are equal", id, other)
		}
		seen[key] = id
		var hash uint64
		for n := range uint32(len(one.words) * 64) {
			if s.Has(uint32(id), n) {
				hash ^= memberHash(n)
			}
		}
		at := s.index.Get(hash, 0)
		for at != 0 && at != uint32(id) {
			at = s.sets[at].next
		}
		if hash != one.hash || at == 0 {
			return fmt.Errorf("set %d cannot be found by its hash", id)
		}
	}
	if all != s.refs {
		return fmt.Errorf("%d references are counted, the sets have %d", s.refs, all)
	}
	if last := s.last; last.valid {
		if unused[last.from] || unused[last.to] || s.Has(last.from, last.member) == s.Has(last.to, last.member) {
			return fmt.Errorf("remembered change %+v is wrong", last)
		}
	}
	return nil
}
