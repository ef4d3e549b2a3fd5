package router

import (
	"time"

	"kvrouter/internal/kv"
	"kvrouter/internal/policy"
)

// unknownPass is the most tokens of a pass of a worker that reports none, the usual
// setting of vLLM on a large GPU.
const unknownPass = 8192

// passOf returns the most tokens of a pass of the worker.
func passOf(t *kv.Target) int {
	if t.MaxBatchedTokens > 0 {
		return t.MaxBatchedTokens
	}
	return unknownPass
}

// hasRoom reports whether a worker with that load would begin one more request soon: fewer
// than a pass of uncached prompt tokens are pending, and it runs fewer requests than its
// engine can. So the next pass is full before it begins, and what is more waits in the
// router. A worker with nothing to do always has room.
func (r *Router) hasRoom(t *kv.Target, load *policy.Load, now time.Time) bool {
	requests := load.InFlight + load.Foreign
	switch {
	case requests == 0:
		return true
	case load.Fresh && load.Fill > 0 && requests >= load.Fill:
		return false
	case load.PrefillTokens < passOf(t):
		return true
	}
	return r.pending(load, now) < passOf(t)
}

// pending returns the uncached prompt tokens that a worker has yet to compute. The first
// token of an answer that comes whole is not reported: it is taken to have been computed
// when all before it could have been.
func (r *Router) pending(load *policy.Load, now time.Time) int {
	tokens := load.PrefillTokens
	for i := range load.Prefills {
		if p := &load.Prefills[i]; p.AnsweredWhole && now.Sub(p.Sent) > r.forecast.Compute(p.Queued+p.Tokens) {
			tokens -= p.Tokens
		}
	}
	return tokens
}

// fillGrowth is the part by which the requests that a worker runs at once are taken to be
// more where its engine keeps none waiting.
const fillGrowth = 8

// learnRoom learns from a worker's second report in a row that requests wait in its engine how
// many that runs at once. If their prompts would fit in a pass, and at least one of them was
// there when the last passes over prompts began, these have left it out: the engine's batch or
// cache is full with those that run. Of answers that come whole the passes are not known; then
// no more may run than before. Where none waits with so many, more may be possible.
func (r *Router) learnRoom(at int, before policy.Published) {
	load, now := r.targetLoads[at], r.now()
	told := load.Published
	switch requests := load.InFlight + load.Foreign; {
	case told.Waiting == 0:
		if load.Fill > 0 && requests >= load.Fill {
			load.Fill += max(1, load.Fill/fillGrowth)
		}
	case before.Waiting == 0 || now.Sub(before.At) >= loadFreshFor || r.pending(&load.Load, now) >= passOf(&r.targets[at]):
	case load.leftOut(told):
		load.Fill = max(1, told.Running)
	}
}

// leftOut reports whether requests wait that the last two passes over prompts have left out. An
// engine may choose the prompts of a pass while the one before runs, so what has come since
// the last pass but one may have come too late for both.
func (l *workerLoad) leftOut(told policy.Published) bool {
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
		return told.Running <= l.ranBefore
	}
	return !l.passBefore.IsZero() && told.Waiting > late
}
