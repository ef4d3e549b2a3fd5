package router

import (
	"context"
	"errors"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/prompt/hints"
)

// ErrNoPair means that a request must be disaggregated, but no prefill worker with
// a compatible decode worker is up.
var ErrNoPair = errors.New("no compatible prefill and decode workers are up")

// Pair is the decision on a request that may be disaggregated: one worker computes
// the prompt, another the answer.
type Pair struct {
	Prefill Decision // of the prompt; empty if the request is aggregated
	Decode  Decision // of the answer, or of the aggregated request
	Whole   string   // reason why it is aggregated: one of the constants, or PairRule.Whole; empty: it is disaggregated
}

// Reasons why a request is aggregated, in addition to PairRule.Whole.
const (
	WholeNoPair = "no_pair" // no compatible pair of workers is up
	WholeShort  = "short"   // too few uncached prompt tokens
)

// PairRule is the condition under which a request is aggregated.
type PairRule struct {
	LeastUncached int    // minimum number of uncached prompt tokens for disaggregation
	Whole         string // reason to aggregate it if a worker serves aggregated requests; empty: none
	Enforce       bool   // return ErrNoPair instead of aggregating a request for lack of a pair, as with a pinned prefill worker
}

// End ends the pair's remaining bookings; no worker has failed.
func (p Pair) End() {
	for _, b := range []*Booking{p.Prefill.Booking, p.Decode.Booking} {
		if b != nil {
			b.End()
		}
	}
}

// Took returns the decision with the times of both: the first one, with the
// schedule and queue times of the second added.
func (p Pair) Took() Decision {
	if p.Whole != "" {
		return p.Decode
	}
	d := p.Prefill
	d.ScheduleTime += p.Decode.ScheduleTime
	d.QueueTime += p.Decode.QueueTime
	return d
}

// Paired reports whether any worker that is up has the role prefill or decode;
// otherwise RoutePair disaggregates nothing.
func (r *Router) Paired() bool { return r.fleet.paired.Load() }

// RoutePair is Route for a request that may be disaggregated. The prefill worker is
// chosen as by Route, the decode worker by load alone, and both are booked. The
// request is aggregated, and routed by Route, if no compatible pair is up, or if
// the rule says so and a worker serves aggregated requests. Unless the request is
// QueryOnly or ChooseOnly, the caller must end both bookings. Request.Kinds
// restricts the pair; Leg is set here.
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
				pair.moveSession(&prefill)
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
	leg.Sheddable = false // its prompt is computed, or soon will be
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
	least := p.tokens
	whole, first, second := p.Request, p.Request, p.Request
	whole.Kinds, whole.Leg, first.Leg, second.Leg = 0, kv.LegWhole, kv.LegPrefill, kv.LegDecode
	first.Pinned = p.PinnedPrefill
	r.decider.snapshot(p, now)
	for i := range r.fleet.targets {
		t := &r.fleet.targets[i]
		if whole.mayUse(t) {
			var c policy.Candidate
			r.decider.candidate(&c, p, i)
			could.whole, least = true, min(least, r.decider.uncached(p, &c))
		}
		if first.mayUse(t) {
			prefill |= kv.KindsOf(t.Kind)
			if !r.Health.isOut(t, now) {
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
	could.kinds, could.uncached = prefill&decode, least
	return could
}
