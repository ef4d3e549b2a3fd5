package fair

import (
	"cmp"
	"math"
	"slices"
)

// MostTold is how many services Tell returns at most.
const MostTold = 256

// Service is what one tenant receives in one class, divided by its weight, ms.
type Service struct {
	Tenant   string
	Class    Class
	Received float64 // of requests that have ended since it was told last
	Running  float64 // that those that run are predicted to cost
}

// amount is how much there is to be told.
func (s *Service) amount() float64 { return s.Received + s.Running }

// Tell returns the services that tenants receive here, for other routers over the same workers:
// whole ms, the most at the front. Service that is left out because there are more than MostTold
// is told later.
func (q *Queue[T]) Tell() []Service {
	var all []Service
	for f := range q.untold {
		s := Service{Tenant: f.name, Class: f.lane.class, Received: math.Floor(f.received), Running: math.Round(max(0, f.pending))}
		if s.amount() > 0 {
			all = append(all, s)
		} else if f.running == 0 {
			delete(q.untold, f)
		}
	}
	slices.SortFunc(all, func(a, b Service) int {
		return cmp.Or(cmp.Compare(b.amount(), a.amount()), cmp.Compare(a.Tenant, b.Tenant), cmp.Compare(a.Class, b.Class))
	})
	all = all[:min(len(all), MostTold)]
	for _, s := range all {
		q.flows[s.Class.Place()][s.Tenant].received -= s.Received
	}
	return all
}

// Elsewhere is the service that one other router tells.
type Elsewhere[T any] struct {
	queue *Queue[T]
	runs  map[*flow[T]]float64 // there, ms; a flow that is forgotten may be among them
}

// Elsewhere returns the service of one more router, which has told nothing yet.
func (q *Queue[T]) Elsewhere() *Elsewhere[T] {
	return &Elsewhere[T]{queue: q, runs: map[*flow[T]]float64{}}
}

// Take counts what the other router tells: its last Tell, whose Running takes the place of what
// it told before. Nothing of it is trusted: it neither makes a tenant known here nor takes it
// further than MostDebt behind the others, and what comes after the first MostTold is ignored.
func (e *Elsewhere[T]) Take(all []Service) {
	e.End()
	for _, s := range all[:min(len(all), MostTold)] {
		f := e.queue.flows[s.Class.Place()][s.Tenant]
		if f == nil {
			continue
		}
		ms := math.Round(min(cost(s.Running), MostDebt)) // whole numbers, so that sums are exact
		f.runs += ms
		e.runs[f] += ms
		f.receive(cost(s.Received))
	}
}

// End forgets what runs at the other router.
func (e *Elsewhere[T]) End() {
	for f, ms := range e.runs {
		f.runs -= ms
		f.weigh()
	}
	clear(e.runs)
}

// receive counts service that has been received elsewhere, ms. Like that of this router, it is
// free while no request of the class waits here.
func (f *flow[T]) receive(ms float64) {
	if len(f.lane.backlogged) > 0 {
		f.served = max(f.served, min(f.served+ms, f.lane.floor()+MostDebt))
	}
	f.weigh()
}

// weigh sets what runs elsewhere, within its bound.
func (f *flow[T]) weigh() {
	f.elsewhere = min(f.runs, max(0, f.lane.floor()+MostDebt-f.served))
}
