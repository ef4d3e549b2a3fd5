package router

import (
	"cmp"
	"slices"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/policy"
)

// alternative is a worker that could serve a request in place of the chosen one.
type alternative struct {
	target kv.Target
	work   int // that lies before the request's first token there, tokens
}

// alternatives returns where p may go if the chosen worker does not take it, the best
// first, at most p.Alternatives: of each other worker that is well the rank with the
// least work, counted as the prompt's uncached tokens there and pendingWork.
func (d *decider) alternatives(p *prompt, chosen kv.WorkerKey, now time.Time) []kv.Target {
	r := d.router
	if p.Alternatives <= 0 || p.Pinned != nil {
		return nil
	}
	var found []alternative
	for i := range r.fleet.targets {
		t := &r.fleet.targets[i]
		if t.Key.Worker == chosen.Worker {
			continue
		}
		if why := r.excludes(p, i, now); why != 0 && (why < excludedEjected || r.Health.isOut(t, now)) {
			continue
		}
		var c policy.Candidate
		d.candidate(&c, p, i)
		found = append(found, alternative{*t, d.uncached(p, &c) + pendingWork(c.Load)})
	}
	slices.SortStableFunc(found, func(a, b alternative) int { return cmp.Compare(a.work, b.work) })
	targets := make([]kv.Target, 0, p.Alternatives)
	for _, a := range found {
		if len(targets) == p.Alternatives {
			break
		}
		if !slices.ContainsFunc(targets, func(t kv.Target) bool { return t.Key.Worker == a.target.Key.Worker }) {
			targets = append(targets, a.target)
		}
	}
	return targets
}

// requestWork is the weight of a request in flight beside its prompt, tokens: a typical answer.
const requestWork = 256

// pendingWork is the work that a worker has, tokens: the uncached prompt tokens that wait for their first token, and
// requestWork for each request, from any router.
func pendingWork(load *policy.Load) int {
	return load.PrefillTokens + requestWork*(load.InFlight+load.Foreign)
}

// Rebook books a request on the worker that has accepted it instead of the worker
// of decision, and returns the changed decision. The caller ends the previous
// booking. It fails as Book does.
func (r *Router) Rebook(request Request, decision Decision, taken kv.WorkerKey) (Decision, error) {
	booking, on, err := r.bookOn(request, taken)
	if err != nil {
		return decision, err
	}
	decision.Booking, decision.Target, decision.Sequence = booking, on.Target, booking.sequence
	decision.BlockSize, decision.Overlap, decision.Lower = on.BlockSize, on.Overlap, on.Lower
	decision.OverlapTokens, decision.Predicted, decision.Guessed = on.OverlapTokens, on.Predicted, on.Guessed
	decision.MatchedBlocks, decision.MatchedLower = on.MatchedBlocks, on.MatchedLower
	decision.EffectivePrefillTokens = on.EffectivePrefillTokens
	return decision, nil
}
