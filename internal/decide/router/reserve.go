package router

import (
	"math"
	"slices"
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
	all, _, _ := a.seats(now)
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

// seats returns the number of requests that the engines can run at once, and of these the free
// seats, as far as known. idle: one engine has nothing to do.
func (a *Admission) seats(now time.Time) (all, free int, idle bool) {
	r := a.router
	for i := range r.fleet.targets {
		if r.fleet.targets[i].Cordoned {
			continue
		}
		load := r.fleet.targetLoads[i].asOf(now)
		requests := load.InFlight + load.Foreign
		if idle = idle || requests == 0; load.Fresh && load.Fill > 0 {
			all, free = all+load.Fill, free+max(0, load.Fill-requests)
		}
	}
	return all, free, idle
}

// seatsAreKept reports whether the free seats are reserved for classes before that of a request. A worker with nothing to do takes any.
func (a *Admission) seatsAreKept(c fair.Class, now time.Time) bool {
	kept := a.reserve.before(c)
	if kept < 1 || a.fair.Owes(c) {
		return false
	}
	all, free, idle := a.seats(now)
	return !idle && all > 0 && float64(free) <= kept
}

// sharesAreKept reports whether the free seats are reserved for tenants of a class that are within their share, which
// t is not. It takes them for a while where an engine is due to be tried with one request more.
func (a *Admission) sharesAreKept(t fair.Tenant, c fair.Class, now time.Time) bool {
	needed := int(math.Ceil(float64(a.reserve.tenants[c.Place()])))
	if needed == 0 {
		return false
	}
	all, free, idle := a.seats(now)
	if idle || free > min(needed, mostShared(all)) || a.triesMore(now) {
		return false
	}
	return a.fair.Presses(t, c, all, now.Add(-activeFor))
}

// triesMore reports whether an engine is due to be tried with more requests than it was observed to run at once.
func (a *Admission) triesMore(now time.Time) bool {
	return slices.ContainsFunc(a.router.fleet.targetLoads, func(l targetLoad) bool {
		return l.load.Fill > 0 && !now.Before(l.growsFrom)
	})
}

// reserves reports whether a request counts for the reserved seats: others cannot choose among the
// seats.
func (p *prompt) reserves() bool { return !p.QueryOnly && !p.ChooseOnly && p.alike().known }
