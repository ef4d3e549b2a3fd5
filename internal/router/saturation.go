package router

import (
	"fmt"
	"time"

	"kvrouter/internal/kv"
)

// SaturationSettings define the unit of saturation.
type SaturationSettings struct {
	SaturationTarget time.Duration `group:"Routing" default:"1s" help:"Time to first token, beyond that of an idle worker, at which kvrouter_saturation is 1."`
}

// validate checks the settings; its errors name the flag.
func (k SaturationSettings) validate() error {
	if k.SaturationTarget <= 0 {
		return fmt.Errorf("--saturation-target %s: give more than 0, such as 1s", k.SaturationTarget)
	}
	return nil
}

// Saturation returns the predicted Wait divided by --saturation-target; not up: no
// worker accepts requests.
func (r *Router) Saturation() (saturation float64, up bool) {
	wait, up := r.Wait()
	return wait.Seconds() / r.settings.SaturationTarget.Seconds(), up
}

// Wait predicts the delay of the first token of a new request compared to an idle
// worker, on the worker with the shortest wait and behind the requests in the
// router's queue. Not up: no worker accepts requests. With disaggregation, only
// prefill workers count.
func (r *Router) Wait() (wait time.Duration, up bool) {
	r.mu.Lock()
	defer r.unlock()
	now := r.now()
	r.expire(now)
	leg := kv.LegWhole
	takes := func(leg kv.Leg) bool {
		return r.has(func(t *kv.Target) bool { return t.Takes(leg) && !t.Unanswered })
	}
	if takes(kv.LegPrefill) && takes(kv.LegDecode) {
		leg = kv.LegPrefill
	}
	workers, well := 0, false
	for i := range r.targets {
		t := &r.targets[i]
		in := !r.outliers.IsOut(t.Key, now)
		if !t.Takes(leg) || t.Unanswered || well && !in {
			continue
		}
		w := r.forecast.Wait(now, r.targetLoads[i].asOf(now))
		if workers == 0 || in && !well || w < wait {
			wait = w
		}
		if in && !well {
			workers, well = 0, true // those that are out count only where all are
		}
		workers++
	}
	if workers == 0 {
		return 0, false
	}
	queued, longest := 0, time.Duration(0)
	r.eachWaiting(func(w *waiter) {
		queued += w.prompt.tokens
		longest = max(longest, now.Sub(w.since))
	})
	return max(wait+r.forecast.Compute(queued)/time.Duration(workers), longest), true
}
