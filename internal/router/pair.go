package router

import (
	"context"
	"errors"
	"slices"

	"kvrouter/internal/hints"
	"kvrouter/internal/kv"
	"kvrouter/internal/policy"
)

// ErrNoPair means that a request must not stay whole, but has to: no prefill
// worker is up, or no decode worker that could go on with its work.
var ErrNoPair = errors.New("no compatible prefill and decode workers are up")

// Pair is the decision on a request that two workers may serve: one computes the
// prompt, one the answer.
type Pair struct {
	Prefill Decision // of the prompt; nothing where the request stays whole
	Decode  Decision // of the answer, or of the whole request
	Whole   string   // why it stays whole: one of the constants, or PairRule.Whole; empty: it does not
}

// Why a request stays whole, beside what PairRule.Whole gives.
const (
	WholeNoPair = "no_pair" // no two workers are up that can share it
	WholeShort  = "short"   // too few tokens of its prompt to compute
)

// PairRule is the condition under which a request stays whole.
type PairRule struct {
	LeastUncached int    // fewest prompt tokens to be computed for which two workers share it
	Whole         string // why it is to stay whole wherever a worker takes whole requests; empty: it is not
	Enforce       bool   // ErrNoPair where it stays whole only because no two workers are up, as where its prefill worker is pinned
}

// End ends the pair's bookings that have not ended: no worker is at fault.
func (p Pair) End() {
	for _, b := range []*Booking{p.Prefill.Booking, p.Decode.Booking} {
		if b != nil {
			b.End()
		}
	}
}

// Took returns the decision whose times count for the whole pair: the first one,
// with the schedule and queue times of the second added.
func (p Pair) Took() Decision {
	if p.Whole != "" {
		return p.Decode
	}
	d := p.Prefill
	d.ScheduleTime += p.Decode.ScheduleTime
	d.QueueTime += p.Decode.QueueTime
	return d
}

// Paired reports whether any worker that is up computes only prompts or only
// answers: else RoutePair splits nothing.
func (r *Router) Paired() bool { return r.paired.Load() }

// notePairs updates what Paired returns. It is called with every change of the
// workers, under the lock.
func (r *Router) notePairs() {
	r.paired.Store(slices.ContainsFunc(r.targets, func(t kv.Target) bool { return t.Role != kv.RoleBoth }))
}

// RoutePair is Route for a request that two workers may share: one computes the
// prompt, chosen as Route does, the other the answer, chosen by load alone, and
// both are booked. The request stays whole, and goes where Route sends it, where
// no such two workers are up; and, if a worker takes it whole, where the rule
// says so. Unless the request is QueryOnly or ChooseOnly, the caller must end both
// bookings. Of Request.Kinds only those share it; Leg is set here.
func (r *Router) RoutePair(ctx context.Context, request Request, rule PairRule) (Pair, error) {
	scratch := r.scratch.Get().(*workspace)
	defer r.scratch.Put(scratch)
	p, looked := r.lookUp(request, scratch)
	c := r.pairings(&p, rule.Enforce)
	pair := Pair{}
	switch {
	case rule.Whole != "" && (c.whole || c.kinds == 0):
		pair.Whole = rule.Whole
	case c.kinds == 0:
		pair.Whole = WholeNoPair
	case !c.whole, p.PinnedPrefill != nil:
	case p.tokens > 0 && c.uncached < rule.LeastUncached:
		pair.Whole = WholeShort
	}
	var err error
	if pair.Whole == "" {
		prefill := p
		prefill.ID, prefill.Leg, prefill.Kinds, prefill.Pinned = "", kv.LegPrefill, c.kinds, p.PinnedPrefill
		prefill.ExpectedOutput, prefill.AnsweredWhole = 1, false
		if pair.Prefill, err = r.place(ctx, &prefill, looked); err == nil {
			decode := p.decodeLeg(pair.Prefill.Target)
			if pair.Decode, err = r.place(ctx, &decode, Decision{}); err == nil {
				return pair, nil
			}
			pair.End()
		}
		if !errors.Is(err, ErrNoWorker) {
			return Pair{}, err
		}
		pair = Pair{Whole: WholeNoPair} // one of them has just gone
	}
	if pair.Whole == WholeNoPair && (rule.Enforce || p.PinnedPrefill != nil) {
		return Pair{}, ErrNoPair
	}
	p.Leg, p.Kinds = kv.LegWhole, 0
	if pair.Decode, err = r.place(ctx, &p, looked); err != nil {
		return Pair{}, err
	}
	return pair, nil
}

// decodeLeg returns what p is to the worker that computes its answer: it has
// nothing to compute of the prompt, and gets all of its blocks.
func (p *prompt) decodeLeg(prefill kv.Target) prompt {
	leg := *p
	no, none := false, 0
	override := policy.Override{}
	if p.Override != nil {
		override = *p.Override
	}
	override.TrackPrefillTokens = &no
	leg.Leg, leg.Kinds, leg.Override, leg.Cached = kv.LegDecode, kv.KindsOf(prefill.Kind), &override, &none
	leg.shared, leg.Prefix = false, hints.Prefix{}
	return leg
}

// pairings says which workers could serve a request.
type pairings struct {
	kinds    kv.Kinds // of which two workers are up that can share it
	whole    bool     // a worker takes it whole
	uncached int      // prompt tokens to be computed by the one of those that has most of it
}

// pairings returns the workers up that could serve p. While all prefill
// workers are out for their failures, none could, unless that is enforced or no
// worker takes p whole.
func (r *Router) pairings(p *prompt, enforce bool) pairings {
	r.mu.Lock()
	defer r.unlock()
	now := r.now()
	var could pairings
	var prefill, well, decode kv.Kinds
	most := 0
	whole, first, second := *p, *p, *p
	whole.Kinds, whole.Leg, first.Leg, second.Leg = 0, kv.LegWhole, kv.LegPrefill, kv.LegDecode
	first.Pinned = p.PinnedPrefill
	r.snapshot(p)
	for i := range r.targets {
		t := &r.targets[i]
		if whole.mayUse(t) {
			var c policy.Candidate
			r.candidate(&c, p, i, now)
			could.whole, most = true, max(most, c.Overlap)
		}
		if first.mayUse(t) {
			prefill |= kv.KindsOf(t.Kind)
			if !r.isOut(t, now) {
				well |= kv.KindsOf(t.Kind)
			}
		}
		if second.mayUse(t) {
			decode |= kv.KindsOf(t.Kind)
		}
	}
	if could.whole && !enforce && p.PinnedPrefill == nil && well&decode == 0 {
		prefill = 0
	}
	could.kinds, could.uncached = prefill&decode, p.tokens-most*r.blockSize
	return could
}
