package router

import (
	"fmt"
	"time"

	"kvrouter/internal/base/fair"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/policy"
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
func (a *Admission) Saturation() (saturation float64, up bool) {
	wait, up := a.Wait()
	return wait.Seconds() / a.router.settings.SaturationTarget.Seconds(), up
}

// Wait predicts the delay of the first token of a new request compared to an idle
// worker, on the worker with the shortest wait and behind the requests in the
// router's queue. Not up: no worker accepts requests. With disaggregation, only
// prefill workers count.
func (a *Admission) Wait() (wait time.Duration, up bool) {
	r := a.router
	r.mu.Lock()
	defer r.unlock()
	now := r.now()
	r.expire(now)
	return a.waitFor(a.newLeg(), now)
}

// waitFor is Wait for a leg that computes prompts.
func (a *Admission) waitFor(leg kv.Leg, now time.Time) (wait time.Duration, up bool) {
	wait, workers := a.shortestWait(leg, now)
	if workers == 0 {
		return 0, false
	}
	return a.waitBehind(fair.Batch, wait, workers, now), true
}

// shortestWait returns the wait on the worker that takes the leg where it is shortest, and the
// number of workers that share the router's queue; 0: none accepts requests.
func (a *Admission) shortestWait(leg kv.Leg, now time.Time) (wait time.Duration, workers int) {
	r := a.router
	well, request := false, Request{Leg: leg}
	for i := range r.fleet.targets {
		t := &r.fleet.targets[i]
		in := !r.Health.outliers.IsOut(t.Key, now)
		if !request.mayUse(t) || well && !in {
			continue
		}
		w := r.decider.forecast.Wait(now, r.fleet.targetLoads[i].asOf(now))
		if workers == 0 || in && !well || w < wait {
			wait = w
		}
		if in && !well {
			workers, well = 0, true // those that are out count only where all are
		}
		workers++
	}
	return wait, workers
}

// waitBehind returns the wait of a request of a class behind those ahead of it in the router's queue,
// with so many workers as of shortestWait.
func (a *Admission) waitBehind(class fair.Class, wait time.Duration, workers int, now time.Time) time.Duration {
	queued, longest := 0, time.Duration(0)
	a.eachWaiting(func(w *waiter) {
		if w.prompt.Leg == kv.LegDecode {
			return // its prompt is computed
		}
		if a.fair != nil && w.prompt.Class > class {
			return // it goes later
		}
		queued += w.prompt.tokens
		longest = max(longest, now.Sub(w.since))
	})
	return max(wait+a.router.decider.forecast.Compute(queued)/time.Duration(workers), longest)
}

// SaturationOf returns the saturation of the workers of a role, where disaggregated requests have
// a worker for each part: for RolePrefill as of Saturation, for RoleDecode the mean of their
// decodeUse, times the requests that are there and wait in the router's queue to be decoded, by
// those that are there. Not up: no such worker accepts requests.
func (a *Admission) SaturationOf(role kv.Role) (saturation float64, up bool) {
	r := a.router
	r.mu.Lock()
	defer r.unlock()
	now := r.now()
	r.expire(now)
	if role == kv.RolePrefill {
		wait, up := a.waitFor(kv.LegPrefill, now)
		return wait.Seconds() / r.settings.SaturationTarget.Seconds(), up
	}
	sum, workers, requests, well, request := 0.0, 0, 0, false, Request{Leg: kv.LegDecode}
	for i := range r.fleet.targets {
		t := &r.fleet.targets[i]
		in := !r.Health.outliers.IsOut(t.Key, now)
		if !request.mayUse(t) || well && !in {
			continue
		}
		if in && !well {
			sum, workers, requests, well = 0, 0, 0, true // those that are out count only where all are
		}
		load := r.fleet.targetLoads[i].asOf(now)
		sum += a.decodeUse(t, load, now)
		requests += load.InFlight + load.Foreign
		workers++
	}
	if workers == 0 {
		return 0, false
	}
	waiting := 0
	a.eachWaiting(func(w *waiter) {
		if w.prompt.Leg == kv.LegDecode {
			waiting++
		}
	})
	return sum / float64(workers) * float64(requests+waiting) / float64(max(1, requests)), true
}

// mostDecodeUse bounds decodeUse: larger values are invalid reports.
const mostDecodeUse = 1000

// decodeUse is the used share of a worker's decoding capacity: 1 is all. It is the maximum of
//   - the share of its KV cache, as published or as of the requests in flight; with a full cache,
//     times the requests that wait in the engine and run, by those that run,
//   - the requests there, by those that the engine runs at once, if that has been learned,
//   - the predicted time per token, by the shortest objective of --class-tpot.
func (a *Admission) decodeUse(t *kv.Target, load *policy.Load, now time.Time) float64 {
	r := a.router
	use := 0.0
	if t.TotalBlocks > 0 {
		use = min(float64(load.ActiveBlocks)/float64(t.TotalBlocks), 1)
	}
	if load.Fresh && load.KVUsage > use { // not NaN
		use = min(load.KVUsage, 1)
	}
	if load.Fresh && use >= fullCache && load.Running > 0 {
		use *= float64(load.Running+load.Waiting) / float64(load.Running)
	}
	if load.Fill > 0 {
		use = max(use, float64(load.InFlight+load.Foreign)/float64(load.Fill))
	}
	if objective := r.settings.shortestTPOT(); objective > 0 && load.InFlight+load.Foreign > 0 {
		query := policy.Query{Now: now, BlockSize: r.Unit(), Leg: kv.LegDecode}
		use = max(use, float64(r.decider.forecast.TokenTime(&query, &policy.Candidate{Target: t, Load: load}))/float64(objective))
	}
	return min(max(use, 0), mostDecodeUse)
}
