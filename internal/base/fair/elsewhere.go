package fair

import (
	"cmp"
	"math"
	"slices"
)

// MostReported is the maximum number of services that Report returns.
const MostReported = 256

// Service is what one tenant receives in one class, divided by its weight, ms.
type Service struct {
	Tenant   string
	Class    Class
	Received float64 // of requests that have ended since the last report
	Running  float64 // predicted cost of running requests
}

// amount is what there is to report.
func (s *Service) amount() float64 { return s.Received + s.Running }

// Report returns the services that tenants receive here, for other routers over the same workers:
// whole ms, the largest first. Service beyond MostReported is reported later.
func (q *Queue[T]) Report() []Service {
	var all []Service
	for f := range q.unreported {
		s := Service{Tenant: f.name, Class: f.lane.class, Received: math.Floor(f.received), Running: math.Round(max(0, f.pending))}
		if s.amount() > 0 {
			all = append(all, s)
		} else if f.running == 0 {
			delete(q.unreported, f)
		}
	}
	slices.SortFunc(all, func(a, b Service) int {
		return cmp.Or(cmp.Compare(b.amount(), a.amount()), cmp.Compare(a.Tenant, b.Tenant), cmp.Compare(a.Class, b.Class))
	})
	all = all[:min(len(all), MostReported)]
	for _, s := range all {
		q.flows[s.Class.Place()][s.Tenant].received -= s.Received
	}
	return all
}

// Elsewhere is the service that one other router reports.
type Elsewhere[T any] struct {
	queue *Queue[T]
	runs  map[*flow[T]]float64 // there, ms; a flow that is forgotten may be among them
}

// Elsewhere returns the service of one more router, which has reported nothing yet.
func (q *Queue[T]) Elsewhere() *Elsewhere[T] {
	return &Elsewhere[T]{queue: q, runs: map[*flow[T]]float64{}}
}

// Take counts a Report of the other router; its Running replaces that of the last one. The report is
// not trusted: it neither makes a tenant known here nor takes it further than MostDebt behind the
// others, and services after the first MostReported are ignored.
func (e *Elsewhere[T]) Take(all []Service) {
	e.End()
	for _, s := range all[:min(len(all), MostReported)] {
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
