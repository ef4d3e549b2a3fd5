package fair

import "time"

// State is one tenant in one class that waits or runs.
type State struct {
	Tenant    string
	Class     Class
	Weight    float64
	Waiting   int       // items
	Cost      float64   // of those, predicted, ms
	Running   int       // charges that have not ended
	Elsewhere float64   // that what runs at other routers is predicted to cost, divided by weight, ms
	Behind    float64   // service received divided by weight, ms, beyond the least of those of the class that wait
	Oldest    time.Time // arrival of the item that has waited for longest; zero: none waits
}

// States returns the tenants that wait or run, in no particular order.
func (q *Queue[T]) States() (list []State) {
	for i, flows := range q.flows {
		floor := q.lanes[i].floor()
		for _, f := range flows {
			if len(f.items) == 0 && f.running == 0 {
				continue
			}
			s := State{Tenant: f.name, Class: Classes[i], Weight: f.weight, Waiting: len(f.items), Cost: f.waiting, Running: f.running,
				Elsewhere: f.elsewhere, Behind: max(0, f.served-floor)}
			for _, it := range f.items {
				if s.Oldest.IsZero() || it.Since.Before(s.Oldest) {
					s.Oldest = it.Since
				}
			}
			list = append(list, s)
		}
	}
	return list
}
