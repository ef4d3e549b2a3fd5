package router

import (
	"time"

	"kvrouter/internal/base/fair"
	"kvrouter/internal/base/kv"
)

const (
	// leastMissed is the number of tokens that a full worker must save so that a request prefers
	// to wait for it.
	leastMissed = 256
	// prefixWorth is the time for which it yields to other tenants, as a multiple of the time to
	// compute these tokens: computing them delays all answers of a worker, too.
	prefixWorth = 3
	// mostWanted is the maximum number of full workers that a request waits for.
	mostWanted = 64
	// lastMoment is the time left to meet its objective at which a request stops waiting for
	// its prefix.
	lastMoment = 5 * lookEvery
)

// wanted are the full workers with the prefix of a request in a fair queue, as of its last look. It
// yields until one of them has room.
type wanted struct {
	workers []kv.WorkerKey // none: it takes the next worker with room
	missed  int            // tokens that it saves there against any worker with room
	until   time.Time      // when it looks again
}

// want records the candidates without capacity for which w prefers to wait, and reports whether
// there are any.
func (a *Admission) want(w *waiter, now time.Time) bool {
	r := a.router
	p := &w.prompt
	best, there := p.tokens, p.tokens
	for i := range r.decider.candidates {
		c := &r.decider.candidates[i]
		uncached := r.decider.uncached(p, c)
		if best = min(best, uncached); uncached < there && a.hasCapacity(c.Target, c.Load, now) {
			there = uncached
		}
	}
	wants := &w.wants
	wants.workers, wants.missed = wants.workers[:0], there-best
	if wants.missed < leastMissed {
		return false
	}
	pause := min(a.lookPause(), QueueRefresh)
	if !p.Deadline.IsZero() {
		switch left := p.Deadline.Sub(now) - r.decider.forecast.Alone(there); {
		case left < 0: // only its prefix can help
		case left < lastMoment:
			return false
		default:
			pause = min(pause, left-lastMoment)
		}
	}
	wants.until = now.Add(pause)
	for i := range r.decider.candidates {
		if c := &r.decider.candidates[i]; len(wants.workers) < mostWanted && r.decider.uncached(p, c) < best+leastMissed {
			wants.workers = append(wants.workers, c.Target.Key)
		}
	}
	return true
}

// stillWants reports whether w need not look again, because all workers that it wants are full.
// A look costs as much as a decision, and each dispatch needs this for all waiting requests.
func (a *Admission) stillWants(w *waiter, now time.Time) bool {
	r := a.router
	if len(w.wants.workers) == 0 || !now.Before(w.wants.until) {
		return false
	}
	for _, key := range w.wants.workers {
		at, up := r.fleet.target(key)
		if !up || r.fleet.targets[at].Cordoned || a.hasCapacity(&r.fleet.targets[at], r.fleet.targetLoads[at].asOf(now), now) {
			return false
		}
	}
	return true
}

// yields returns the verdict on w, which waits for a full worker: for a limited time it yields to
// requests of all tenants, then to those of its own tenant only.
func (a *Admission) yields(w *waiter, now time.Time) fair.Verdict {
	if now.Sub(w.since) < prefixWorth*a.router.decider.forecast.Compute(w.wants.missed) {
		return fair.Yield
	}
	return fair.Later
}
