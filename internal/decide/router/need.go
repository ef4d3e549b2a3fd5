package router

import (
	"fmt"
	"time"

	"kvrouter/internal/base/kv"
)

// HoldSettings define the handling of requests while no worker that can serve them
// is up.
type HoldSettings struct {
	HoldWhenEmpty time.Duration `group:"Routing" default:"0s" help:"Maximum time a request waits while no worker can serve it, for workers scaled to zero. At most --router-queue-limit requests wait, and the router stays ready. 0 answers 503 immediately."`
}

// validate checks the settings; its errors name the flag.
func (k HoldSettings) validate(limit int) error {
	switch {
	case k.HoldWhenEmpty < 0:
		return fmt.Errorf("--hold-when-empty %s: give a time, such as 2m; 0 disables it", k.HoldWhenEmpty)
	case k.HoldWhenEmpty > 0 && limit < 1:
		return fmt.Errorf("--router-queue-limit %d: give at least 1, or leave out --hold-when-empty", limit)
	}
	return nil
}

// Need selects the workers that could serve a request.
type Need struct {
	Model string // that they serve; empty: any
	Whole bool   // a worker for an aggregated request
	Pair  bool   // two workers for a disaggregated request, if Whole is not set
	Now   bool   // it must not wait
}

// Lacks reports whether a request has to wait for a worker, because none that can
// serve it is up and has answered. It returns false if such workers are up but none
// serves the model, because waiting would not help.
func (r *Router) Lacks(need Need) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	known := !r.fleet.has(func(t *kv.Target) bool { return !t.Unanswered })
	var prefill, decode kv.Kinds
	takes := func(t *kv.Target, leg kv.Leg) bool {
		request := Request{Model: need.Model, Leg: leg}
		return request.mayUse(t)
	}
	for i := range r.fleet.targets {
		t := &r.fleet.targets[i]
		if !t.Serves(need.Model) {
			continue
		}
		known = true
		if (need.Whole || !need.Pair) && takes(t, kv.LegWhole) {
			return false
		}
		if takes(t, kv.LegPrefill) {
			prefill |= kv.KindsOf(t.Kind)
		}
		if takes(t, kv.LegDecode) {
			decode |= kv.KindsOf(t.Kind)
		}
	}
	return known && (need.Whole || prefill&decode == 0)
}
