package main

import (
	"context"
	"errors"
	"slices"
)

// Pair is where a request goes whose prompt and answer may be computed by two
// workers.
type Pair struct {
	Prefill Decision // of the prompt; nothing where the request stays whole
	Decode  Decision // of the answer, or of the whole request
	Whole   string   // why it stays whole: one of the constants; empty: it does not
}

// Why a request stays whole.
const (
	wholeNoPair = "no_pair" // no two workers are up that can share it
	wholeShort  = "short"   // too few tokens of its prompt are to be computed
)

// End ends what is booked for the pair: nobody is to blame.
func (p Pair) End() {
	for _, b := range []*Booking{p.Prefill.Booking, p.Decode.Booking} {
		if b != nil {
			b.End()
		}
	}
}

// Paired tells whether any worker that is up computes only prompts or only
// answers, so that RoutePair may split a request.
func (r *Router) Paired() bool { return r.paired.Load() }

// notePairs is called with every change of the workers.
func (r *Router) notePairs() {
	r.paired.Store(slices.ContainsFunc(r.targets, func(t Target) bool { return t.Role != RoleBoth }))
}

// RoutePair is Route for a request that two workers may share: one computes the
// prompt, chosen as Route does, the other the answer, chosen by load alone, and
// both are booked. The request stays whole where no such two are up, or where
// fewer than leastUncached tokens of its prompt are to be computed by the worker
// that may take it whole and has most of it; it goes then where Route sends it.
// Unless the request is QueryOnly or Unbooked, the caller must end both
// bookings. Request.Leg and Kinds are set here.
func (r *Router) RoutePair(ctx context.Context, request Request, leastUncached int) (Pair, error) {
	scratch := r.scratch.Get().(*lookup)
	defer r.scratch.Put(scratch)
	p, looked := r.lookUp(request, scratch)
	kinds, uncached := r.pairings(&p)
	pair := Pair{}
	switch {
	case kinds == 0:
		pair.Whole = wholeNoPair
	case uncached < leastUncached:
		pair.Whole = wholeShort
	}
	var err error
	if pair.Whole == "" {
		prefill := p
		prefill.ID, prefill.Leg, prefill.Kinds = "", LegPrefill, kinds
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
		pair = Pair{Whole: wholeNoPair} // one of them has just gone
	}
	p.Leg, p.Kinds = LegWhole, 0
	pair.Decode, err = r.place(ctx, &p, looked)
	return pair, err
}

// decodeLeg returns what p is to the worker that computes its answer: it has
// nothing to compute of the prompt, and gets all of its blocks.
func (p *inquiry) decodeLeg(prefill Target) inquiry {
	leg := *p
	no, none := false, 0
	override := Override{}
	if p.Override != nil {
		override = *p.Override
	}
	override.AssumeKVReuse, override.TrackPrefillTokens = &no, &no
	leg.Leg, leg.Kinds, leg.Override, leg.Cached = LegDecode, kindsOf(prefill.Kind), &override, &none
	leg.Exclude = append(slices.Clone(p.Exclude), prefill.Key.Worker)
	leg.shared, leg.sequence, leg.Sequence = false, nil, nil
	return leg
}

// pairings returns the kinds of which two workers are up that can share p, one
// of them made for its part, and how many tokens of the prompt are to be
// computed by the worker that may take p whole and has most of it.
func (r *Router) pairings(p *inquiry) (kinds Kinds, uncached int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := r.now()
	var prefill, decode, prefillOnly, decodeOnly Kinds
	most := 0
	leg := *p
	for i := range r.targets {
		t := &r.targets[i]
		if leg.Leg = LegWhole; leg.mayUse(t) {
			c := r.candidate(p, t, now)
			most = max(most, c.Overlap)
		}
		of := kindsOf(t.Kind)
		if leg.Leg = LegPrefill; leg.mayUse(t) {
			prefill |= of
			if t.Role == RolePrefill {
				prefillOnly |= of
			}
		}
		if leg.Leg = LegDecode; leg.mayUse(t) {
			decode |= of
			if t.Role == RoleDecode {
				decodeOnly |= of
			}
		}
	}
	return prefillOnly&decode | decodeOnly&prefill, p.tokens - most*r.blockSize
}
