package router

import "kvrouter/internal/base/fair"

// Service returns what tenants receive in the fair queue here, for other routers over the same
// workers: see fair.Queue.Report. None where the queue is not fair.
func (a *Admission) Service() []fair.Service {
	a.router.mu.Lock()
	defer a.router.mu.Unlock()
	if a.fair == nil {
		return nil
	}
	return a.fair.Report()
}

// Elsewhere is the service that another router reports. One goroutine at a time uses it.
type Elsewhere struct {
	router *Router
	heard  *fair.Elsewhere[*waiter] // nil: nothing
}

// Elsewhere returns the service of one more router.
func (a *Admission) Elsewhere() *Elsewhere { return &Elsewhere{router: a.router} }

// Take counts what the other router reports; nothing where the queue is not fair.
func (e *Elsewhere) Take(all []fair.Service) {
	if e.heard == nil && len(all) == 0 {
		return
	}
	r := e.router
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.Admission.fair == nil {
		return
	}
	if e.heard == nil {
		e.heard = r.Admission.fair.Elsewhere()
	}
	e.heard.Take(all)
}

// End forgets what runs at the other router.
func (e *Elsewhere) End() { e.Take(nil) }
