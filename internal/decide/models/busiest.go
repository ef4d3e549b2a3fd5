package models

import (
	"cmp"
	"slices"

	"kvrouter/internal/base/kv"
)

// Busiest returns the workers of those with these ids that deserve a look: first those that
// are down or out, then those with the most requests in flight, then those with the least
// ids. nil: there are no more than most; 0 means no limit.
func (s *Set) Busiest(ids []uint64, most int) map[uint64]bool {
	if most <= 0 || len(ids) <= most {
		return nil
	}
	type state struct {
		id       uint64
		well     bool
		inFlight int
	}
	order := make([]state, len(ids))
	for i, id := range ids {
		order[i].id = id
	}
	slices.SortFunc(order, func(a, b state) int { return cmp.Compare(a.id, b.id) })
	of := func(id uint64) *state {
		if at, known := slices.BinarySearchFunc(order, id, func(s state, id uint64) int { return cmp.Compare(s.id, id) }); known {
			return &order[at]
		}
		return new(state) // it has come or gone since
	}
	s.Has(func(t *kv.Target) bool {
		of(t.Key.Worker).well = true
		return false
	})
	for _, load := range s.Loads() {
		of(load.Key.Worker).inFlight += load.ActiveRequests
	}
	for _, m := range s.All() {
		for _, key := range m.Router.Health.Shunned() {
			of(key.Worker).well = false
		}
	}
	slices.SortFunc(order, func(a, b state) int {
		if a.well != b.well {
			if b.well {
				return -1
			}
			return 1
		}
		return cmp.Or(b.inFlight-a.inFlight, cmp.Compare(a.id, b.id))
	})
	shown := make(map[uint64]bool, most)
	for _, one := range order[:most] {
		shown[one.id] = true
	}
	return shown
}
