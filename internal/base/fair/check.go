package fair

import (
	"fmt"
	"math"
	"slices"
)

// Check reports the first violated invariant of the queue. Tests call it after changes.
func (q *Queue[T]) Check() error {
	length := 0
	for i := range q.lanes {
		l := &q.lanes[i]
		if len(q.flows[i]) != q.used[i].Len() || len(q.flows[i]) > q.settings.Tenants+1 {
			return fmt.Errorf("class %v: %d flows are known, %d are in order, at most %d may be", Classes[i], len(q.flows[i]), q.used[i].Len(),
				q.settings.Tenants+1)
		}
		running := 0
		for name, f := range q.flows[i] {
			running += f.running
			length += len(f.items)
			sum, staying := 0.0, 0.0
			for at, it := range f.items {
				sum += it.Cost
				staying += it.stays()
				if it.flow != f || at > 0 && !f.items[at-1].before(it) {
					return fmt.Errorf("tenant %q: item %d is out of order", name, at)
				}
			}
			switch {
			case f.name != name || f.lane != l:
				return fmt.Errorf("tenant %q has the flow of %q", name, f.name)
			case slices.Contains(l.backlogged, f) != (len(f.items) > 0):
				return fmt.Errorf("tenant %q has %d items, and is backlogged or not", name, len(f.items))
			case math.Abs(sum-f.waiting) > 1e-6*(1+sum):
				return fmt.Errorf("tenant %q waits for %v ms, its items for %v", name, f.waiting, sum)
			case math.Abs(staying-f.staying) > 1e-6*(1+staying):
				return fmt.Errorf("tenant %q: items of %v ms stay, %v are counted", name, staying, f.staying)
			case f.running < 0 || math.IsNaN(f.counter()) || math.IsInf(f.counter(), 0) || f.pending < -1e-6:
				return fmt.Errorf("tenant %q: %d run, counter %v, pending %v", name, f.running, f.counter(), f.pending)
			case !(f.elsewhere >= 0 && f.elsewhere <= min(f.runs, MostDebt)) || f.received < 0 || f.running > 0 && !q.unreported[f]:
				return fmt.Errorf("tenant %q: %v ms run elsewhere, %v count; %v ms are to be reported", name, f.runs, f.elsewhere, f.received)
			}
		}
		if running != l.running {
			return fmt.Errorf("class %v: %d requests run, %d are counted", Classes[i], running, l.running)
		}
	}
	if math.IsNaN(q.owed) || math.Abs(q.owed) > MostDebt {
		return fmt.Errorf("class %v is owed %v ms, at most %d may be", Batch, q.owed, MostDebt)
	}
	if length != q.length || length > q.settings.Limit {
		return fmt.Errorf("%d items wait, %d are counted, at most %d may", length, q.length, q.settings.Limit)
	}
	return nil
}
