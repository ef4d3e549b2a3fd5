package router

import (
	"time"

	"kvrouter/internal/base/fair"
)

const (
	// mayWait is the share of a class's requests that may find no seat because of later
	// classes.
	mayWait = 0.02
	// mostReserved is the maximum share of all seats that is reserved for earlier classes.
	mostReserved = 0.5
)

// reserve is the number of seats in all engines that are reserved for each class: a request of a
// later class is admitted only while more are free. It is learned: one more with each request of
// the class that waits while one of a later class runs, less with each that does not, so that
// about mayWait of them wait.
type reserve [len(fair.Classes)]float64

// learn counts a request of the class that arrives, and whether it has to wait. later is the number
// of running requests of later classes, seats the number that can run in all.
func (s *reserve) learn(c fair.Class, waits bool, later, seats int) {
	kept := &s[c.Place()]
	switch {
	case !waits:
		*kept = max(0, *kept-mayWait)
	case later > 0:
		*kept = min(*kept+1, mostReserved*float64(seats))
	}
}

// before returns the number of seats that are reserved for classes before c.
func (s *reserve) before(c fair.Class) (seats float64) {
	for _, kept := range s[:c.Place()] {
		seats = max(seats, kept)
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

// reserves reports whether a request counts for the reserved seats: others cannot choose among the
// seats.
func (p *prompt) reserves() bool { return !p.QueryOnly && !p.ChooseOnly && p.alike().known }
