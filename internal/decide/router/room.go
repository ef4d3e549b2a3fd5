package router

import (
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/policy"
)

// unknownPass is the assumed maximum of tokens in a pass of a worker that reports none: the
// usual setting of vLLM on a large GPU.
const unknownPass = 8192

// passOf returns the maximum number of tokens in a pass of the worker.
func passOf(t *kv.Target) int {
	if t.MaxBatchedTokens > 0 {
		return int(t.MaxBatchedTokens)
	}
	return unknownPass
}

// hasRoom reports whether a worker with that load would begin one more request soon: fewer
// than a pass of uncached prompt tokens are pending, and it runs fewer requests than its
// engine can. So the next pass is full before it begins, and further requests wait in the
// router. An idle worker always has room.
func (a *Admission) hasRoom(t *kv.Target, load *policy.Load, now time.Time) bool {
	switch {
	case load.InFlight+load.Foreign == 0:
		return true
	case !hasSeat(load):
		return false
	case load.PrefillTokens < passOf(t):
		return true
	}
	return a.pending(load, now) < passOf(t)
}

// hasSeat reports whether the engine of a worker with that load would run one more request
// beside the others.
func hasSeat(load *policy.Load) bool {
	requests := load.InFlight + load.Foreign
	return requests == 0 || !load.Fresh || load.Fill == 0 || requests < load.Fill
}

// preferSeats keeps the candidates whose engine would run the request, if there are any, and reports
// whether others are left out. In a full engine it would wait for the end of an answer, ahead of more
// urgent requests.
func (d *decider) preferSeats() (others bool) {
	if d.router.Admission.fair == nil || d.router.settings.RouterQueueThreshold != nil {
		return false
	}
	return d.prefer(func(c *policy.Candidate) bool { return hasSeat(c.Load) })
}

// pending returns the uncached prompt tokens that a worker has yet to compute. The first
// token of an answer that comes whole is not reported: it counts as computed once all
// prompts before it could have been.
func (a *Admission) pending(load *policy.Load, now time.Time) int {
	tokens := load.PrefillTokens
	for i := range load.Prefills {
		if p := &load.Prefills[i]; a.wasComputed(p, now) {
			tokens -= p.Tokens
		}
	}
	return tokens
}

// wasComputed reports whether the prompt of an answer that is not streamed counts as computed.
func (a *Admission) wasComputed(p *policy.Prefill, now time.Time) bool {
	return p.AnsweredWhole && now.Sub(p.Sent) > a.router.decider.forecast.Compute(p.Queued+p.Tokens)
}

const (
	// fillGrowth is the growth of the assumed number of requests that a worker runs at once
	// while none waits in its engine.
	fillGrowth = 8
	// fullCache is the share of an engine's cache above which the cache is assumed to keep
	// requests waiting, not a full batch.
	fullCache = 0.75
	// leastProbe and mostProbe bound the time after which one request more than the last
	// batch is tried.
	leastProbe, mostProbe = time.Second, time.Minute
)

// learnRoom learns the number of requests that an engine runs at once, from a worker's second
// consecutive report of requests that wait there. Its batch or cache is full
//
//   - if no prompt was computed since the report before, although one was waiting, or
//   - if the prompts of those that wait would fit in a pass, and at least one of them was there
//     when the last passes over prompts began: these have left it out. Of answers that come
//     whole the passes are not known; then no more may run than before.
//
// While none waits beside as many as that, more may be possible.
func (a *Admission) learnRoom(at int, before policy.Published) {
	r := a.router
	load, now := r.fleet.targetLoads[at].workerLoad, r.now()
	published := load.Published
	switch {
	case published.Waiting == 0:
		if load.Fill > 0 && published.Running >= load.Fill && !now.Before(load.growsFrom) {
			load.growFill(now)
		}
	case before.Waiting == 0 || now.Sub(before.At) >= loadFreshFor:
	case a.stands(load, before), a.pending(load.Load, now) < passOf(&r.fleet.targets[at]) && load.leftOut(published):
		load.setFill(load.ran(), now)
	}
}

// ran returns the number of requests that fill the engine, of which others wait. Answers that have ended since the
// last pass began leave seats of a batch that the next pass fills: the most that it ran since then count. Those of a
// full cache do not.
func (l *workerLoad) ran() int {
	if l.KVUsage >= fullCache {
		return max(1, l.Running, l.ranBefore)
	}
	return max(1, l.ranMost)
}

// setFill sets the observed number of requests that a worker runs at once. The size of a batch is
// constant, and a request tried beyond it waits in the engine, out of the router's control: so the
// time to the next try doubles with each that fails. The room of a cache changes.
func (l *workerLoad) setFill(ran int, now time.Time) {
	switch {
	case l.KVUsage >= fullCache:
		l.probe = 0
	case ran < l.Fill || l.probe == 0:
		l.probe = min(max(4*l.probe, leastProbe), mostProbe)
	}
	l.Fill, l.growsFrom = ran, now.Add(l.probe)
}

// growFill allows a worker more requests than it was observed to run at once.
func (l *workerLoad) growFill(now time.Time) {
	if l.probe >= leastProbe {
		l.Fill++
	} else {
		l.Fill += max(1, l.Fill/fillGrowth)
	}
	l.probe /= 2
	l.growsFrom = now.Add(l.probe)
}

// stands reports whether a worker computed no prompt since the report before, though requests
// that were there then wait: all prompts are those of requests that wait, and no first token came.
func (a *Admission) stands(load *workerLoad, before policy.Published) bool {
	prompts, there := 0, false
	for i := range load.Prefills {
		if p := &load.Prefills[i]; !a.wasComputed(p, a.router.now()) {
			prompts++
			there = there || p.Sent.Before(before.At)
		}
	}
	return there && prompts <= load.Waiting && !load.Load.FirstToken.After(before.At)
}

// leftOut reports whether requests wait that the last two passes over prompts have left out. An
// engine may choose the prompts of a pass while the one before runs, so what has come since
// the last pass but one may have come too late for both.
func (l *workerLoad) leftOut(published policy.Published) bool {
	late, streams := 0, 0
	for i := range l.Prefills {
		p := &l.Prefills[i]
		if !p.AnsweredWhole {
			streams++
		}
		if p.Sent.After(l.passBefore) {
			late++
		}
	}
	if streams == 0 {
		return published.Running <= l.ranBefore
	}
	return !l.passBefore.IsZero() && published.Waiting > late
}
