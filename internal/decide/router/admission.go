package router

import (
	"time"

	"kvrouter/internal/base/fair"
)

// Admission is which requests go to an engine now: what the workers have room for, the requests
// that wait for that, in their order, and those that are refused. router.mu guards it.
type Admission struct {
	router     *Router
	thresholds BusyThresholds
	began      time.Time            // of the queue's clock: when a request first had to wait
	waiting    []*waiter            // for a worker with capacity, the first to go at the front
	fair       *fair.Queue[*waiter] // those that wait, in place of waiting; nil: the order is not fair
	reserve    reserve              // of seats, by a fair queue
	refreshed  time.Time            // when a waiting request last had all look for capacity
}

func newAdmission(r *Router) *Admission {
	a := &Admission{router: r, thresholds: r.settings.BusyThresholds}
	if k := &r.settings; k.Fair() {
		a.fair = fair.New[*waiter](fair.Settings{Limit: k.RouterQueueLimit, Tenants: mostTenants, BatchShare: k.RouterBatchShare})
	}
	return a
}
