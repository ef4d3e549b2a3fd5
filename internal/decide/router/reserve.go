package router

import (
	"math"
	"time"

	"kvrouter/internal/base/fair"
)

const (
	// mayWait is the share of requests that may find no seat because of those for which none is reserved.
	mayWait = 0.02
	// mostReserved is the maximum share of all seats that is reserved for earlier classes.
	mostReserved = 0.5
	// sharedOf is the number of seats of which one, at most, is reserved for tenants within their share.
	// Of half as many one may be, too.
	sharedOf = 16
	// activeFor is the time for which a tenant has a share after its last request.
	activeFor = time.Minute
)

// kept is a learned number of seats.
type kept float64

// learn counts a request for which the seats are kept, and whether it waits while others run.
func (k *kept) learn(waits, others bool, most float64) {
	switch {
	case !waits:
		*k = max(0, *k-mayWait)
	case others:
		*k = kept(min(float64(*k)+1, most))
	}
}

// reserve is the number of seats in all engines that are reserved for each class: a request of a
// later class is admitted only while more are free. It is learned: one more with each request of
// the class that waits while one of a later class runs, less with each that does not, so that
// about mayWait of them wait. In the same way seats are reserved for the tenants of a class that are within their
// share.
type reserve struct{ classes, tenants [len(fair.Classes)]kept }

// learnReserve counts a request that arrives, and whether it has to wait.
func (a *Admission) learnReserve(p *prompt, waits bool, now time.Time) {
	at := p.Class.Place()
	all := a.seats(now).all
	a.reserve.classes[at].learn(waits, a.fair.RunningAfter(p.Class) > 0, mostReserved*float64(all))
	if a.fair.Within(p.Tenant, p.Class, all, now.Add(-activeFor)) {
		a.reserve.tenants[at].learn(waits, true, float64(mostShared(all)))
	}
}

// mostShared returns the maximum number of seats that is reserved for tenants within their share.
func mostShared(all int) int { return (all + sharedOf/2) / sharedOf }

// before returns the number of seats that are reserved for classes before c.
func (s *reserve) before(c fair.Class) (seats float64) {
	for _, k := range s.classes[:c.Place()] {
		seats = max(seats, float64(k))
	}
	return seats
}

// seats are the requests that the engines can run at once, as far as known.
type seats struct {
	all, free int
	idle      bool // one engine has nothing to do
	tries     bool // one is due to be tried with more requests than it was observed to run at once
}

// seats returns the seats of the workers that are not cordoned.
func (a *Admission) seats(now time.Time) (s seats) {
	r := a.router
	for i := range r.fleet.targets {
		if r.fleet.targets[i].Cordoned {
			continue
		}
		load := r.fleet.targetLoads[i].asOf(now)
		requests := load.InFlight + load.Foreign
		if s.idle = s.idle || requests == 0; load.Fresh && load.Fill > 0 {
			s.all, s.free = s.all+load.Fill, s.free+max(0, load.Fill-requests)
			s.tries = s.tries || !now.Before(r.fleet.targetLoads[i].growsFrom)
		}
	}
	return s
}

// seatsAreKept reports whether the free seats are reserved for classes before that of a request. A worker with nothing to do takes any.
func (a *Admission) seatsAreKept(c fair.Class, now time.Time) bool {
	kept := a.reserve.before(c)
	if kept < 1 || a.fair.Owes(c) {
		return false
	}
	s := a.seats(now)
	return !s.idle && s.all > 0 && float64(s.free) <= kept
}

// sharesAreKept reports whether the free seats are reserved for tenants of a class that are within their share, which
// t is not. While an engine is due to be tried with more requests, t may take them.
func (a *Admission) sharesAreKept(t fair.Tenant, c fair.Class, now time.Time) bool {
	needed := int(math.Ceil(float64(a.reserve.tenants[c.Place()])))
	if needed == 0 {
		return false
	}
	s := a.seats(now)
	if s.idle || s.tries || s.free > min(needed, mostShared(s.all)) {
		return false
	}
	return a.fair.Presses(t, c, s.all, now.Add(-activeFor))
}

// reserves reports whether a request counts for the reserved seats: others cannot choose among the
// seats.
func (p *prompt) reserves() bool { return !p.QueryOnly && !p.ChooseOnly && p.alike().known }
