package router

import (
	"time"

	"kvrouter/internal/fair"
)

const (
	// mayWait is the share of the requests of a class that may find no seat because of later
	// classes.
	mayWait = 0.02
	// mostReserved is the share of all seats that is kept for earlier classes at most.
	mostReserved = 0.5
)

// reserve is how many seats in all engines are kept free for each class: a request of a later
// class goes only while more are free. It is learned: one more with each request of the class
// that has to wait while one of a later class runs, and less with each that need not, so that
// about mayWait of them have to.
type reserve [len(fair.Classes)]float64

// learn notes that a request of the class comes, and whether it has to wait. later is how many of
// later classes run, and seats how many can run in all.
func (s *reserve) learn(c fair.Class, waits bool, later, seats int) {
	kept := &s[c.Place()]
	switch {
	case !waits:
		*kept = max(0, *kept-mayWait)
	case later > 0:
		*kept = min(*kept+1, mostReserved*float64(seats))
	}
}

// before returns how many seats are kept for classes that go before c.
func (s *reserve) before(c fair.Class) (seats float64) {
	for _, kept := range s[:c.Place()] {
		seats = max(seats, kept)
	}
	return seats
}

// seats returns how many requests the engines can run at once, and how many of these seats are
// free, as far as that is known. idle: one of them has nothing to do.
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

// seatsAreKept reports whether a request of the class has to leave the seats that are free to
// earlier classes. A worker with nothing to do takes any.
func (a *Admission) seatsAreKept(c fair.Class, now time.Time) bool {
	kept := a.reserve.before(c)
	if kept < 1 || a.fair.Owes(c) {
		return false
	}
	all, free, idle := a.seats(now)
	return !idle && all > 0 && float64(free) <= kept
}

// reserves reports whether seats are learned to be kept from a request: others cannot choose among
// the seats.
func (p *prompt) reserves() bool { return !p.QueryOnly && !p.ChooseOnly && p.alike().known }
