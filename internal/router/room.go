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

// learnRoom learns from what a worker has just published, after before, how many requests
// its engine runs at once. Where two reports after each other say that requests wait in the
// engine, that no more of them run, and that their prompts would fit in a pass, the engine's
// batch or cache is full with those that run. What waits for a pass that has just begun is
// told apart by its first token, which is not overdue. Where none waits with so many, more
// may be possible.
func (r *Router) learnRoom(at int, before policy.Published) {
	load, now := r.targetLoads[at], r.now()
	told := load.Published
	switch requests := load.InFlight + load.Foreign; {
	case told.Waiting == 0:
		if load.Fill > 0 && requests >= load.Fill {
			load.Fill += max(1, load.Fill/fillGrowth)
		}
	case before.Waiting == 0 || told.Running > before.Running || now.Sub(before.At) >= loadFreshFor:
	case r.pending(&load.Load, now) >= passOf(&r.targets[at]):
	case r.forecast.InTime(now, &load.Load):
	default:
		load.Fill = max(1, told.Running)
	}
}
