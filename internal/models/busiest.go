package models

import (
	"cmp"
	"slices"

	"kvrouter/internal/kv"
	"kvrouter/internal/outlier"
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
	of := make(map[uint64]state, len(ids))
	s.Has(func(t *kv.Target) bool {
		of[t.Key.Worker] = state{well: true}
		return false
	})
	for _, load := range s.Loads() {
		now := of[load.Key.Worker]
		now.inFlight += load.ActiveRequests
		of[load.Key.Worker] = now
	}
	records, _ := s.Outliers()
	for i := range records {
		if r := &records[i]; r.State == outlier.StateOut || r.State == outlier.StateHeld {
			now := of[r.Worker.Worker]
			now.well = false
			of[r.Worker.Worker] = now
		}
	}
	order := make([]state, len(ids))
	for i, id := range ids {
		order[i] = of[id]
		order[i].id = id
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
